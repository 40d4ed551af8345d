"""The sizes of a layer and its costs, as numbers: no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, isinf, lcm

# Rows of a rank in a tile of what goes in tiles of a long sequence: matrix products of so many take
# far longer than their weights take to arrive.
TILE_ROWS = 8192


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
    """One layer and one microbatch; letters as in contract.py."""

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
    narrow_values: bool = False  # of latents: proj has a copy of the output, without its padding

    @property
    def positions(self) -> int:
        """Positions that a rank holds: s/p."""
        return self.s // self.p

    @property
    def rows(self) -> int:
        """Rows of activations that a rank holds: s/p b."""
        return self.positions * self.b

    @property
    def wide_bytes(self) -> int:
        """Bytes of an element where the code accumulates: float32, float64 for float64."""
        return max(4, self.element_bytes)

    @property
    def half_type(self) -> bool:
        """Whether sums accumulate in a wider dtype than the elements'."""
        return self.wide_bytes > self.element_bytes

    @property
    def x(self) -> int:
        """Bytes of one activation [s/p, b, h]."""
        return self.rows * self.h * self.element_bytes

    @property
    def q(self) -> int:
        return self.rows * self.n * self.d * self.element_bytes

    @property
    def kv(self) -> int:
        return 2 * self.rows * self.g * self.d * self.element_bytes

    @property
    def kv_heads_sent(self) -> int:
        """Key/value heads when every rank has whole ones for its n/p query heads."""
        return lcm(self.g, self.p)

    @property
    def kv_sent(self) -> int:
        """kv with so many heads."""
        return self.kv // self.g * self.kv_heads_sent

    @property
    def qkv(self) -> int:
        return self.q + self.kv

    @property
    def gates(self) -> int:
        """Bytes of the output's gate: of q, or 0."""
        return self.q if self.gate else 0

    @property
    def mixed(self) -> int:
        """Bytes of what linear_qkv makes."""
        return self.qkv + self.gates

    @property
    def lse(self) -> int:
        return self.rows * self.n * self.wide_bytes

    def qkv_rows(self, num_kv_heads: int) -> int:
        """Rows of linear_qkv's weight, with so many key/value heads."""
        return qkv_rows(self.n, num_kv_heads, self.d, gate=self.gate)

    @property
    def qkv_weight(self) -> int:
        return self.qkv_rows(self.g) * self.h * self.element_bytes

    @property
    def proj_weight(self) -> int:
        return self.n * self.d * self.h * self.element_bytes

    @property
    def fc1_rows(self) -> int:
        return 2 * self.f if self.gated else self.f

    @property
    def fc1_weight(self) -> int:
        return self.fc1_rows * self.h * self.element_bytes

    @property
    def fc1_bias(self) -> int:
        return self.fc1_rows * self.element_bytes if self.bias else 0

    @property
    def fc2_weight(self) -> int:
        return self.f * self.h * self.element_bytes

    @property
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

    keeping: whether there will be a backward, for which keep() keeps; else it drops.
    """

    def __init__(self, rank: int = 0, *, keeping: bool = True) -> None:
        self.rank = rank
        self.live = self.peak = self.kept = 0
        self._keeping = keeping
        self._held: dict[str, int] = {}

    def hold(self, **sizes: int) -> None:
        for name, size in sizes.items():
            assert name not in self._held, name
            self._held[name] = size
            self.live += size
            self.peak = max(self.peak, self.live)

    def drop(self, *names: str) -> None:
        for name in names:
            self.live -= self._held.pop(name)

    def keep(self, *names: str) -> None:
        """Let go of what the backward needs."""
        for name in names:
            if self._keeping:
                self.kept += self._held.pop(name)
            else:
                self.drop(name)

    def release(self, size: int) -> None:
        """Free bytes that the forward kept."""
        self.live -= size

    def touch(self, size: int) -> None:
        """Hold for a moment."""
        self.peak = max(self.peak, self.live + size)
