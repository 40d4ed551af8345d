"""What a parallel strategy is: one attention function and one MLP function over one shared layout.

A strategy knows tensors, weight shards and a process group. It knows nothing of Megatron, of plans
or of other strategies.

Legend, used by every file beside this one:

    s  sequence length          b  batch             h  hidden size
    n  query heads              g  key/value heads   d  head dim
    f  ffn size                 p  group size        r  rank in the group

The resident layout, the same for every strategy, so that switching moves nothing:

    activations  [s/p, b, h]           rank r holds the r-th contiguous chunk of the sequence, or
                                       of packed documents the positions of Microbatch.shards[r]
                                       (over the w ranks of a Wide: [s/w, b, h])
    qkv          [(n + 2g) d / p, h]   rows of Megatron's linear_qkv: for each key/value head its
                                       n/g query heads, then its key head, then its value head;
                                       or, gated, [(2n + 2g) d / p, h]: gates of as many heads
                                       between queries and key (output_gate.py)
    proj         [h, n d / p]          columns of Megatron's linear_proj
    fc1          [f / p, h]            or, gated, [2 f / p, h]: the rank's gate rows, then up rows
    fc2          [h, f / p]

Each function returns [s/p, b, h], and its backward returns the complete gradient of the rank's
own shards. The output biases of proj and fc2 are not a strategy's business: Megatron adds them
after. Parameters that every rank holds whole (query/key norms) get the partial sum over the rank's
share of the work, as Megatron's sequence parallelism expects.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from megatron_paradyse.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

Shards = tuple[tuple[tuple[int, int], ...], ...]  # of each rank, ranges of positions


@dataclass(frozen=True)
class LatentSizes:
    """Channels of an attention over latents (latents.py): of c_kv, and of each head."""

    keys: int  # of c_kv; c_q has what c_kv and c_pe leave of the input
    content: int  # of a query or key without positions
    positions: int  # of c_pe, and of each query beside its content
    value: int

    @property
    def head_dim(self) -> int:
        return max(self.content + self.positions, self.value)


@dataclass(frozen=True)
class AttentionShape:
    """What is fixed about a layer's attention for the whole run."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool
    softmax_scale: float
    window: int | None = None  # keys visible to a query, itself included; None: all
    dropout: float = 0.0
    rope_interleaved: bool = False
    rope_scale: float = 1.0  # of rotated channels: the attention factor of YaRN
    qk_norm: str | None = None  # None, "layernorm", "rmsnorm" or "l2"
    qk_norm_eps: float = 1e-5
    qk_norm_plus_one: bool = False  # the norm's weight is stored less one
    latent: LatentSizes | None = None  # x are latents, of which weights.qkv and kv_up make heads
    output_gate: bool = False  # qkv has a gate for each query head's output (output_gate.py)

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                "attention needs n % g == 0 (query heads share key/value heads evenly), "
                f"got n={self.num_heads}, g={self.num_kv_heads}"
            )
        if self.window is not None and (self.window < 1 or not self.causal):
            raise UserError(
                "a sliding window needs causal attention and at least 1 key, "
                f"got window={self.window}, causal={self.causal}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"attention dropout lies in [0, 1), got {self.dropout}")
        if self.qk_norm not in (None, "layernorm", "rmsnorm", "l2"):
            raise UserError(f"qk_norm is layernorm, rmsnorm or l2, got {self.qk_norm!r}")
        assert not (self.output_gate and self.latent), "Megatron has no gates of latent attention"

    @property
    def heads_per_group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def qkv_size(self) -> int:
        """Rows of the full qkv weight: (n + 2g) d, with gates (2n + 2g) d."""
        return self.num_kv_heads * sum(self.slot(self.heads_per_group)) * self.head_dim

    def slot(self, num_queries: int) -> tuple[int, ...]:
        """Heads of qkv around a key head: of queries, of gates if there are any, key and value."""
        return (num_queries, *([num_queries] * self.output_gate), 1, 1)


def check_layout(shape: AttentionShape, p: int) -> None:
    """Raise UserError unless the attention's weights split evenly over p ranks."""
    n, g, d = shape.num_heads, shape.num_kv_heads, shape.head_dim
    if shape.qkv_size % p or n * d % p:
        rows = "(2n + 2g)" if shape.output_gate else "(n + 2g)"
        raise UserError(
            f"the layout needs {rows} d % p == 0 and n d % p == 0, "
            f"got n={n}, g={g}, d={d}, p={p}: use a p that divides both"
        )


def check_whole_heads(strategy: str, shape: AttentionShape, p: int) -> None:
    """Raise UserError unless besides the query heads split into p parts of whole ones."""
    check_layout(shape, p)
    n = shape.num_heads
    if n % p:
        fitting = math.gcd(n, p)
        remedy = f"use megatron_cz, or p={fitting}" if fitting > 1 else "use megatron_cz"
        raise UserError(f"{strategy} needs n % p == 0, got n={n}, p={p}: {remedy}")


@dataclass(frozen=True)
class MlpShape:
    """What is fixed about a layer's MLP for the whole run."""

    activation: Callable[[Tensor], Tensor]  # elementwise
    gated: bool


@dataclass(frozen=True)
class AttentionWeights:
    """The rank's shards of one attention; see the module's docstring for their layout."""

    qkv: Tensor
    proj: Tensor
    qkv_bias: Tensor | None = None  # [(n + 2g) d / p], or as many as qkv has rows
    q_norm: Tensor | None = None  # [d], held by every rank
    q_norm_bias: Tensor | None = None
    k_norm: Tensor | None = None
    k_norm_bias: Tensor | None = None
    softmax_offset: Tensor | None = None  # [n / p], logits of a key without a value, by head
    kv_up: Tensor | None = None  # of c_kv, where qkv is of c_q and makes queries alone (latents.py)


@dataclass(frozen=True)
class MlpWeights:
    """The rank's shards of one MLP; see the module's docstring for their layout."""

    fc1: Tensor
    fc2: Tensor
    fc1_bias: Tensor | None = None  # [f / p], or gated [2 f / p]: gate, then up


@dataclass(frozen=True)
class Wide:
    """Several groups that share a microbatch; each has all weights, in shards of its own.

    ranks: of all groups, one group after the other. peers: the ranks at the same place of each
    group, in the order of the groups.
    """

    ranks: ProcessGroup
    peers: ProcessGroup


@dataclass(frozen=True)
class Microbatch:
    """What is known of one microbatch, alike on every rank of the group.

    documents: None when each of the b sequences is one document of s tokens; else, for each
        sequence, its documents as (start, stop) token ranges: ascending, disjoint, within [0, s).
        Attention does not cross documents. A token in no document is padding: nobody attends to
        it and its own attention output is zero.
    shards: None when rank r holds the r-th contiguous chunk of the positions; else, for each of
        the p ranks, the ranges of positions that its s/p rows hold, in the order of the rows.
        Every position is held once. Then exchanges follow the documents: what no document needs
        moves nowhere.
    rope: angles [s, d_rot] of the s global positions in float32 (d_rot <= d), or None. Their
        cosine and sine, times rope_scale, rotate the first d_rot channels of each query and key
        head. Where angles restart at each document, row i has those of position i's place in its
        document.
    dropout_seed: with global indices (sequence, head, query, key) it decides what attention
        dropout drops, so that every strategy, p and recomputation drops the same.
    wide: None when the microbatch lies on the ranks among which the weights are sharded; else it
        has shards for the ranks of several such groups. Weights stay within each group; what
        attention needs of tokens elsewhere crosses them.
    """

    seq_length: int
    batch_size: int
    documents: tuple[tuple[tuple[int, int], ...], ...] | None = None
    shards: Shards | None = None
    rope: Tensor | None = None
    dropout_seed: int = 0
    wide: Wide | None = None

    def __post_init__(self) -> None:
        assert self.wide is None or self.shards is not None, "a wide microbatch has shards"

    def sequence_group(self, group: ProcessGroup) -> ProcessGroup:
        """The ranks that hold its rows, given those among which the weights are sharded."""
        return group if self.wide is None else self.wide.ranks

    def shards_of_group(self, index: int | None = None) -> Shards | None:
        """Those of one of the groups of a wide one, None: of this rank's; of another all."""
        if self.wide is None or self.shards is None:
            return self.shards
        index = self.wide.peers.rank() if index is None else index
        size = len(self.shards) // self.wide.peers.size()
        return self.shards[index * size : (index + 1) * size]


AttentionFunction = Callable[
    ["Tensor", AttentionWeights, AttentionShape, Microbatch, "ProcessGroup"], "Tensor"
]
MlpFunction = Callable[["Tensor", MlpWeights, MlpShape, "ProcessGroup"], "Tensor"]


@dataclass(frozen=True)
class Strategy:
    """One entry of the registry.

    check(shape, p) raises UserError with the rule, the values and the remedy when this strategy
    cannot run such an attention on p ranks.
    takes(microbatch, p) says whether it can run the microbatch; None: it can run any.
    tiled_mlp: the MLP that recomputes on long sequences; None: mlp, tile by tile (tiled_mlp.py).
    takes_offset: whether attention heeds AttentionWeights.softmax_offset.
    takes_latents: whether attention heeds AttentionShape.latent.
    takes_gate: whether attention heeds AttentionShape.output_gate.
    takes_wide: whether attention heeds Microbatch.wide.
    """

    name: str  # as code and flags write it: megatron_ts
    title: str  # as the paper writes it: MegatronTS
    attention: AttentionFunction
    mlp: MlpFunction
    check: Callable[[AttentionShape, int], None]
    takes: Callable[[Microbatch, int], bool] | None = None
    tiled_mlp: MlpFunction | None = None
    takes_offset: bool = False
    takes_latents: bool = False
    takes_gate: bool = False
    takes_wide: bool = False


def documents_stay(microbatch: Microbatch, p: int) -> bool:
    """Whether each document lies on one of the p ranks: then attention needs no other rank."""
    if p == 1 or microbatch.documents is None:
        return p == 1
    size = microbatch.seq_length // p
    shards = microbatch.shards or tuple(((r * size, (r + 1) * size),) for r in range(p))
    return _stay(microbatch.documents, shards)


@lru_cache(maxsize=64)
def _stay(documents, shards) -> bool:
    held = sorted((start, rank) for rank, shard in enumerate(shards) for start, _ in shard)
    starts = [start for start, _ in held]
    for start, stop in itertools.chain.from_iterable(documents):
        first, last = bisect_right(starts, start) - 1, bisect_left(starts, stop)
        if len({rank for _, rank in held[first:last]}) > 1:
            return False
    return True
