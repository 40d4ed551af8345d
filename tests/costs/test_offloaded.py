"""Costs of +offload: those of +recompute, moved."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_paradyse.costs.fitting import fit_table
from megatron_paradyse.costs.layers import ALIKE
from megatron_paradyse.costs.model import CostModel
from megatron_paradyse.costs.offloaded import HostLink, offloaded
from megatron_paradyse.costs.table import OperationCosts
from megatron_paradyse.errors import UserError
from megatron_paradyse.planner.from_costs import cost_source
from tests.costs.synthetic import make_table

RECOMPUTED = OperationCosts(2.0, 7.0, 100, 30, 50)


def test_nothing_is_kept_and_the_peaks_of_both_passes_stay():
    moved = offloaded(RECOMPUTED, HostLink(100, overlaps=False))
    assert moved == OperationCosts(2.0 + 1, 7.0 + 1, 0, 30 + 100, 50 + 100)


def test_beside_kernels_only_what_outlasts_them_counts():
    fast, slow = (offloaded(RECOMPUTED, HostLink(rate, overlaps=True)) for rate in (100, 25))
    assert (fast.forward_seconds, fast.backward_seconds) == (2.0, 8.0)
    assert (slow.forward_seconds, slow.backward_seconds) == (4.0, 11.0)


def test_a_model_derives_them_at_the_rate_of_its_file():
    table = make_table()
    model = fit_table(table)
    again = model.operation("metp+recompute", "mlp", 777, 1)
    moved = model.operation("metp+offload", "mlp", 777, 1)
    assert moved == offloaded(again, HostLink(2e9, overlaps=False))
    assert "metp+offload" not in model.strategies("mlp")
    with pytest.raises(UserError, match=r"no costs of the mlp of 'colossal_z\+recompute'"):
        model.operation("colossal_z+offload", "mlp", 777, 1)
    constants = replace(table.constants, host_bytes_per_second=None)
    with pytest.raises(UserError, match=r"no rate of copies to host memory: profile again"):
        fit_table(replace(table, constants=constants)).operation("metp+offload", "mlp", 777, 1)


@pytest.mark.parametrize("mlp", ["ulysses_z+recompute", "ulysses_z+offload"])
def test_a_layers_input_waits_where_its_attention_says(mlp):
    """Both halves recompute: one input, and one copy of it beside the whole forward."""
    fitted = fit_table(make_table())
    model = CostModel(fitted.kind, fitted.fits, fitted.constants, HostLink(2e9, overlaps=True))
    source = cost_source(model.operation, model.offloaded)
    layer = source.pairs("metp+recompute", "ulysses_z+recompute", 4096, 1, ALIKE)
    assert source.pairs("metp+recompute", mlp, 4096, 1, ALIKE) == layer
    seconds, kept, forward, backward = source.pairs("metp+offload", mlp, 4096, 1, ALIKE)
    x = layer[1]
    assert (kept, forward, backward) == (0, layer[2] + x, layer[3] + x)
    assert seconds == pytest.approx(layer[0] + x / 2e9)  # the way there is hidden
