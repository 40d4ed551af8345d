"""The fitted models, on synthetic tables (tests/costs/synthetic.py)."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_paradyse.costs.cost_file import write_cost_file
from megatron_paradyse.costs.fitting import fit_table, unfitted
from megatron_paradyse.costs.forest import FOREST, forest_steps, nearest
from megatron_paradyse.costs.model import MODELS, OperationFit
from megatron_paradyse.costs.table import BYTES_ONLY, QUANTITIES, CostTable, Measurement
from megatron_paradyse.errors import UserError
from tests.costs.step_by_step import hybrid_value, paper_value
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
def test_the_order_of_a_table_changes_no_fit(kind):
    shuffled = list(NOISY.measurements)
    np.random.default_rng(0).shuffle(shuffled)
    again = fit_table(CostTable(DESCRIPTION, shuffled, CONSTANTS), kind)
    found = {(fit.strategy, fit.operation): fit for fit in again.fits}
    for fit in fit_table(NOISY, kind).fits:
        assert found[fit.strategy, fit.operation] == fit


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


def test_a_range_ends_at_the_longest_length_of_any_batch_size():
    """A polynomial took over, and residuals faded, where the larger batches end."""
    timed = ((1, 128, 4096), (4, 128, 1024))
    fit = OperationFit("metp", "attention", 64, 8192, (), timed)
    ends = [fit.longest_seen(name) for name in QUANTITIES]
    assert ends == [4096, 4096, 8192, 8192, 8192]


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


def test_of_two_batch_sizes_as_near_the_smaller_tells():
    assert [nearest((1, 3, 8), b) for b in (1, 2, 3, 5, 6, 99)] == [0, 0, 1, 1, 2, 2]


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


def test_operations_with_too_few_lengths_are_left_out_and_named():
    checks = make_table(LENGTHS[:2], ("metp",), ("layer",), model_parts=False).measurements
    points = (
        *make_table(LENGTHS[:4], ("metp",), model_parts=False).measurements,
        *make_table(LENGTHS[:2], ("ulysses_z",), ("mlp",), model_parts=False).measurements,
        Measurement("ulysses_z", "mlp", 1 << 20, 1, "oom"),
        Measurement("ulysses_z", "attention", 128, 1, "unsupported: n % p"),
        *(replace(m, operation=name) for m in checks for name in ("layer", "layer@2")),
    )
    table = CostTable(replace(DESCRIPTION, other_layers={"mlp@2": (2,)}), points, CONSTANTS)
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


def test_a_forest_without_xgboost_says_what_to_install(monkeypatch):
    """It was an internal error, a fault of ours."""
    monkeypatch.setitem(sys.modules, "xgboost", None)
    s = np.array([128.0, 256, 512, 1024])
    with pytest.raises(UserError, match=r"a fit needs xgboost .*: pip install xgboost"):
        forest_steps(s, np.ones(4), s)
