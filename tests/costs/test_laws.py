"""Laws of one quantity, alone and as costs of a file: pieces, tiles, windows, residuals."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_paradyse.costs.cost_file import read_cost_file, write_cost_file
from megatron_paradyse.costs.fitting import fit_table
from megatron_paradyse.costs.hybrid import HybridFit, fit_hybrid
from megatron_paradyse.costs.laws import Law, aicc, fit_law, scale_of
from megatron_paradyse.costs.model import CostModel, OperationFit
from megatron_paradyse.strategies.sizes import TILE_ROWS
from tests.costs.changed_files import is_refused
from tests.costs.step_by_step import hybrid_value
from tests.costs.synthetic import CONSTANTS, DESCRIPTION, LENGTHS, make_table


def test_peaks_that_fall_as_kept_bytes_grow_are_fitted():
    # weights of 1 MiB, gone by the time that most activations are there
    s = np.array(LENGTHS, float)
    kept = 100 * s
    workspace = np.maximum(1e6 - 60 * s, 150 * s)
    fit = fit_hybrid(s, np.ones_like(s), workspace, operation="mlp", is_time=False, kept=kept)
    for length in (200, 3000, 4000, 20000, 131072):
        truth = max(1e6 - 60 * length, 150 * length)
        found = hybrid_value(fit, length, 1, 32768) - 100 * length
        assert found == pytest.approx(truth, rel=0.01)


TILE = 10_000


def in_tiles(s):
    """Weights and activations; of more tokens than a tile those of one, and what grows anyway."""
    return np.where(s > TILE, 1e6 + 2100 * TILE + 100 * s, 1e6 + 2000 * s)


def test_what_goes_in_tiles_has_a_law_on_either_side_of_one():
    s = np.array(LENGTHS, float)
    law = fit_hybrid(
        s, np.ones_like(s), in_tiles(s), operation="mlp", is_time=False, tile_tokens=TILE
    ).law
    assert law.tile_tokens == TILE
    for length in (200, 3000, TILE, TILE + 1, 20000, 131072):
        assert law(length, 1) == pytest.approx(float(in_tiles(length)), rel=1e-6)
        assert law(length / 4, 4) == law(length, 1)
    smooth = fit_hybrid(
        s, np.ones_like(s), 1e6 + 2000 * s, operation="mlp", is_time=False, tile_tokens=TILE
    ).law
    assert not smooth.in_tiles


@pytest.mark.parametrize("lengths", [(500, 1000, 2000, 8000, 12000), (8000, 12000, 16000, 32000)])
def test_with_one_length_on_a_side_no_bytes_are_missed(lengths):
    """At every length given and far from them; where tiles begin, bytes jump by 10% here."""
    s = np.array(lengths, float)
    fit = fit_hybrid(
        s, np.ones_like(s), in_tiles(s), operation="mlp", is_time=False, tile_tokens=TILE
    )
    for length in (100, *lengths, 100_000):
        assert fit.law(length, 1) >= 0.999 * in_tiles(length)


def test_beyond_a_lone_length_in_tiles_bytes_grow_as_they_do_below():
    """Not in proportion, where weights are most of them: tiles grow less."""
    s = np.array((500, 1000, 2000, 8000, 12000), float)
    y = np.where(s > TILE, 2.2e7, 2e7 + 1000 * s)
    law = fit_hybrid(s, np.ones(5), y, operation="mlp", is_time=False, tile_tokens=TILE).law
    assert law(12000, 1) == pytest.approx(y[-1], rel=1e-6)
    assert law(24000, 1) == pytest.approx(2.2e7 + 1000 * 12000, rel=1e-3)


def test_few_points_with_noise_are_given_few_terms():
    """Each term of five points must earn more than one of many."""
    residual = np.array([0.01, -0.01, 0.01, -0.01, 0.01])
    for points in (5, 50):
        some = np.tile(residual, points // 5)
        one, two, three = (aicc(some, size, 1e-6) for size in (1, 2, 3))
        assert three - two > two - one > 2
        if points == 5:  # 2 and 2 size (size + 1) / (points - size - 1) more
            assert (two - one, three - two) == pytest.approx((2 + 6 - 4 / 3, 2 + 24 - 6))


def test_a_fit_in_tiles_is_written_read_and_evaluated(tmp_path):
    rows = TILE_ROWS * DESCRIPTION.p

    def tiled(m):
        if (m.strategy, m.operation) != ("ulysses_z", "mlp"):
            return m
        workspace = 1e6 + 2000.0 * min(m.seq_length, rows)
        return replace(m, forward_bytes=workspace, backward_bytes=workspace)

    table = make_table((*LENGTHS, 1 << 16, 1 << 17), model_parts=False)
    table = replace(table, measurements=tuple(map(tiled, table.measurements)))
    model = fit_table(table)
    assert model.fits_of("ulysses_z", "mlp")[-1].law.in_tiles
    path = tmp_path / "costs.json"
    write_cost_file(path, table, model)
    again = read_cost_file(path).require_model()
    assert again.fits == model.fits
    for change, message in (
        ({"tokens": 0}, "in_tiles.tokens must lie in"),
        ({"tokens": rows + 1}, "all are of one size"),
        ({"pieces": []}, "in_tiles.pieces must not be empty"),
        ({"pieces": [[1.0, 2.0]]}, "in_tiles.pieces"),
        ({"more": 1}, "in_tiles has unknown 'more'"),
    ):
        is_refused(path, "in_tiles", change, message)
    for s, b in ((rows, 1), (rows + 1, 1), (rows // 2 + 1, 2), (100, 1), (200_000, 1)):
        fit = model.fits[[f.strategy + f.operation for f in model.fits].index("ulysses_zmlp")]
        kept, *_, backward = (hybrid_value(one, s, b, fit.max_length) for one in fit.fits[2:])
        found = again.operation("ulysses_z", "mlp", s, b)
        assert found.backward_bytes == backward - kept


def test_a_residual_is_learnt_only_where_neighbours_share_it():
    s, one = np.geomspace(128, 65536, 19).round(), np.ones(19)
    y = 1e-3 + 1e-6 * s
    stair = np.where((s > 1000) & (s < 8000), 1.3, 1.0)
    noise = np.exp(0.05 * np.random.default_rng(1).standard_normal(19))
    stairs = fit_hybrid(s, one, y * stair, operation="mlp", is_time=True)
    assert stairs.factors is not None
    assert fit_hybrid(s, one, y * noise, operation="mlp", is_time=True).factors is None
    errors = [
        abs(hybrid_value(stairs, x, 1, 65536) / (1.3e-3 + 1.3e-6 * x) - 1) for x in (2e3, 4e3)
    ]
    assert max(errors) < 0.1


@pytest.mark.parametrize("b", [1, 16])
@pytest.mark.parametrize("begins", ["tile_tokens", "bend"])
def test_a_residual_leaves_bytes_as_low_as_a_tile_or_a_bend_makes_them(begins, b):
    """They were kept up to what they are before it: at 2.15 times these, and nearly so at 2 x."""
    s = np.geomspace(128, 131072, 16).round() // b

    def truth(s):
        less = s * b > TILE if begins == "tile_tokens" else s * b >= TILE
        law = np.where(less, 5e6 + 300 * s * b, 1e6 + 2000 * s * b)
        return law * (1 + 0.01 * np.sin(1.2 * np.log(s * b)))

    given = {begins: TILE, "bend_of_tokens": begins == "bend"}
    fit = fit_hybrid(s, np.full(16, b), truth(s), operation="mlp", is_time=False, **given)
    assert fit.factors is not None
    longest, nothing = int(s[-1]), HybridFit(Law(()))
    fits = (nothing, nothing, fit, nothing, nothing)
    of_mlp = OperationFit("metp", "mlp", 1, longest, fits, ((b, 1, longest),))
    costs = CostModel("hybrid", (of_mlp,), CONSTANTS)
    for x in s.tolist():
        assert costs.predict("metp", "mlp", "kept_bytes", x, b) == pytest.approx(truth(x), rel=0.01)
    starts = (TILE // b, TILE // b + 1, TILE, TILE + 1)  # of one sequence, beyond b's lengths
    for x in (*s.tolist(), *starts, 20_000, 3 * longest):
        for size in (1, 3, b):
            found = costs.predict("metp", "mlp", "kept_bytes", int(x), size)
            assert found == hybrid_value(fit, int(x), size, longest)


def test_noise_and_a_second_piece_do_not_spoil_a_law():
    s = np.geomspace(128, 32768, 9)
    y = np.maximum(3e-3, 2e-6 * s + 1e-10 * s * s)  # launches hide the work of short sequences
    noise = np.exp(0.01 * np.random.default_rng(2).standard_normal(9))
    law = fit_law(
        s,
        np.ones(9),
        y * noise,
        quadratic=True,
        max_pieces=2,
        error_floor=5e-3,
        exact=False,
    )
    assert len(law.pieces) == 2
    assert law(131072, 1) == pytest.approx(2e-6 * 131072 + 1e-10 * 131072**2, rel=0.1)


@pytest.mark.parametrize("bend", [2.5, 30.0])
def test_two_lengths_on_a_side_of_a_bend_are_a_piece(bend):
    s = np.array([1.0, 2.0, 4.0, 10.0, 50.0, 100.0])
    options = {"quadratic": False, "max_pieces": 3, "error_floor": 1e-3, "exact": True}
    law = fit_law(s, np.ones(6), np.maximum(1e3 * bend, 1e3 * s), **options)
    for x in (1, 400):
        assert law(x, 1) == pytest.approx(1e3 * max(x, bend))


def test_bytes_take_pairs_of_tokens_where_no_law_without_them_comes_near():
    s = np.geomspace(128, 8192, 7)
    options = {"quadratic": True, "max_pieces": 1, "error_floor": 1e-3, "exact": True}
    law = fit_law(s, np.ones(7), 1e6 + 1e3 * s + 0.05 * s * s, **options)
    assert law(32768, 1) == pytest.approx(1e6 + 1e3 * 32768 + 0.05 * 32768**2, rel=1e-3)


def test_errors_of_what_is_below_a_thousandth_of_the_largest_are_relative_to_that():
    assert scale_of(np.array([0.0, 5.0, 2000.0, 1e4])).tolist() == [10, 10, 2000, 1e4]


def test_next_to_nothing_is_fitted_too():
    """Weights of 1 / y were infinite, and no solution was found."""
    s, b = np.array(LENGTHS, float), np.ones(len(LENGTHS))
    options = {"quadratic": True, "max_pieces": 2, "error_floor": 0.005, "exact": False}
    law = fit_law(s, b, 1e-307 * s, **options)
    assert 0 <= law(1 << 40, 1 << 20) < 1e-200


def test_a_law_is_the_largest_of_its_pieces():
    law = Law(((5.0, 0.0, 0.0, 0.0), (0.0, 1.0, 2.0, 3.0)))
    assert law(0.5, 1) == 5.0
    assert law(2, 3) == 3 * (1 + 2 * 2 + 3 * 4)
    assert Law(())(10, 1) == 0
