"""The fitted models, on synthetic tables (tests/costs/synthetic.py)."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_paradyse.costs.cost_file import read_cost_file, write_cost_file
from megatron_paradyse.costs.fitting import fit_table, unfitted
from megatron_paradyse.costs.forest import FOREST, forest_steps, nearest
from megatron_paradyse.costs.hybrid import HybridFit, fade, fit_hybrid
from megatron_paradyse.costs.laws import Law, fit_law
from megatron_paradyse.costs.model import MODELS
from megatron_paradyse.costs.paper import PaperFit
from megatron_paradyse.costs.table import BYTES_ONLY, QUANTITIES, CostTable, Measurement
from megatron_paradyse.errors import UserError
from megatron_paradyse.strategies.sizes import TILE_ROWS
from tests.costs.synthetic import CONSTANTS, DESCRIPTION, LENGTHS, STRATEGIES, make_table, measure

BETWEEN = (130, 200, 333, 700, 1500, 3000, 5000, 9000, 20000, 32768)
BEYOND = (65536, 131072)
NOISY = make_table(strategies=STRATEGIES[:4], batch_sizes=(1, 2), noise=0.03, steps=0.3, seed=5)


@pytest.fixture(scope="module", params=MODELS)
def noisy(request):
    return fit_table(NOISY, request.param)


@pytest.fixture(scope="module")
def hybrid():
    return fit_table(NOISY, "hybrid")


def hybrid_value(fit: HybridFit, seq_length: float, batch_size: int, max_length: int) -> float:
    """One hybrid fit at (s, b), step by step."""
    value = fit.law(seq_length, batch_size)
    if fit.factors is None:
        return value
    inside = min(seq_length, max_length)
    shorter = [edge for edge in fit.factors.edges if edge <= inside]
    row = fit.factors.rows[nearest(fit.factors.batch_sizes, batch_size)]
    floor = max((fit.law(e, batch_size) * row[k] for k, e in enumerate(shorter)), default=0.0)
    factor = row[len(shorter)]
    if seq_length > max_length:
        floor = max(floor, fit.law(max_length, batch_size) * factor)
        factor = 1 + (factor - 1) * fade(seq_length, max_length)
    return max(value * factor, floor)


def paper_value(fit: PaperFit, seq_length: float, batch_size: int, max_length: int) -> float:
    """One published fit at (s, b), step by step."""
    i = nearest(fit.values.batch_sizes, batch_size)
    value = 0.0
    for coefficient in reversed(fit.polynomials[i]):
        value = coefficient + seq_length * value
    if seq_length <= max_length:
        value = fit.values.rows[i][sum(edge <= seq_length for edge in fit.values.edges)]
    return max(0.0, value * (batch_size / fit.values.batch_sizes[i]))


@pytest.mark.parametrize("batch_size", [1, 3])
def test_hybrid_recovers_the_law_of_exact_costs_inside_and_beyond(batch_size):
    model = fit_table(make_table(), "hybrid")
    for strategy in STRATEGIES:
        for operation in ("attention", "mlp"):
            for s in (*BETWEEN, *BEYOND):
                truth = measure(strategy, operation, s, batch_size).costs
                found = model.operation(strategy, operation, s, batch_size)
                for name in QUANTITIES:
                    # 0.1%: the error under which the fits of bytes count as equal, times a few.
                    assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=5e-3)


@pytest.mark.parametrize("kind", MODELS)
def test_lengths_without_seconds_change_the_fits_of_bytes_only(kind):
    timed = make_table(LENGTHS[::2], STRATEGIES[:2], noise=0.03)
    between = tuple(
        replace(m, status=BYTES_ONLY, forward_seconds=0.0, backward_seconds=0.0)
        for m in make_table(LENGTHS[1::2], STRATEGIES[:2]).measurements
    )
    plain = fit_table(timed, kind)
    more = fit_table(CostTable(DESCRIPTION, (*timed.measurements, *between), CONSTANTS), kind)
    for old, new in zip(plain.fits, more.fits, strict=True):
        assert new.fits[:2] == old.fits[:2]
    whole = fit_table(make_table(LENGTHS, STRATEGIES[:2]), kind)
    for new, exact in zip(more.fits, whole.fits, strict=True):
        if kind == "hybrid":
            assert new.fits[2:] == exact.fits[2:]


@pytest.mark.parametrize("kind", MODELS)
def test_seconds_beyond_the_timed_lengths_are_extrapolated_from_those(kind):
    """Longer lengths without seconds are no reason to trust the forest there."""
    steps = make_table(LENGTHS[:-2], STRATEGIES[:2], batch_sizes=(1, 2), noise=0.03, steps=0.3)
    longer = tuple(
        replace(m, status=BYTES_ONLY, forward_seconds=0.0, backward_seconds=0.0)
        for m in make_table(LENGTHS[-2:], STRATEGIES[:2]).measurements
    )
    plain = fit_table(steps, kind)
    more = fit_table(CostTable(DESCRIPTION, (*steps.measurements, *longer), CONSTANTS), kind)
    for s in (LENGTHS[-3] + 64, LENGTHS[-2], LENGTHS[-1], 3 * LENGTHS[-1]):
        for b in (1, 2):
            for strategy in STRATEGIES[:2]:
                told, expected = (
                    model.predict(strategy, "attention", "time_seconds", s, b)
                    for model in (more, plain)
                )
                assert told == expected
    name = STRATEGIES[0]
    assert more.profiled_range(name, "mlp") == (LENGTHS[0], LENGTHS[-1])
    assert more.timed_range(name, "mlp", 2) == (LENGTHS[0], LENGTHS[-3])
    assert more.timed_range(name, "mlp", 3) is None


def test_hybrid_finds_a_second_batch_size_from_two_others():
    model = fit_table(make_table(batch_sizes=(1, 4)), "hybrid")
    for s in BETWEEN:
        truth = measure("metp", "attention", s, 2).costs
        found = model.operation("metp", "attention", s, 2)
        assert found.time_seconds == pytest.approx(truth.time_seconds, rel=1e-3)
        assert found.backward_bytes == pytest.approx(truth.backward_bytes, rel=5e-3)


def test_published_model_is_the_forest_inside_and_a_polynomial_beyond():
    model = fit_table(make_table(strategies=("metp",), model_parts=False), "paper")
    inside = [model.predict("metp", "attention", "kept_bytes", s) for s in range(4097, 6144, 64)]
    # Steps: as many as the midpoints that trees without one of the lengths can have.
    assert len(set(inside)) < 6
    truth = measure("metp", "attention", 65536).costs
    assert model.predict("metp", "attention", "time_seconds", 65536) == pytest.approx(
        truth.time_seconds, rel=1e-6
    )
    one = model.predict("metp", "attention", "kept_bytes", 5000)
    assert model.predict("metp", "attention", "kept_bytes", 5000, 3) == pytest.approx(3 * one)


def test_step_tables_answer_what_the_forest_answers():
    import xgboost

    rng = np.random.default_rng(0)
    s, b = np.repeat(np.array(LENGTHS, float), 2), np.tile([1.0, 4.0], len(LENGTHS))
    y = 1e-3 + 1e-6 * s * b * np.exp(0.1 * rng.standard_normal(len(s)))
    table = forest_steps(s, b, y)
    data = xgboost.DMatrix(np.stack((s, b), axis=1), label=y / y.mean())
    forest = xgboost.train(FOREST, data, num_boost_round=1)
    lengths = np.concatenate((np.geomspace(1, 1e6, 300).round(), s))
    for batch_size in (1, 4):
        points = np.stack((lengths, np.full_like(lengths, batch_size)), axis=1)
        answers = forest.inplace_predict(points) * y.mean()
        ours = [table(length, batch_size) for length in lengths]
        np.testing.assert_allclose(ours, answers, rtol=1e-6)


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
    values = json.loads(path.read_text())
    for change, message in (
        ({"tokens": 0}, "in_tiles.tokens must lie in"),
        ({"tokens": rows + 1}, "all are of one size"),
        ({"pieces": []}, "in_tiles.pieces must not be empty"),
        ({"pieces": [[1.0, 2.0]]}, "in_tiles.pieces"),
        ({"more": 1}, "in_tiles has unknown 'more'"),
    ):
        changed = json.loads(json.dumps(values))
        tiled = (one for op in changed["model"]["operations"] for one in op["fits"].values())
        next(one["in_tiles"] for one in tiled if "in_tiles" in one).update(change)
        (tmp_path / "changed.json").write_text(json.dumps(changed))
        with pytest.raises(UserError, match=message):
            read_cost_file(tmp_path / "changed.json")
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


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 1 << 22), st.integers(1, 1 << 22), st.sampled_from([1, 2, 3, 7]))
def test_hybrid_times_and_kept_bytes_never_fall_with_length(hybrid, s, other, batch_size):
    shorter, longer = sorted((s, other))
    low = hybrid.all_operations(shorter, batch_size)
    high = hybrid.all_operations(longer, batch_size)
    for key, costs in low.items():
        assert costs.forward_seconds <= high[key].forward_seconds * (1 + 1e-12)
        assert costs.backward_seconds <= high[key].backward_seconds * (1 + 1e-12)
        assert costs.kept_bytes <= high[key].kept_bytes * (1 + 1e-12)
        for name in ("forward_bytes", "backward_bytes"):
            peak, later = (getattr(c, name) + c.kept_bytes for c in (costs, high[key]))
            assert peak <= later * (1 + 1e-12)


def test_hybrid_is_continuous_at_the_edges_of_the_profiled_range(hybrid):
    corrected = 0
    for fit in hybrid.fits:
        for one in fit.fits:
            corrected += one.factors is not None
            for edge in (fit.min_length, fit.max_length):
                below, above = (
                    hybrid_value(one, edge * x, 1, fit.max_length) for x in (1 - 1e-9, 1 + 1e-9)
                )
                assert below == pytest.approx(above, rel=1e-6)
    assert corrected > 5


def test_nothing_is_predicted_below_zero_or_infinite(noisy):
    for s in (1, 5, 127, 129, 32769, 1 << 30, 1 << 40):
        for costs in noisy.all_operations(s, 5).values():
            for name in QUANTITIES:
                assert 0 <= getattr(costs, name) < float("inf")


def test_the_vectorised_evaluation_is_to_the_bit_the_one_that_is_described(noisy):
    """In Python's floats, one after another: so no library and no kind of CPU has a say."""
    kept = QUANTITIES.index("kept_bytes")
    for s in (1, 128, 200, 1024, 1025, 5000, 32768, 32769, 50000, 100000, 1 << 22):
        for b in (1, 2, 5):
            for fit in noisy.fits:
                one_value = hybrid_value if noisy.kind == "hybrid" else paper_value
                expected = [one_value(one, s, b, fit.max_length) for one in fit.fits]
                if noisy.kind == "hybrid":  # of peaks, of which what is kept is a part
                    expected[kept + 1 :] = [
                        max(x - expected[kept], 0) for x in expected[kept + 1 :]
                    ]
                costs = noisy.operation(fit.strategy, fit.operation, s, b)
                assert [getattr(costs, name) for name in QUANTITIES] == expected


WINDOW = 4096
WINDOWED = {"attention@2": {"window": WINDOW}, "attention": {}, "mlp": {"experts": 0}}


def seen(s, window=WINDOW):
    """Pairs of tokens, of which a window leaves s w out but for its first tokens."""
    return s * s - max(s - window, 0) ** 2


@pytest.mark.parametrize("longest", [8192, 131072])
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_attention_with_a_window_grows_with_the_tokens_beyond_it(longest, noise):
    """The same where whole layers are timed; the layers without a window stay quadratic."""
    kinds = {"attention@2": (2, 3), "layer@2": None, "attention": None, "layer": None}
    lengths = [round(x) for x in np.geomspace(128, longest, 8)]
    rng = np.random.default_rng(3)

    def seconds(s, windowed):
        return 2e-4 + 2e-7 * s + 1e-10 * (seen(s) if windowed else s * s)

    points = [
        replace(
            measure("ulysses_z", operation, s, 1),
            forward_seconds=seconds(s, "@" in operation) * np.exp(noise * rng.standard_normal()),
        )
        for operation in kinds
        for s in lengths
    ]
    described = replace(DESCRIPTION, other_layers={"attention@2": (2, 3)}, halves=WINDOWED)
    model = fit_table(CostTable(described, tuple(points), CONSTANTS))
    for operation in kinds:
        for times in (2, 4, 16):
            told = model.predict("ulysses_z", operation, "forward_seconds", longest * times)
            is_near = pytest.approx(seconds(longest * times, "@" in operation), rel=0.1)
            assert told == is_near, (operation, times)


def test_work_that_a_window_only_hides_stays_quadratic():
    s = np.geomspace(128, 32768, 8)
    law = fit_hybrid(
        s, np.ones(8), 2e-4 + 1e-10 * s * s, operation="attention", is_time=True, window=WINDOW
    ).law
    assert law(131072, 1) == pytest.approx(2e-4 + 1e-10 * 131072**2, rel=1e-3)


def test_a_law_with_a_window_is_read_and_evaluated_as_it_was_fitted(tmp_path):
    s = np.geomspace(128, 32768, 8)
    points = [
        replace(measure("metp", name, int(x), 1), backward_seconds=1e-10 * seen(int(x)))
        for name in ("attention@2", "mlp")
        for x in s
    ]
    described = replace(DESCRIPTION, other_layers={"attention@2": (2, 3)}, halves=WINDOWED)
    table = CostTable(described, tuple(points), CONSTANTS)
    model, path = fit_table(table), tmp_path / "costs.json"
    write_cost_file(path, table, model)
    read = read_cost_file(path)
    assert read.table.description == described and read.require_model().fits == model.fits
    (fit,) = [one for one in model.fits if one.operation == "attention@2"]
    backward = fit.fits[QUANTITIES.index("backward_seconds")]
    assert backward.law.window == WINDOW
    for length in (100, WINDOW, 5000, 32768, 50000, 1 << 20):
        expected = hybrid_value(backward, length, 3, fit.max_length)
        assert model.operation("metp", "attention@2", length, 3).backward_seconds == expected


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


def test_operations_with_too_few_lengths_are_left_out_and_named():
    points = (
        *make_table(LENGTHS[:4], ("metp",), model_parts=False).measurements,
        *make_table(LENGTHS[:2], ("ulysses_z",), ("mlp",), model_parts=False).measurements,
        Measurement("ulysses_z", "mlp", 1 << 20, 1, "oom"),
        Measurement("ulysses_z", "attention", 128, 1, "unsupported: n % p"),
        *make_table(LENGTHS[:2], ("metp",), ("layer",), model_parts=False).measurements,  # a check
    )
    table = CostTable(DESCRIPTION, points, CONSTANTS)
    model = fit_table(table)
    assert model.strategies("mlp") == model.strategies("attention") == ("metp",)
    assert unfitted(table) == [
        "ulysses_z mlp: 2 lengths (oom)",
        "ulysses_z attention: 0 lengths (unsupported: n % p)",
    ]
    with pytest.raises(
        UserError, match="no costs of the mlp of 'ulysses_z': the file has those of"
    ):
        model.operation("ulysses_z", "mlp", 128)
    with pytest.raises(UserError, match="nothing was measured at 3 lengths"):
        fit_table(table.only(lambda m: m.strategy == "ulysses_z"))


@pytest.mark.parametrize("quantity", ["seconds", "__class__"])
def test_unknown_quantities_and_impossible_shapes_are_refused(hybrid, quantity):
    with pytest.raises(UserError, match="quantity is one of"):
        hybrid.predict("metp", "mlp", quantity, 128)
    for s, b in ((0, 1), (128, 0), (1 << 50, 1)):
        with pytest.raises(UserError, match="must lie in"):
            hybrid.operation("colossal_z", "mlp", s, b)


def test_predicting_from_a_file_imports_neither_torch_nor_xgboost_nor_matplotlib(tmp_path):
    table = make_table(strategies=("metp",))
    write_cost_file(tmp_path / "costs.json", table, fit_table(table))
    program = (
        "import sys\n"
        "from megatron_paradyse.costs.cost_file import read_cost_file\n"
        "model = read_cost_file(sys.argv[1]).require_model()\n"
        "assert model.predict('metp', 'mlp', 'time_seconds', 999) > 0\n"
        "heavy = {'torch', 'xgboost', 'matplotlib', 'scipy', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "costs.json")]
    subprocess.run(command, check=True, timeout=60)
