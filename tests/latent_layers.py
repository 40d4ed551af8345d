"""A latent attention on ranks, by a strategy, and as one process in float64 would compute it."""

from __future__ import annotations

import functools
import itertools
import math
import pickle
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor
from torch.nn import functional as F

from megatron_paradyse import layer_specs
from megatron_paradyse.microbatch_params import planned_microbatch
from megatron_paradyse.packing.row import Row
from megatron_paradyse.plan import LayerChoice, Plan
from megatron_paradyse.strategies.contract import Microbatch
from megatron_paradyse.strategies.dropout import keep_mask
from megatron_paradyse.strategies.reference import visible_pairs
from tests.train.harness import run_forked

H, N, S, B = 24, 4, 16, 2
EPS = 1e-5
SEED = 5
CASES = "cases"  # a file


@dataclass(frozen=True)
class LatentCase:
    strategy: str
    p: int
    q_rank: int | None = 12
    kv_rank: int = 8
    content: int = 6
    positions: int = 4
    value: int = 6
    rope: str = "rope"
    norm: str | None = "RMSNorm"  # of the latents
    softmax: str = "vanilla"
    window: int | None = None
    dropout: float = 0.0
    row: Row | None = None
    padded: bool = False
    dtype: torch.dtype = torch.float64
    generates: bool = False  # the output alone, token after token on all of them
    engine: bool = False  # whole down projections and norms inside linears, as TransformerEngine's

    @property
    def size(self) -> tuple[int, int]:
        return (S, B) if self.row is None else (self.row.seq_length, 1)

    @property
    def documents(self):
        if self.row is not None:
            return (self.row.documents,)
        return (((0, S - 5),), ((0, S),)) if self.padded else None

    @property
    def config(self) -> MLATransformerConfig:
        return MLATransformerConfig(
            num_layers=1, hidden_size=H, num_attention_heads=N, multi_latent_attention=True,
            q_lora_rank=self.q_rank, kv_lora_rank=self.kv_rank, qk_head_dim=self.content,
            qk_pos_emb_head_dim=self.positions, v_head_dim=self.value, rope_type=self.rope,
            rotary_scaling_factor=8.0, original_max_position_embeddings=8, mscale=0.7,
            mscale_all_dim=0.3, rotary_percent=1.0, qk_layernorm=self.norm is not None,
            normalization=self.norm or "RMSNorm", layernorm_epsilon=EPS, add_bias_linear=False,
            softmax_type=self.softmax, attention_dropout=self.dropout, hidden_dropout=0.0,
            window_size=None if self.window is None else (self.window - 1, 0),
            apply_rope_fusion=False, transformer_impl="local", use_cpu_initialization=True,
            tensor_model_parallel_size=self.p,
            sequence_parallel=self.p > 1 and not self.generates,
        )  # fmt: skip

    @functools.cached_property
    def whole(self) -> dict[str, Tensor]:
        """Input, gradient of the output, and every parameter, by Megatron's names; float64."""
        random = torch.Generator().manual_seed(7)
        s, b = self.size
        query, kv = self.content + self.positions, self.kv_rank
        shapes = {"input": (s, b, H), "grad": (s, b, H), "linear_proj.weight": (H, N * self.value)}
        if self.q_rank is None:
            shapes["linear_q_proj.weight"] = (N * query, H)
        else:
            shapes["linear_q_down_proj.weight"] = (self.q_rank, H)
            shapes["linear_q_up_proj.weight"] = (N * query, self.q_rank)
        shapes["linear_kv_down_proj.weight"] = (kv + self.positions, H)
        shapes["linear_kv_up_proj.weight"] = (N * (self.content + self.value), kv)
        for name, size in {"kv": kv, "q": self.q_rank or H}.items() if self.norm else ():
            shapes[f"{name}_layernorm.weight"] = (size,)
            if self.norm == "LayerNorm":
                shapes[f"{name}_layernorm.bias"] = (size,)
        if self.softmax == "learnable":
            shapes["core_attention.softmax_offset"] = (N,)
        made = {
            name: torch.randn(shape, generator=random, dtype=torch.float64)
            for name, shape in shapes.items()
        }
        return {n: t if t.dim() != 2 else t / math.sqrt(t.shape[1]) for n, t in made.items()}


def oracle(case: LatentCase) -> dict[str, Tensor]:
    """Output, gradient of the input and of each parameter, from the definition alone."""
    of = {name: t.clone().requires_grad_() for name, t in case.whole.items()}
    x, (s, b) = of["input"], case.size

    def norm(t: Tensor, name: str) -> Tensor:
        weight = of.get(f"{name}_layernorm.weight")
        if weight is None:
            return t
        if case.norm == "RMSNorm":
            return t * torch.rsqrt(t.square().mean(-1, keepdim=True) + EPS) * weight
        return F.layer_norm(t, t.shape[-1:], weight, of[f"{name}_layernorm.bias"], EPS)

    if case.q_rank is None:
        q = norm(x, "q") @ of["linear_q_proj.weight"].t()
    else:
        q = norm(x @ of["linear_q_down_proj.weight"].t(), "q") @ of["linear_q_up_proj.weight"].t()
    down = x @ of["linear_kv_down_proj.weight"].t()
    latent, shared = down.split((case.kv_rank, case.positions), dim=-1)
    up = norm(latent, "kv") @ of["linear_kv_up_proj.weight"].t()
    q = q.view(s, b, N, -1)
    k, v = up.view(s, b, N, -1).split((case.content, case.value), dim=-1)
    angles, factor = angles_of(case)
    q = torch.cat((q[..., : case.content], turn(q[..., case.content :], angles, factor)), -1)
    shared = turn(shared[:, :, None], angles, factor).expand(-1, -1, N, -1)
    k = torch.cat((k, shared), -1)

    module_scale = 0.1 * 0.3 * math.log(8.0) + 1.0  # of DeepSeek's mscale_all_dim
    scale = module_scale**2 / math.sqrt(case.content + case.positions)
    microbatch = Microbatch(s, b, documents=case.documents, dropout_seed=SEED * 4096 + 1)
    scores = torch.einsum("qbnd,kbnd->bnqk", q, k) * scale
    rule = _Rule(case.window)
    visible = visible_pairs(rule, microbatch)[:, None]
    blind = ~visible.any(-1, keepdim=True)
    scores = scores.masked_fill(~visible, float("-inf")).masked_fill(blind, 0.0)
    if case.softmax != "vanilla":
        offset = of.get("core_attention.softmax_offset", torch.zeros(N, dtype=x.dtype))
        scores = torch.cat((scores, offset[:, None, None].expand(b, N, s, 1)), -1)
    probs = torch.softmax(scores, -1)[..., :s].masked_fill(blind, 0.0)
    if case.dropout:
        sizes = {"sequences": b, "heads": N, "queries": s, "keys": s}
        places = {name: torch.arange(size) for name, size in sizes.items()}
        keep = keep_mask(microbatch.dropout_seed, dropout=case.dropout, **places)
        probs = probs * keep / (1.0 - case.dropout)
    out = torch.einsum("bnqk,kbnd->qbnd", probs, v).flatten(2) @ of["linear_proj.weight"].t()
    out.backward(of.pop("grad").detach())
    return {"output": out.detach(), **{name: t.grad for name, t in of.items()}}


@dataclass(frozen=True)
class _Rule:
    """What visible_pairs asks of a shape."""

    window: int | None
    causal: bool = True


def angles_of(case: LatentCase) -> tuple[Tensor, float]:
    """[s, positions / 2] of each pair of channels, in documents anew; and their factor."""
    s, _ = case.size
    place = torch.arange(s, dtype=torch.float64)
    for start, _ in case.row.documents if case.row is not None else ():
        place[start:] = torch.arange(s - start)
    pair = torch.arange(0, case.positions, 2, dtype=torch.float64)
    frequency = 10000.0 ** (-pair / case.positions)
    if case.rope == "rope":
        return place[:, None] * frequency, 1.0

    def found(rotations: float) -> float:
        """The channel that turns so often within the original length, 8."""
        return case.positions * math.log(8 / (rotations * 2 * math.pi)) / (2 * math.log(10000.0))

    low, high = max(math.floor(found(32)), 0), min(math.ceil(found(1)), case.positions - 1)
    ramp = ((pair / 2 - low) / max(high - low, 1e-3)).clamp(0, 1)
    frequency = frequency / 8.0 * ramp + frequency * (1 - ramp)
    scales = [0.1 * m * math.log(8.0) + 1.0 for m in (0.7, 0.3)]
    return place[:, None] * frequency, scales[0] / scales[1]


def turn(t: Tensor, angles: Tensor, factor: float) -> Tensor:
    """Each pair (2i, 2i + 1) of channels of t [s, b, n, d], by its angle."""
    cos, sin = (factor * f(angles)[:, None, None] for f in (torch.cos, torch.sin))
    even, odd = t[..., ::2], t[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


class PlainCore(MegatronModule):
    """Causal softmax attention for Megatron's own module, which has none without an engine."""

    def __init__(self, config, *_, softmax_scale=None, **unused):
        super().__init__(config)
        self.softmax_scale = softmax_scale

    def forward(self, query, key, value, *_, **unused):
        scores = torch.einsum("qbnd,kbnd->bnqk", query, key) * self.softmax_scale
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        probs = torch.softmax(scores.masked_fill(future, float("-inf")), -1)
        return torch.einsum("bnqk,kbnd->qbnd", probs, value).flatten(2)


def build(case: LatentCase, *, megatrons: bool = False) -> Any:
    """The module of Megatron's local spec, switchable or its own, with the rank's parameters."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(case.p)
    config = case.config
    spec = get_gpt_layer_local_submodules(
        qk_layernorm=case.norm is not None,
        multi_latent_attention=True,
        normalization=config.normalization,
    ).self_attention
    spec = layer_specs._switchable_attention(spec, config)
    if megatrons:
        spec.module = spec.module.__mro__[2]
        spec.submodules.core_attention = PlainCore
    groups = ProcessGroupCollection.use_mpu_process_groups()
    module = build_module(spec, config=config, layer_number=1, pg_collection=groups).to(case.dtype)
    for name, parameter in module.named_parameters():
        whole, dim = case.whole[_of_norm(name)], getattr(parameter, "partition_dim", 0)
        shards = whole.shape[dim] // parameter.shape[dim]
        with torch.no_grad():
            parameter.copy_(whole.chunk(shards, dim)[groups.tp.rank() % shards])
    if case.engine:
        _as_of_the_engine(module, case)
    return module


def _as_of_the_engine(module, case: LatentCase) -> None:
    """Down projections whole on every rank, norms of latents as parts of the up projections."""
    for name in ("linear_q_down_proj", "linear_kv_down_proj"):
        weight = torch.nn.Parameter(case.whole[f"{name}.weight"].clone())
        weight.sequence_parallel = case.p > 1
        getattr(module, name).weight = weight
    for name in ("q", "kv"):
        norm, linear = (
            getattr(module, f"{name}_layernorm"),
            getattr(module, f"linear_{name}_up_proj"),
        )
        linear.layer_norm_weight = norm.weight
        setattr(module, f"{name}_layernorm", torch.nn.Identity())


def run(group, case: LatentCase, *, megatrons: bool = False) -> dict[str, Tensor]:
    """What oracle() tells, of this rank: its rows, and its shards of parameters."""
    module = build(case, megatrons=megatrons)
    if case.generates:
        return {"output": _rows(_generated(module, case), case, group.rank())}
    choice = LayerChoice(case.strategy, "megatron_ts")
    padded = case.documents if case.row is None else None
    planned = planned_microbatch(None, case.row, padded, plan=Plan({1: choice}), seed=SEED)
    whole = (case.whole[name].to(case.dtype) for name in ("input", "grad"))
    x, grad = (_rows(tensor, case, group.rank()) for tensor in whole)
    x.requires_grad_()
    out, _ = module(x, None, packed_seq_params=None if megatrons else planned)
    out.backward(grad)
    found = {"output": out.detach(), "input": x.grad}
    for name, parameter in module.named_parameters():
        if getattr(parameter, "sequence_parallel", False) and case.p > 1:
            torch.distributed.all_reduce(parameter.grad, group=group)
        found[_of_norm(name)] = parameter.grad
    return found


def _of_norm(name: str) -> str:
    """Of a parameter: that of a norm, where it is inside a linear, as of one before it."""
    return re.sub(r"linear_(q|kv)(_up)?_proj\.layer_norm_", r"\1_layernorm.", name)


def _generated(module, case: LatentCase) -> Tensor:
    """[s, b, h] of a prompt, tokens after it, and one by one: each with the keys before it."""
    s, b = case.size
    context, found = StaticInferenceContext(b, s), []
    module.eval()
    for first, stop in itertools.pairwise((0, 9, 12, *range(13, s + 1))):
        x = case.whole["input"][first:stop].to(case.dtype)
        with torch.no_grad():
            found.append(module(x, None, inference_context=context)[0])
        context.increment_sequence_len_offset(stop - first)
    return torch.cat(found)


def run_cases(cases: dict[str, LatentCase], p: int, *, megatrons: bool = False) -> dict[str, list]:
    """What each of p ranks found of every case, on ranks that have Megatron imported already."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / CASES).write_bytes(pickle.dumps((cases, megatrons)))
        code, _, stderr = run_forked(
            "tests.latent_layers", [name], ranks=p, folder=folder, timeout_seconds=240
        )
        assert code == 0, stderr[-4000:]
        by_rank = [pickle.loads((folder / f"rank{r}").read_bytes()) for r in range(p)]
    return {name: [found[name] for found in by_rank] for name in cases}


def main() -> None:
    """A rank of run_cases."""
    folder = Path(sys.argv[1])
    cases, megatrons = pickle.loads((folder / CASES).read_bytes())
    torch.distributed.init_process_group("gloo")
    rank, p = torch.distributed.get_rank(), torch.distributed.get_world_size()
    group = torch.distributed.new_group(list(range(p)))
    found = {name: run(group, case, megatrons=megatrons) for name, case in cases.items()}
    (folder / f"rank{rank}").write_bytes(pickle.dumps(found))


def _rows(whole: Tensor, case: LatentCase, rank: int) -> Tensor:
    if case.row is None:
        return whole.chunk(case.p)[rank].clone()
    return torch.cat([whole[start:stop] for start, stop in case.row.shards[rank]])


def worst_error(case: LatentCase, found: list[dict[str, Tensor]]) -> tuple[float, str]:
    """Largest relative error of all ranks' parts, and of what."""
    errors = errors_of(case, found)
    worst = max(errors, key=errors.__getitem__)
    return errors[worst], worst


def errors_of(case: LatentCase, found: list[dict[str, Tensor]]) -> dict[str, float]:
    """Relative error of each tensor, the largest that a rank's part has."""
    errors: dict[str, float] = {}
    true = oracle(case)
    for name, whole in ({"output": true["output"]} if case.generates else true).items():
        for rank, part in enumerate(one[name] for one in found):
            if name in ("output", "input"):
                expected = _rows(whole, case, rank)
            else:
                dim = next((d for d in range(whole.dim()) if part.shape[d] != whole.shape[d]), 0)
                shards = whole.shape[dim] // part.shape[dim]
                expected = whole.chunk(shards, dim)[rank % shards]
            error = float((part.double() - expected).norm() / expected.norm())
            errors[name] = max(errors.get(name, 0.0), error)
    return errors
