"""One attention or MLP case: random full weights, a strategy on shards, the float64 oracle."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from megatron_paradyse.packing.row import Row
from megatron_paradyse.strategies import get_strategy
from megatron_paradyse.strategies.contract import (
    AttentionShape,
    AttentionWeights,
    Microbatch,
    MlpShape,
    MlpWeights,
)
from megatron_paradyse.strategies.reference import (
    map_tensors,
    reference_attention,
    reference_mlp,
    shard_attention,
    shard_mlp,
)

MASKS = ("causal", "bidirectional", "padded", "padded_causal", "packed", "packed_causal")


@dataclass(frozen=True)
class AttentionCase:
    strategy: str
    p: int
    mask: str = "causal"
    n: int = 4
    g: int = 4
    d: int = 8
    h: int = 24
    s: int = 24
    b: int = 2
    bias: bool = False
    rope: str | None = None  # None, "half", "interleaved", "partial"
    qk_norm: str | None = None
    window: int | None = None
    dropout: float = 0.0
    dtype: torch.dtype = torch.float32
    query_scale: float = 1.0  # multiplies the scores
    row: Row | None = None  # packed documents: of s tokens, b is 1

    @property
    def name(self) -> str:
        """The fields that differ from the default, for a test's id."""
        parts = [self.strategy, f"p{self.p}", self.mask, f"n{self.n}g{self.g}"]
        for field in fields(self)[5:]:
            value = getattr(self, field.name)
            if value != field.default and field.name != "row":
                parts.append(f"{field.name}={str(value).removeprefix('torch.')}")
        return "-".join(parts)

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(
            num_heads=self.n,
            num_kv_heads=self.g,
            head_dim=self.d,
            causal=self.mask.endswith("causal"),
            softmax_scale=self.query_scale / math.sqrt(self.d),
            window=self.window,
            dropout=self.dropout,
            rope_interleaved=self.rope == "interleaved",
            qk_norm=self.qk_norm,
        )


@dataclass(frozen=True)
class MlpCase:
    strategy: str
    p: int
    gated: bool = False
    bias: bool = False
    h: int = 24
    f: int = 48
    s: int = 24
    b: int = 2
    dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        parts = [self.strategy, f"p{self.p}", "swiglu" if self.gated else "gelu"]
        parts += ["bias"] * self.bias
        parts += [str(self.dtype).removeprefix("torch.")] * (self.dtype != torch.float32)
        return "-".join(parts)

    @property
    def shape(self) -> MlpShape:
        return MlpShape(activation=F.silu if self.gated else F.gelu, gated=self.gated)


@dataclass(frozen=True)
class Deviation:
    """Squared norms and maxima of a difference and of the truth: of a shard, or of all together."""

    error_square: float
    truth_square: float
    error_max: float
    truth_max: float
    finite: bool = True

    @property
    def by_norm(self) -> float:
        """||got - truth|| / ||truth||."""
        return math.sqrt(_ratio(self.error_square, self.truth_square)) if self.finite else math.inf

    @property
    def relative(self) -> float:
        """The worse of the norm-wise and the max-wise relative error."""
        return max(self.by_norm, _ratio(self.error_max, self.truth_max))


def _ratio(error: float, truth: float) -> float:
    if truth == 0.0:
        return 0.0 if error == 0.0 else math.inf
    return error / truth


def deviation(got: Tensor, truth: Tensor) -> Deviation:
    assert got.shape == truth.shape, (got.shape, truth.shape)
    truth = truth.double().cpu()
    error = got.double().cpu() - truth
    return Deviation(
        error.square().sum().item(),
        truth.square().sum().item(),
        error.abs().max().item(),
        truth.abs().max().item(),
        bool(got.isfinite().all()),
    )


def combine(by_rank: list[dict[str, Deviation]]) -> dict[str, Deviation]:
    """The deviation of each whole tensor, from its shards' deviations."""
    whole = {}
    for name in by_rank[0]:
        parts = [result[name] for result in by_rank]
        whole[name] = Deviation(
            sum(part.error_square for part in parts),
            sum(part.truth_square for part in parts),
            max(part.error_max for part in parts),
            max(part.truth_max for part in parts),
            all(part.finite for part in parts),
        )
    return whole


def documents_of(mask: str, s: int, b: int):
    """Per sequence: valid lengths that differ when padded; when packed, documents and padding."""
    if mask.startswith("padded"):
        return tuple(((0, s - 1 - 5 * i % s),) for i in range(b))
    if mask.startswith("packed"):
        cuts = [(0, s // 5, s // 2 + 1, s), (1, s // 3, 2 * s // 3, s - 2)]
        return tuple(tuple(zip(cuts[i % 2][:-1], cuts[i % 2][1:], strict=True)) for i in range(b))
    return None


def microbatch_of(case: AttentionCase, device: str = "cpu") -> Microbatch:
    rope = None
    if case.rope is not None:
        d_rot = case.d // 2 if case.rope == "partial" else case.d
        frequency = 10.0 ** (-torch.arange(d_rot // 2) / (d_rot // 2))
        angles = places_of(case)[:, None] * frequency
        if case.rope == "interleaved":
            rope = angles.repeat_interleave(2, dim=1)
        else:
            rope = torch.cat((angles, angles), dim=1)
    microbatch = Microbatch(
        seq_length=case.s,
        batch_size=case.b,
        documents=documents_of(case.mask, case.s, case.b),
        rope=None if rope is None else rope.to(device),
        dropout_seed=1234567890123,
    )
    if case.row is None:
        return microbatch
    return replace(microbatch, documents=(case.row.documents,), shards=case.row.shards)


def places_of(case: AttentionCase) -> Tensor:
    """The place of each of the s positions in its document; 0 in the padding of a row."""
    if case.row is None:
        return torch.arange(case.s)
    places = torch.zeros(case.s, dtype=torch.long)
    for start, stop in case.row.documents:
        places[start:stop] = torch.arange(stop - start)
    return places


def positions_of(case: AttentionCase | MlpCase, p: int, rank: int) -> Tensor:
    """The positions that the rank's rows hold, in their order."""
    if isinstance(case, AttentionCase) and case.row is not None:
        return torch.cat([torch.arange(*held) for held in case.row.shards[rank]])
    return torch.arange(case.s).chunk(p)[rank]


def full_weights(case: AttentionCase | MlpCase, random: torch.Generator):
    """Weights in float64, already rounded to the case's dtype."""

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(*size, generator=random, dtype=torch.float64) * scale
        return values.to(case.dtype).double()

    if isinstance(case, MlpCase):
        rows = 2 * case.f if case.gated else case.f
        return MlpWeights(
            fc1=normal(rows, case.h, scale=case.h**-0.5),
            fc2=normal(case.h, case.f, scale=case.f**-0.5),
            fc1_bias=normal(rows) if case.bias else None,
        )
    rows = case.shape.qkv_size
    norm = case.qk_norm in ("layernorm", "rmsnorm")
    norm_bias = case.qk_norm == "layernorm"
    return AttentionWeights(
        qkv=normal(rows, case.h, scale=case.h**-0.5),
        proj=normal(case.h, case.n * case.d, scale=(case.n * case.d) ** -0.5),
        qkv_bias=normal(rows) if case.bias else None,
        q_norm=normal(case.d) if norm else None,
        q_norm_bias=normal(case.d) if norm_bias else None,
        k_norm=normal(case.d) if norm else None,
        k_norm_bias=normal(case.d) if norm_bias else None,
    )


def inputs_of(case: AttentionCase | MlpCase):
    """Full x, full gradient of the output and full weights, in float64, the same on every rank."""
    random = torch.Generator().manual_seed(zlib.crc32(replace(case, strategy="").name.encode()))
    x, grad = (
        torch.randn(case.s, case.b, case.h, generator=random, dtype=torch.float64)
        .to(case.dtype)
        .double()
        for _ in range(2)
    )
    return x, grad, full_weights(case, random)


def _run_and_differentiate(function, x: Tensor, weights, grad: Tensor):
    """Output, gradient of x and gradients of the weights by name."""
    x = x.detach().clone().requires_grad_()
    weights = map_tensors(weights, lambda t: t.detach().clone().requires_grad_())
    names = [f.name for f in fields(weights) if getattr(weights, f.name) is not None]
    output = function(x, weights)
    output.backward(grad)
    return output.detach(), x.grad, {name: getattr(weights, name).grad for name in names}


def run_reference(case: AttentionCase | MlpCase, dtype: torch.dtype, device: str = "cpu"):
    """The single-process layer in `dtype`: output, input gradient, weights of gradients."""
    x, grad, weights = inputs_of(case)
    x, grad = x.to(device), grad.to(device)

    def function(x, weights):
        if isinstance(case, MlpCase):
            return reference_mlp(x, weights, case.shape)
        return reference_attention(x, weights, case.shape, microbatch_of(case, device))

    weights = map_tensors(weights, lambda t: t.to(device, dtype))
    output, grad_x, grads = _run_and_differentiate(function, x.to(dtype), weights, grad.to(dtype))
    return output, grad_x, replace(weights, **grads)


def run_documents_one_by_one(case: AttentionCase):
    """As run_reference, in float64, each document of the row alone in a microbatch of its own."""
    assert case.row is not None
    x, grad, weights = inputs_of(case)
    rope = microbatch_of(case).rope
    output, grad_x = torch.zeros_like(x), torch.zeros_like(x)
    totals = map_tensors(weights, torch.zeros_like)
    for start, stop in case.row.documents:
        alone = Microbatch(stop - start, 1, rope=None if rope is None else rope[start:stop])

        def function(x, weights, alone=alone):
            return reference_attention(x, weights, case.shape, alone)

        held = slice(start, stop)
        output[held], grad_x[held], grads = _run_and_differentiate(
            function, x[held], weights, grad[held]
        )
        for name, part in grads.items():
            getattr(totals, name).add_(part)
    return output, grad_x, totals


@dataclass
class RankLayer:
    """A case as one rank sees it: its shards, in the case's dtype, and the layer of them."""

    x: Tensor
    weights: AttentionWeights | MlpWeights
    grad: Tensor
    microbatch: Microbatch | None
    run: Callable[[Tensor, AttentionWeights | MlpWeights], Tensor]


def shard_of(case: AttentionCase | MlpCase, weights, p: int, rank: int):
    if isinstance(case, MlpCase):
        return shard_mlp(weights, case.shape, p, rank)
    return shard_attention(weights, p, rank)


def rank_layer(group, case: AttentionCase | MlpCase, device: str = "cpu") -> RankLayer:
    """Raises if the strategy refuses the case. Tensors are leaves that require gradients."""
    p, rank = group.size(), group.rank()
    strategy = get_strategy(case.strategy)
    x, grad, weights = inputs_of(case)
    shards = shard_of(case, weights, p, rank)
    microbatch = None if isinstance(case, MlpCase) else microbatch_of(case, device)

    def run(x, weights):
        if isinstance(case, MlpCase):
            return strategy.mlp(x, weights, case.shape, group)
        strategy.check(case.shape, p)
        return strategy.attention(x, weights, case.shape, microbatch, group)

    def local(t: Tensor) -> Tensor:
        return t.to(device, case.dtype, copy=True)

    mine = positions_of(case, p, rank)
    return RankLayer(
        local(x[mine]).requires_grad_(),
        map_tensors(shards, lambda t: local(t).requires_grad_()),
        local(grad[mine]),
        microbatch,
        run,
    )


def run_case(
    group, case: AttentionCase | MlpCase, device: str = "cpu", *, layer: RankLayer | None = None
) -> dict[str, Deviation]:
    """Deviations of this rank's part on `device` from the float64 oracle on the CPU, by tensor."""
    p, rank = group.size(), group.rank()
    layer = layer or rank_layer(group, case, device)
    output, grad_x, grads = _run_and_differentiate(layer.run, layer.x, layer.weights, layer.grad)
    for name in grads:
        if "norm" in name:  # partial sums, which Megatron adds up over the group
            grads[name] = grads[name].double().cpu()
            dist.all_reduce(grads[name], group=group)
    if isinstance(case, AttentionCase) and case.row is not None and not case.dropout:
        true_output, true_grad_x, true_grads = run_documents_one_by_one(case)
    else:
        true_output, true_grad_x, true_grads = run_reference(case, torch.float64)
    truth, mine = shard_of(case, true_grads, p, rank), positions_of(case, p, rank)
    return {
        "output": deviation(output, true_output[mine]),
        "x": deviation(grad_x, true_grad_x[mine]),
    } | {name: deviation(grads[name], getattr(truth, name)) for name in grads}


def errors_of_one_process(case, device: str = "cpu") -> dict[str, float]:
    """Errors by norm of the single-process layer in the case's dtype against float64."""
    output, grad_x, grads = run_reference(case, case.dtype, device)
    true_output, true_grad_x, true_grads = run_reference(case, torch.float64)
    pairs = {"output": (output, true_output), "x": (grad_x, true_grad_x)} | {
        name: (getattr(grads, name), truth)
        for name, truth in vars(true_grads).items()
        if truth is not None
    }
    return {name: deviation(*pair).by_norm for name, pair in pairs.items()}
