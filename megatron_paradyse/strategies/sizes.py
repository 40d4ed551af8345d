"""The sizes of a layer and its costs, as numbers: no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, isinf, lcm

from megatron_paradyse.strategies.contract import LatentSizes
from megatron_paradyse.strategies.row_sizes import RowSizes

# One more with each change after which strategies hold other bytes of the same microbatch.
HOLDINGS = 1
# Rows of a rank in a tile of what goes in tiles of a long sequence: matrix products of so many take
# far longer than their weights take to arrive.
TILE_ROWS = 8192
# An RMSNorm on a CPU normalises so many at once: what is wider than its input is made of these.
NORM_TILE_ELEMENTS = 1 << 18
# FlashAttention's backward, in PyTorch and in its own package (version 2), sums the gradient of q
# in float32: of documents in one call with so many rows more for each.
DOCUMENT_ROWS = 128


def accumulated_head_dim(d: int) -> int:
    """Elements of a row of that sum, of one head."""
    return d + -d % (32 if d <= 128 else 64)


def positions_of_tile(batch_size: int) -> int:
    """Positions of a rank in a tile, so that there are TILE_ROWS rows or fewer."""
    return max(1, TILE_ROWS // batch_size)


def is_long(num_positions: int, batch_size: int) -> bool:
    """Whether so many positions of a rank have more rows than a tile."""
    return num_positions > positions_of_tile(batch_size)


def shortest_narrow(window: float | None, p: int) -> float:
    """The shortest sequence in which a window is narrow: in chunks as they are the fullest of p
    ranks has no more scores than with swapped halves. None: no window; infinite if there is none.

    Keys are then sent to the ranks whose queries see them. With halves swapped the fullest rank
    holds the two in the middle, the first of which begins after (p-1)/2p of the sequence.
    """
    if window is None or p == 1 or isinf(window):
        return inf
    return -(-2 * p * window // (p - 1))


def is_narrow(window: int | None, seq_length: int, p: int) -> bool:
    return seq_length >= shortest_narrow(window, p)


def qkv_rows(n: int, num_kv_heads: int, d: int, *, gate: bool) -> int:
    """Rows of linear_qkv's weight, with gates of the output or without."""
    return ((2 * n if gate else n) + 2 * num_kv_heads) * d


@dataclass(frozen=True)
class LayerSizes:
    """One layer and one microbatch; letters as in contract.py.

    row: of packed documents, with the keys that come to a rank, the ranks that it shares documents
    with, whether the rows of ranks are in the order of positions, and what the attention's kernel
    holds in a backward beside its results, over a rank's own keys and over others'; None: a
    sequence is one. flash: of a sequence, whether that kernel is FlashAttention's, whose blocks
    hold flash_bytes. head_norm: of queries and keys, "layernorm", "rmsnorm" or "l2"; fused_norms:
    whether each is one kernel, as on a GPU.
    """

    s: int
    b: int
    h: int
    n: int
    g: int
    d: int
    f: int
    p: int
    element_bytes: int = 2
    causal: bool = True
    gated: bool = False
    bias: bool = False
    rope_channels: int = 0
    offset: bool = False  # of the softmax: a logit of each head, as parameters
    gate: bool = False  # of the output, made by linear_qkv
    latent: LatentSizes | None = None  # of which g = n heads of d channels are made
    query_latents: int = 0  # channels of c_q
    row: RowSizes | None = None
    keys_received: int = 0
    peers: int = 0
    in_order: bool = True
    kernel_bytes: int = 0
    crossing_kernel_bytes: int = 0
    flash: bool = False
    head_norm: str | None = None
    fused_norms: bool = False

    @cached_property
    def positions(self) -> int:
        """Positions that a rank holds: s/p."""
        return self.s // self.p

    @cached_property
    def rows(self) -> int:
        """Rows of activations that a rank holds: s/p b."""
        return self.positions * self.b

    @cached_property
    def wide_bytes(self) -> int:
        """Bytes of an element where the code accumulates: float32, float64 for float64."""
        return max(4, self.element_bytes)

    @cached_property
    def half_type(self) -> bool:
        """Whether sums accumulate in a wider dtype than the elements'."""
        return self.wide_bytes > self.element_bytes

    @cached_property
    def x(self) -> int:
        """Bytes of one activation [s/p, b, h]."""
        return self.rows * self.h * self.element_bytes

    @cached_property
    def input(self) -> int:
        """Bytes of an attention's input: x, or latents."""
        return self.x if self.latent is None else self.latents(*self.latent_channels)

    @cached_property
    def latent_channels(self) -> tuple[int, int, int]:
        """Of c_q, c_kv and c_pe."""
        assert self.latent is not None
        return self.query_latents, self.latent.keys, self.latent.positions

    def latents(self, *channels: int) -> int:
        """Bytes of so many channels of a rank's rows."""
        return self.rows * sum(channels) * self.element_bytes

    @cached_property
    def q(self) -> int:
        return self.rows * self.n * self.d * self.element_bytes

    @cached_property
    def value_dim(self) -> int:
        """Channels of a head's output that proj takes."""
        return self.d if self.latent is None else self.latent.value

    @cached_property
    def values(self) -> int:
        """Bytes of the output that proj takes; without padding, a copy."""
        return self.q // self.d * self.value_dim

    @cached_property
    def narrow_values(self) -> bool:
        return self.value_dim < self.d

    @cached_property
    def kv(self) -> int:
        return 2 * self.rows * self.g * self.d * self.element_bytes

    @cached_property
    def kv_heads_sent(self) -> int:
        """Key/value heads when every rank has whole ones for its n/p query heads."""
        return lcm(self.g, self.p)

    @cached_property
    def kv_sent(self) -> int:
        """kv with so many heads."""
        return self.kv // self.g * self.kv_heads_sent

    @cached_property
    def qkv(self) -> int:
        return self.q + self.kv

    @cached_property
    def gates(self) -> int:
        """Bytes of the output's gate: of q, or 0."""
        return self.q if self.gate else 0

    @cached_property
    def mixed(self) -> int:
        """Bytes of what linear_qkv makes."""
        return self.qkv + self.gates

    @cached_property
    def lse(self) -> int:
        return self.rows * self.n * self.wide_bytes

    def flash_bytes(self, heads: int, key_heads: int, *, queries: int, keys: int) -> int:
        """What FlashAttention's backward of a block holds beside its results, if that runs.

        queries, keys: positions. With several query heads to a key's, each has gradients of keys
        and values of its own.
        """
        if not self.flash:
            return 0
        rows = self.b * (queries + -queries % DOCUMENT_ROWS)
        of_heads = 2 * self.b * keys * heads * self.d * self.element_bytes
        summed = rows * heads * (accumulated_head_dim(self.d) + 1) * self.wide_bytes
        return summed + (of_heads if key_heads < heads else 0)

    def qkv_rows(self, num_kv_heads: int) -> int:
        """Rows of linear_qkv's weight, with so many key/value heads."""
        return qkv_rows(self.n, num_kv_heads, self.d, gate=self.gate)

    @cached_property
    def qkv_weight(self) -> int:
        return self.qkv_rows(self.g) * self.h * self.element_bytes

    @cached_property
    def proj_weight(self) -> int:
        return self.n * self.value_dim * self.h * self.element_bytes

    @cached_property
    def products(self) -> tuple[int, int]:
        """Bytes of what they make."""
        of_queries, of_keys = self.up_rows
        return self.latents(of_queries), self.latents(of_keys)

    @cached_property
    def up_weights(self) -> tuple[int, int]:
        """Bytes of those that make queries of c_q, and keys and values of c_kv."""
        c_q, c_kv, _ = self.latent_channels
        of_queries, of_keys = self.up_rows
        return of_queries * c_q * self.element_bytes, of_keys * c_kv * self.element_bytes

    @cached_property
    def up_rows(self) -> tuple[int, int]:
        """Their rows: channels of all heads, as they are made."""
        of = self.latent
        assert of is not None
        return self.n * (of.content + of.positions), self.n * (of.content + of.value)

    @cached_property
    def fc1_rows(self) -> int:
        return 2 * self.f if self.gated else self.f

    @cached_property
    def fc1_weight(self) -> int:
        return self.fc1_rows * self.h * self.element_bytes

    @cached_property
    def fc1_bias(self) -> int:
        return self.fc1_rows * self.element_bytes if self.bias else 0

    @cached_property
    def fc2_weight(self) -> int:
        return self.f * self.h * self.element_bytes

    @cached_property
    def is_tiled(self) -> bool:
        """Whether a rank has more rows than a tile."""
        return is_long(self.positions, self.b)

    def wide(self, num_bytes: int) -> int:
        """The bytes of as many elements in the accumulation dtype."""
        return num_bytes * self.wide_bytes // self.element_bytes


def of_tile(z: LayerSizes) -> LayerSizes:
    """Of one whole tile."""
    return replace(z, s=positions_of_tile(z.b) * z.p)


@dataclass(frozen=True)
class Costs:
    """Of one operation of one layer on one rank: of each quantity, the rank's that has the most.

    Bytes, and multiply-adds counted as 2 FLOPs.
    """

    forward_flops: int
    backward_flops: int
    forward_sent_bytes: int
    backward_sent_bytes: int
    kept_bytes: int  # alive from forward to backward, the input included
    forward_bytes: int  # peak of the forward above what is kept, the output included
    backward_bytes: int  # peak of the backward above what was kept, the gradients included


class Ledger:
    """Bytes alive on a rank by name, and their peak.

    peak_alone: that of a run without a backward, for which keep() keeps nothing.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.live = self.peak = self.peak_alone = self.kept = 0
        self._held: dict[str, int] = {}

    def hold(self, **sizes: int) -> None:
        for name, size in sizes.items():
            assert name not in self._held, name
            self._held[name] = size
            self.live += size
        self.touch(0)  # at the end: none of them is let go between

    def drop(self, *names: str) -> None:
        for name in names:
            self.live -= self._held.pop(name)

    def keep(self, *names: str) -> None:
        """Let go of what the backward needs."""
        for name in names:
            self.kept += self._held.pop(name)

    def release(self, size: int) -> None:
        """Free bytes that the forward kept."""
        self.live -= size

    def touch(self, size: int) -> None:
        """Hold for a moment."""
        top = self.live + size
        if top > self.peak:
            self.peak = top
        if top - self.kept > self.peak_alone:
            self.peak_alone = top - self.kept
