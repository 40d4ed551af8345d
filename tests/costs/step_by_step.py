"""What fits answer at one point, in Python's floats, as the documents describe it."""

from __future__ import annotations

from megatron_paradyse.costs.forest import nearest
from megatron_paradyse.costs.hybrid import HybridFit, fade
from megatron_paradyse.costs.laws import Law
from megatron_paradyse.costs.paper import PaperFit


def hybrid_value(fit: HybridFit, seq_length: float, batch_size: int, max_length: int) -> float:
    """One hybrid fit at (s, b), step by step."""
    value = fit.law(seq_length, batch_size)
    if fit.factors is None:
        return value
    inside = min(seq_length, max_length)
    shorter = [edge for edge in fit.factors.edges if edge <= inside]
    row = fit.factors.rows[nearest(fit.factors.batch_sizes, batch_size)]
    part = _part(fit.law, seq_length, batch_size)
    told = [
        fit.law(e, batch_size) * row[k]
        for k, e in enumerate(shorter)
        # a step that ends where a part begins was of the part before
        if _part(fit.law, e, batch_size) == part and e != fit.law.bend_at(batch_size)
    ]
    floor, factor = max(told, default=0.0), row[len(shorter)]
    if seq_length > max_length:
        if _part(fit.law, max_length, batch_size) == part:
            floor = max(floor, fit.law(max_length, batch_size) * factor)
        factor = 1 + (factor - 1) * fade(seq_length, max_length)
    return max(value * factor, floor)


def _part(law: Law, s: float, b: int) -> tuple[bool, bool]:
    """Of a law whose parts may each be lower than the one before."""
    beyond = law.beyond is not None and (s * b if law.bend_of_tokens else s) >= law.bend
    side = law.beyond if beyond else law
    return beyond, bool(side.in_tiles) and s * b > side.tile_tokens


def paper_value(fit: PaperFit, seq_length: float, batch_size: int, max_length: int) -> float:
    """One published fit at (s, b), step by step."""
    i = nearest(fit.values.batch_sizes, batch_size)
    value = 0.0
    for coefficient in reversed(fit.polynomials[i]):
        value = coefficient + seq_length * value
    if seq_length <= max_length:
        value = fit.values.rows[i][sum(edge <= seq_length for edge in fit.values.edges)]
    return max(0.0, value * (batch_size / fit.values.batch_sizes[i]))
