"""A layer under one checkpoint: its peaks are at one of a few moments."""

from __future__ import annotations

import pytest

from megatron_paradyse.costs.recomputed import recomputed_layer
from megatron_paradyse.costs.table import OperationCosts

X = 3  # bytes of an activation


@pytest.mark.parametrize(
    ("attention", "again", "mlp", "peaks"),
    [
        # kept and forward of attention; forward, backward of it and of the MLP with +recompute
        ((10, 4), (5, 6), (4, 1), (X + 4, 10 + 4)),  # the attention runs again
        ((10, 4), (9, 6), (4, 7), (9, 10 + 7)),  # back through the MLP
        ((10, 4), (7, 90), (4, 7), (X + 4, X + 90)),  # back through the attention
    ],
)
def test_a_layer_peaks_where_most_of_its_halves_meets(attention, again, mlp, peaks):
    costs = {
        ("a", "attention@2"): OperationCosts(9.0, 9.0, *attention, 99),
        ("a+recompute", "attention@2"): OperationCosts(1.0, 2.0, X, *again),
        ("b+recompute", "mlp"): OperationCosts(10.0, 20.0, X, *mlp),
    }
    for names in (("a+recompute", "b+recompute"), ("a+offload", "b+recompute")):
        layer = recomputed_layer(*names, lambda *key: costs[key], ("attention@2", "mlp"))
        assert layer == OperationCosts(11.0, 22.0, X, *peaks)
