"""Attention on a packed microbatch, from what it costs on one document of as many tokens.

Norms, projections and weights depend on s alone, as the MLP, the embedding and the head do; what
else a row's seconds follow from is in row_law.py, fitted to measured rows. Without such
measurements ("derived") scores take the share of the time that the law of one document gives to
pairs of tokens, and nothing else is known: what is not exchanged is not taken off, so that times
are too long rather than too short.

Of attention with a window the pairs that it leaves count, where they do in the law of one document.

A row of one document that is spread evenly costs exactly what that document costs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_paradyse.costs.hybrid import HybridFit
from megatron_paradyse.costs.laws import PAIRS, Law
from megatron_paradyse.costs.row_law import RowLaw
from megatron_paradyse.packing.load import Load, load_of, load_of_one
from megatron_paradyse.packing.row import Row
from megatron_paradyse.strategies import base_name
from megatron_paradyse.strategies.accounting import SPLIT_HEADS
from megatron_paradyse.strategies.sizes import LayerSizes
from megatron_paradyse.strategies.walks import ROW_WALKS

MIN_ROWS = 4
Work = tuple[float, ...]  # what the factors of a law multiply
# No row takes less than this share of one document's time, where its law gives all to pairs: fits
# know no kernel's launch.
LEAST_SHARE = 0.05
# Score rows with a column for each key that is there, masked or not.
WHOLE_COLUMNS = ("colossal_z",)
LOCAL = "local_z"  # costs nothing of its own where it was not profiled:
AS_LOCAL = ("megatron_cz", "ulysses_z")  # what else gathers weights and computes so


@dataclass(frozen=True)
class PackedFit:
    """Laws of a strategy's attention."""

    strategy: str  # without suffix
    like: str  # the strategy whose single documents the laws are counted from
    num_rows: int  # that were fitted
    forward: RowLaw
    backward: RowLaw


@dataclass(frozen=True)
class Packed:
    """How packed rows follow from single documents.

    causal: whether these have one triangle of scores; sizes: of the layer, for any s. windows: the
    keys that a query sees, of each kind of attention that has a window; dropout: whether there is
    any of attention; in_tiles: whether the tiled kernel runs where there is either.
    joined: whether one call of the kernel takes documents that lie side by side.
    wide_bytes_per_second: what a rank receives of other groups' ranks; infinite where not known.
    """

    causal: bool
    sizes: LayerSizes
    fits: Mapping[str, PackedFit] = field(default_factory=dict)  # by strategy
    windows: Mapping[str, int] = field(default_factory=dict)
    in_tiles: bool = False
    dropout: bool = False
    joined: bool = False
    wide_bytes_per_second: float = math.inf

    @property
    def window(self) -> int | None:
        """What loads count within: a model has one window."""
        return max(self.windows.values(), default=None)

    def tiled_window(self, operation: str) -> float | None:
        """Keys that a query of this attention sees, where the tiled kernel runs; else None."""
        window = self.windows.get(operation, math.inf)
        return window if self.in_tiles and (self.dropout or window < math.inf) else None

    def is_walked(self, strategy: str, operation: str) -> bool:
        """Whether the walks tell of its rows: not of tiles that a kernel holds, nor of score rows
        with dropout, nor of strategies of other packages.
        """
        base = base_name(strategy)
        if base in WHOLE_COLUMNS:
            return base in ROW_WALKS and not self.dropout
        return base in ROW_WALKS and self.tiled_window(operation) is None

    def load_of(self, row: Row) -> Load:
        return load_of(row, causal=self.causal, window=self.window)

    def load_of_one(self, seq_length: int, p: int) -> Load:
        return load_of_one(seq_length, p, causal=self.causal, window=self.window)

    def crossing_seconds(self, strategy: str, load: Load) -> tuple[float, float]:
        """Forward and backward, of keys and values that come from other groups of a wide row.

        To a group once, divided by heads, or to each of its ranks. In the backward they come again,
        and their gradients go back in the accumulation dtype.
        """
        z, base = self.sizes, base_name(strategy)
        heads: float = z.g
        if base == "metp" or base in SPLIT_HEADS:
            heads = z.kv_heads_sent
        keys = load.keys_received
        if base in SPLIT_HEADS:
            keys, heads = load.group_keys, heads / z.p
        sent = keys * 2 * heads * z.d * z.element_bytes
        wide = sent * z.wide_bytes / z.element_bytes
        return sent / self.wide_bytes_per_second, (sent + wide) / self.wide_bytes_per_second

    def counts_window(self, strategy: str, operation: str, fit: object) -> bool:
        """Whether a time follows the scores that the operation's window leaves, not all of them.

        fit: of one document's. Columns there are for the keys that come, and no others.
        """
        if operation not in self.windows:
            return False
        takes_all = isinstance(fit, HybridFit) and math.isinf((fit.law.beyond or fit.law).window)
        return base_name(strategy) in WHOLE_COLUMNS or not takes_all


def work_of(strategy: str, load: Load) -> Work:
    """Of the rank that has the most."""
    base = base_name(strategy)
    if base in SPLIT_HEADS:
        return load.scores / load.p, 0.0, load.documents, 0.0
    scores: float = load.fullest_scores
    if base in WHOLE_COLUMNS:
        rows = load.seq_length / load.p
        scores = rows * (rows + load.keys_received)
    return scores, load.keys_received, load.fullest_documents, load.peers


def share_of_scores(fit: HybridFit, seq_length: int) -> float:
    """The part of a fitted time of one document, b = 1, that its law gives to pairs of tokens.

    Beyond the law's bend, pairs within a window grow as tokens do, and its law cannot tell the two
    apart: there a pair takes what it takes below.
    """
    law, s = fit.law, float(seq_length)
    if law.beyond is None or s < law.bend:
        pairs, total = _of_pairs(law, s)
    else:
        pairs, total = _of_pairs(law.beyond, s)
        counts = law if math.isfinite(law.window) else law.beyond
        if math.isfinite(counts.window):
            more = s * counts.keys(s) / (law.bend * counts.keys(law.bend))
            pairs = more * _of_pairs(law, law.bend)[0]
    return min(pairs / total, 1.0) if total > 0 else 0.0


def least_share(fit: object, seq_length: int) -> float:
    """The part of a fitted time of one document that no row of as many tokens takes less than.

    What any piece of its law gives to all but pairs, or LEAST_SHARE, where that is less: of long
    sequences pairs are nearly all.
    """
    if not isinstance(fit, HybridFit):
        return LEAST_SHARE
    law, s = fit.law, float(seq_length)
    pieces = _parts(law if law.beyond is None or s < law.bend else law.beyond, s)
    total = max(map(sum, pieces), default=0.0)
    others = max((sum(parts[:PAIRS]) for parts in pieces), default=0.0)
    return min(others / total, LEAST_SHARE) if others > 0 else LEAST_SHARE


def _of_pairs(law: Law, s: float) -> tuple[float, float]:
    """Of what the largest piece gives, b = 1, the part of pairs of tokens, and all of it."""
    piece = max(_parts(law, s), key=sum, default=None)
    return (piece[PAIRS], sum(piece)) if piece else (0.0, 0.0)


def _parts(law: Law, s: float) -> list[list[float]]:
    """What each term of each piece gives, b = 1."""
    powers = (1.0, 1.0, s, s * law.keys(s))
    return [[c * x for c, x in zip(piece, powers, strict=True)] for piece in law.pieces]
