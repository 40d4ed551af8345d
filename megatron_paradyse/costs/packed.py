"""Attention on a packed microbatch, from what it costs on one document of as many tokens.

Norms, projections and weights depend on s alone, as the MLP, the embedding and the head do; what
else a row's seconds follow from is in row_law.py, fitted to measured rows. Without such
measurements ("derived") scores take the share of the time that the law of one document gives to
pairs of tokens, and nothing else is known: what is not exchanged is not taken off, so that times
are too long rather than too short.

A row of one document that is spread evenly costs exactly what that document costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_paradyse.costs.hybrid import HybridFit
from megatron_paradyse.costs.laws import PAIRS
from megatron_paradyse.costs.row_law import RowLaw
from megatron_paradyse.packing.load import Load, load_of_one
from megatron_paradyse.strategies import base_name
from megatron_paradyse.strategies.sizes import LayerSizes

MIN_ROWS = 4
# No row takes less than this share of one document's time: fits know no kernel's launch.
LEAST_SHARE = 0.05
# Every rank has some heads of all queries, so that documents need not be even.
SPLIT_HEADS = ("megatron_ts", "ulysses_z")
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

    causal: whether these have one triangle of scores; sizes: of the layer, for any s.
    """

    causal: bool
    sizes: LayerSizes
    fits: Mapping[str, PackedFit] = field(default_factory=dict)  # by strategy


def work_of(strategy: str, load: Load) -> tuple[float, ...]:
    """What the factors of a law multiply, of the rank that has the most."""
    base = base_name(strategy)
    if base in SPLIT_HEADS:
        return load.scores / load.p, 0.0, load.documents, 0.0
    scores: float = load.fullest_scores
    if base in WHOLE_COLUMNS:
        rows = load.seq_length / load.p
        scores = rows * (rows + load.keys_received)
    return scores, load.keys_received, load.fullest_documents, load.peers


def one_document(strategy: str, load: Load, *, causal: bool) -> tuple[float, ...]:
    """work_of one document of the row's tokens."""
    return work_of(strategy, load_of_one(load.seq_length, load.p, causal=causal))


def share_of_scores(fit: HybridFit, seq_length: int) -> float:
    """The part of a fitted time of one document, b = 1, that its law gives to pairs of tokens."""
    s = float(seq_length)
    powers = (1.0, 1.0, s, s * fit.law.keys(s))
    parts = [[c * x for c, x in zip(p, powers, strict=True)] for p in fit.law.pieces]
    piece = max(parts, key=sum, default=None)
    return piece[PAIRS] / sum(piece) if piece and sum(piece) > 0 else 0.0
