"""What multi-token prediction does beside its layers has two laws: below and above h tokens."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_paradyse.costs.cost_file import read_cost_file, write_cost_file
from megatron_paradyse.costs.fitting import fit_operation, fit_table
from megatron_paradyse.costs.model import CostModel
from megatron_paradyse.costs.table import ATTENTION, MODEL, PREDICTION, CostTable, Measurement
from tests.costs.synthetic import CONSTANTS, DESCRIPTION
from tests.costs.test_window_laws import BEND, BENT, WINDOW, bent

H = 128  # of a LLaMA on four ranks, in units of 512 bytes: kept, forward and backward
COUNTED = {
    64: (129.5, 98.0, 176.0),
    96: (194.2, 147.0, 232.0),
    112: (226.6, 171.5, 260.0),
    128: (259.0, 196.0, 288.0),
    136: (173.2, 260.2, 644.0),
    160: (203.8, 261.0, 656.0),
    192: (244.5, 262.0, 672.0),
    256: (326.0, 264.0, 704.0),
    512: (652.0, 272.0, 832.0),
}
PROFILED = (64, 96, 160, 256, 512)


def measured(s: int, b: int = 1) -> Measurement:
    kept, forward, backward = (512 * count for count in COUNTED[s * b])
    return Measurement(MODEL, PREDICTION, s, b, "ok", 1e-3, 2e-3, kept, forward, backward)


@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("profiled", [(1,), (2,), (1, 2)])
def test_lengths_between_are_told_on_either_side(profiled, b):
    """Of as many sequences as were profiled, and of others: tokens decide."""
    model = dataclasses.replace(DESCRIPTION.model, hidden_size=H)
    description = dataclasses.replace(DESCRIPTION, model=model)
    points = [measured(tokens // size, size) for size in profiled for tokens in PROFILED]
    fit = fit_operation(MODEL, PREDICTION, points, "hybrid", description)
    costs = CostModel("hybrid", (fit,), CONSTANTS)
    for tokens in COUNTED:
        asked, true = costs.operation(MODEL, PREDICTION, tokens // b, b), measured(tokens // b, b)
        assert asked.kept_bytes == pytest.approx(true.kept_bytes, rel=0.005)
        for name in ("forward_bytes", "backward_bytes"):
            peaks = (getattr(one, name) + one.kept_bytes for one in (asked, true))
            assert next(peaks) == pytest.approx(next(peaks), rel=0.005), (name, tokens)


def test_rings_beside_a_window_bend_elsewhere_in_the_same_model(tmp_path):
    """Each at its own length; read again they tell what they told."""
    described = dataclasses.replace(
        DESCRIPTION, halves={"attention": {"window": WINDOW}, "mlp": {}}
    )
    h = described.model.hidden_size

    def predicted(s: int) -> Measurement:
        kept = 2000.0 * s if s <= h else 1300.0 * s
        return Measurement(MODEL, PREDICTION, s, 1, "ok", 1e-3, 2e-3, kept, 1e5, 2e5)

    points = [bent("megatron_cz", s) for s in BENT] + [predicted(s) for s in (64, *BENT)]
    table, path = CostTable(described, points, CONSTANTS), tmp_path / "costs.json"
    write_cost_file(path, table, fit_table(table))
    model = read_cost_file(path).require_model()
    assert model.fits_of(MODEL, PREDICTION)[2].law.bend_of_tokens
    assert model.predict(MODEL, PREDICTION, "kept_bytes", h, 2) == pytest.approx(2600.0 * h)
    for s in (100, h, h + 8, 1000, BEND - 8, BEND, 1 << 16):
        ring, edge = bent("megatron_cz", s).backward_bytes, predicted(s).kept_bytes
        found = model.operation("megatron_cz", ATTENTION, s).backward_bytes
        assert found == pytest.approx(ring, rel=0.005)
        assert model.operation(MODEL, PREDICTION, s).kept_bytes == pytest.approx(edge, rel=0.005)
