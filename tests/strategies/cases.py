"""One attention or MLP case: its shape, its microbatch, random full weights and inputs."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_paradyse.errors import UserError
from megatron_paradyse.packing.row import Row
from megatron_paradyse.strategies import get_strategy
from megatron_paradyse.strategies.contract import (
    AttentionShape,
    AttentionWeights,
    LatentSizes,
    Microbatch,
    MlpShape,
    MlpWeights,
)

# Sums of some hundred float32 products, rounded at 6e-8 each, err by at most 1.7e-6 in these cases:
# 1e-5 leaves a factor of five.
FLOAT32_TOLERANCE = 1e-5
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
    rope: str | None = None  # None, "half", "interleaved", "partial", "scaled"
    qk_norm: str | None = None
    window: int | None = None
    dropout: float = 0.0
    dtype: torch.dtype = torch.float32
    query_scale: float = 1.0  # multiplies the scores
    offset: bool = False  # of the softmax
    gate: bool = False  # of the output
    latent: LatentSizes | None = None  # then d is of the heads made of them
    query_latents: int = 0  # channels of c_q
    tile_rows: int | None = None  # above which a sequence is long; None: those of the product
    row: Row | None = None  # packed documents: of s tokens, b is 1
    draw: int = 0  # others have other inputs

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
            rope_scale=1.3 if self.rope == "scaled" else 1.0,
            qk_norm=self.qk_norm,
            output_gate=self.gate,
            latent=self.latent,
        )

    @property
    def input_channels(self) -> int:
        if self.latent is None:
            return self.h
        return self.query_latents + self.latent.keys + self.latent.positions


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
    tile_rows: int | None = None  # as of an AttentionCase

    @property
    def name(self) -> str:
        parts = [self.strategy, f"p{self.p}", "swiglu" if self.gated else "gelu"]
        parts += ["bias"] * self.bias
        parts += [f"tiles={self.tile_rows}"] if self.tile_rows else []
        parts += [str(self.dtype).removeprefix("torch.")] * (self.dtype != torch.float32)
        return "-".join(parts)

    @property
    def shape(self) -> MlpShape:
        return MlpShape(activation=F.silu if self.gated else F.gelu, gated=self.gated)


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
        d_rot = d_rot if case.latent is None else case.latent.positions
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
    if case.latent is not None:
        of, n = case.latent, case.n
        return AttentionWeights(
            qkv=normal(n * (of.content + of.positions), case.query_latents, scale=0.1),
            kv_up=normal(n * (of.content + of.value), of.keys, scale=0.1),
            proj=normal(case.h, n * of.value, scale=0.1),
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
        softmax_offset=normal(case.n) + 1 if case.offset else None,
    )


def inputs_of(case: AttentionCase | MlpCase):
    """Full x, full gradient of the output and full weights, in float64, the same on every rank."""
    random = torch.Generator().manual_seed(zlib.crc32(replace(case, strategy="").name.encode()))
    channels = case.input_channels if isinstance(case, AttentionCase) else case.h
    x, grad = (
        torch.randn(case.s, case.b, size, generator=random, dtype=torch.float64)
        .to(case.dtype)
        .double()
        for size in (channels, case.h)
    )
    return x, grad, full_weights(case, random)


def can_run(case: AttentionCase) -> bool:
    try:
        get_strategy(case.strategy).check(case.shape, case.p)
    except UserError:
        return False
    return True
