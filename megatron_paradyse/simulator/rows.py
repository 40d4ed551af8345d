"""Attention on packed rows, simulated: the strategies' own code on ranks that are not there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_paradyse.costs.description import Description
from megatron_paradyse.costs.rows import RowMeasurement
from megatron_paradyse.costs.table import ATTENTION, OK, QUANTITIES
from megatron_paradyse.errors import UserError
from megatron_paradyse.packing.row import Row
from megatron_paradyse.packing.traffic import microbatch_of
from megatron_paradyse.packing.work import keys_at_once, keys_received, scores_per_rank
from megatron_paradyse.profiler.operations import Operations
from megatron_paradyse.profiler.row_points import row_points
from megatron_paradyse.shapes import attention_shape
from megatron_paradyse.simulator.operation import left_out, simulated_costs
from megatron_paradyse.simulator.simulated_rank import attention_as_rank, read_anywhere
from megatron_paradyse.strategies import check_takes, get_strategy, leaving_out
from megatron_paradyse.strategies.contract import AttentionShape

if TYPE_CHECKING:
    from megatron_paradyse.simulator.run import Options, Report


def simulated_rows(
    options: Options, description: Description, model, device, report: Report
) -> Iterator[RowMeasurement]:
    """Of the rank that needs most; what a strategy cannot run is left out, single documents say.

    With why where another package's strategy ends with an error: on rows alone, it may be.
    """
    shape = attention_shape(model.layer.self_attention, training=True)
    operations = None
    lengths = dict.fromkeys(options.lengths, True)
    for point in row_points(lengths, options.strategies, description):
        try:
            get_strategy(point.strategy).check(shape, options.p)
            check_takes(point.strategy, microbatch_of(point.row), options.p)
        except UserError:
            continue
        if operations is None or operations.size[0] != point.seq_length:
            report(f"simulating rows of s={point.seq_length}")
            with device:
                operations = Operations(model, point.seq_length, 1, read=read_anywhere)
        found = []
        try:
            for rank in ranks_of_row(point.row, shape):
                with attention_as_rank(model, rank):
                    with device:  # which must know the angles of a row that all layers share
                        operation = operations.get(ATTENTION, point.strategy, point.row)
                    found.append(simulated_costs(operation, device))
        except leaving_out(point.strategy) as error:
            yield RowMeasurement(point.strategy, point.load, left_out(error))
            continue
        most = {name: max(getattr(costs, name) for costs in found) for name in QUANTITIES}
        yield RowMeasurement(point.strategy, point.load, OK, **most)


def ranks_of_row(row: Row, shape: AttentionShape) -> tuple[int, ...]:
    """The one with the most scores, that which gets the most keys, that with most pieces, and that
    which holds the most keys at once: the last, as those before see fewer queries to be merged.
    """
    scores = scores_per_rank(row, causal=shape.causal, window=shape.window)
    keys = keys_received(row, causal=shape.causal, window=shape.window)
    pieces = [len(held) for held in row.pieces]
    found = {of.index(max(of)) for of in (scores, keys, pieces)}
    at_once = keys_at_once(row, causal=shape.causal, window=shape.window)
    if any(at_once):
        found.add(max(range(row.p), key=lambda rank: (at_once[rank], rank)))
    return tuple(sorted(found))
