"""Laws of attention with a window: what changes where it, or the ranks, begin to matter."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_paradyse.costs.cost_file import read_cost_file, write_cost_file
from megatron_paradyse.costs.fitting import fit_table
from megatron_paradyse.costs.hybrid import fit_hybrid
from megatron_paradyse.costs.packed import share_of_scores
from megatron_paradyse.costs.table import QUANTITIES, CostTable
from tests.costs.changed_files import is_refused
from tests.costs.step_by_step import hybrid_value
from tests.costs.synthetic import CONSTANTS, DESCRIPTION, LENGTHS, measure

WINDOW = 4096
TILE = 10_000


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


def scores_in_tiles(s, reach):
    """Workspace of a kernel that is told of a window only where s is beyond it."""
    return 300.0 * s + np.where(s > WINDOW, 6000 * np.minimum(s, reach), 0.0)


@pytest.mark.parametrize("parts", [1, 4, 8])
def test_bytes_that_jump_at_a_window_and_stop_growing_are_told(parts):
    """The law of one side was above the other's points, or below them by half."""
    s, p = np.geomspace(128, 65536, 14).round(), DESCRIPTION.p
    reach = parts * (WINDOW + 63)
    points = [
        replace(measure("metp", "attention@2", int(x), 1), kept_bytes=1e3 * x, forward_bytes=y)
        for x, y in zip(s, scores_in_tiles(s, reach), strict=True)
    ]
    assert parts in (1, p, 2 * p)
    described = replace(DESCRIPTION, other_layers={"attention@2": (2, 3)}, halves=WINDOWED)
    model = fit_table(CostTable(described, tuple(points), CONSTANTS))
    for x in (200, WINDOW, WINDOW + 1, 7000, 20000, 65536, 1 << 20):
        told = model.operation("metp", "attention@2", x).forward_bytes
        assert told == pytest.approx(float(scores_in_tiles(x, reach)), rel=1e-3), x


def test_scores_in_tiles_are_told_where_the_sequence_goes_in_tiles_too():
    """The laws of few and of many tokens count the same keys."""
    s = np.geomspace(128, 262144, 20).round()

    def truth(x):
        return scores_in_tiles(x, WINDOW + 63) + 2000.0 * np.minimum(x, TILE) - 1e7 * (x > TILE)

    given = {"operation": "attention", "is_time": False, "tile_tokens": TILE}
    fit = fit_hybrid(s, np.ones(20), truth(s), window=WINDOW, reaches=[WINDOW + 63], **given)
    assert fit.law.in_tiles
    for x in (200, 3000, 6000, TILE, TILE + 1, 100_000, 1 << 20):
        assert fit.law(x, 1) == pytest.approx(float(truth(x)), rel=0.02), x


def test_bytes_of_a_window_that_no_law_comes_near_are_those_of_the_nearest_length():
    """Where they jump once more; never below, and above only beside a jump: costs never fall."""
    s = np.geomspace(128, 65536, 14).round()
    kept, more = 1e3 * s, np.where(s > 3 * WINDOW, 5e6, 0.0)
    y = scores_in_tiles(s, WINDOW + 63) + more
    given = {"operation": "attention", "is_time": False, "kept": kept}
    fit = fit_hybrid(s, np.ones(14), y, window=WINDOW, reaches=[WINDOW + 63], **given)
    told = np.array([hybrid_value(fit, x, 1, 65536) for x in s]) / (y + kept)
    assert told.min() >= 1 - 1e-9 and told.max() < 1.03
    assert np.count_nonzero(told > 1 + 1e-9) == 1


def test_bytes_of_an_edge_that_no_law_comes_near_are_those_of_the_nearest_length():
    """Beyond a tile the last one is fuller at some lengths than at others: never below."""
    s = np.geomspace(128, 65536, 14).round()
    y = 1e5 + 300 * np.minimum(s, TILE) + np.where(s > TILE, 1e6 * (np.arange(14) // 2), 0.0)
    given = {"operation": "head", "is_time": False, "kept": 10 * s, "tile_tokens": TILE}
    fit = fit_hybrid(s, np.ones(14), y, whole_tokens=2 * TILE, **given)
    told = np.array([hybrid_value(fit, x, 1, 65536) for x in s]) / (y + 10 * s)
    assert told.min() >= 1 - 1e-9 and told.max() < 1.03


def test_what_is_no_attention_has_no_window():
    d = replace(DESCRIPTION, halves={"attention": {"window": WINDOW}})
    assert d.window("attention") == d.window("layer") == WINDOW
    assert all(d.window(name) == np.inf for name in ("mlp", "embedding", "head"))


def test_a_law_with_a_window_is_read_and_evaluated_as_it_was_fitted(tmp_path):
    s = np.geomspace(128, 32768, 8)
    points = [
        replace(
            measure("metp", name, int(x), 1),
            backward_seconds=1e-10 * seen(int(x)),
            forward_bytes=float(scores_in_tiles(x, WINDOW + 63)),
        )
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
    forward = fit.fits[QUANTITIES.index("forward_bytes")]
    assert (backward.law.window, forward.law.reach) == (WINDOW, WINDOW + 63)
    for length in (100, WINDOW, 5000, 32768, 50000, 1 << 20):
        expected = hybrid_value(backward, length, 3, fit.max_length)
        costs = model.operation("metp", "attention@2", length, 3)
        assert costs.backward_seconds == expected
        peak = hybrid_value(forward, length, 3, fit.max_length)
        assert costs.kept_bytes + costs.forward_bytes == pytest.approx(peak, rel=1e-12)


BEND = -(-8 * WINDOW // 3)  # of the 4 ranks of the description


BENT = tuple(sorted({*LENGTHS, BEND - 4, BEND, 1 << 16, 1 << 17}))


def exchanged(s):
    """What a ring of all keys takes below the bend, and the window's keys from there on."""
    return np.where(s >= BEND, 1e-3 + 1e-7 * s, 2e-4 + 4e-7 * s) + 1e-10 * seen(s)


def bent(name, s):
    """Attention of which rings exchange less from the bend on, in seconds and in bytes."""
    less = 1.0 if name == "ulysses_z" or s < BEND else 0.6
    m = measure(name, "attention", s)
    seconds = float(exchanged(s)) if name != "ulysses_z" else 2e-4 + 4e-7 * s + 1e-10 * seen(s)
    backward = less * (1e6 + 400.0 * s)
    return replace(m, forward_seconds=seconds, backward_bytes=backward, kept_bytes=100.0 * s)


@pytest.fixture(scope="module")
def bent_table():
    described = replace(DESCRIPTION, halves={"attention": {"window": WINDOW}, "mlp": {}})
    points = tuple(bent(name, s) for name in ("megatron_cz", "ulysses_z") for s in BENT)
    return CostTable(described, points, CONSTANTS)


def test_what_a_narrow_window_changes_has_a_law_on_either_side(bent_table):
    """At every length measured and beyond, though seconds and bytes fall at the bend."""
    model = fit_table(bent_table)
    for name in ("megatron_cz", "ulysses_z"):
        for s in (128, 3000, BEND - 1, BEND, 20_000, 1 << 18):
            found, truth = model.operation(name, "attention", s), bent(name, s)
            assert found.backward_bytes == pytest.approx(truth.backward_bytes, rel=5e-3)
            assert found.forward_seconds == pytest.approx(truth.forward_seconds, rel=0.02)
    laws = [fit.law for fit in model.fits_of("megatron_cz", "attention")]
    assert [law.beyond is not None for law in laws] == [True, False, False, False, True]
    assert laws[0].bend == BEND
    # one law for all that no window changes, and for what is no ring's
    assert not any(fit.law.beyond for fit in model.fits_of("ulysses_z", "attention"))


def test_noise_makes_no_second_law():
    described = replace(DESCRIPTION, halves={"attention": {"window": WINDOW}, "mlp": {}})
    split = 0
    for seed in range(20):
        noise = np.exp(0.05 * np.random.default_rng(seed).standard_normal(len(BENT)))
        points = [
            replace(bent("ulysses_z", s), strategy="metp", forward_seconds=times * seconds)
            for s, times in zip(BENT, noise, strict=True)
            for seconds in [bent("ulysses_z", s).forward_seconds]
        ]
        model = fit_table(CostTable(described, tuple(points), CONSTANTS))
        split += model.fits_of("metp", "attention")[0].law.beyond is not None
    assert split <= 2


def test_pairs_beyond_a_bend_take_what_they_take_below(bent_table):
    fit = fit_table(bent_table).fits_of("megatron_cz", "attention")[0]
    for s in (4096, 1 << 16, 1 << 17):
        share = 1e-10 * seen(s) / float(exchanged(s))
        assert share_of_scores(fit, s) == pytest.approx(share, rel=0.1)


def test_laws_on_either_side_of_a_bend_are_read_as_they_were_written(bent_table, tmp_path):
    model, path = fit_table(bent_table), tmp_path / "costs.json"
    write_cost_file(path, bent_table, model)
    again = read_cost_file(path).require_model()
    assert again.fits == model.fits
    (fit,) = [one for one in model.fits if one.strategy == "megatron_cz"]
    for s, b in ((BEND - 1, 1), (BEND, 1), (BEND, 3), (128, 2), (1 << 20, 1)):
        kept, *_, backward = (hybrid_value(one, s, b, fit.max_length) for one in fit.fits[2:])
        assert again.operation("megatron_cz", "attention", s, b).backward_bytes == backward - kept
    for change, message in (
        ({"from": 0}, "beyond.from must lie in"),
        ({"from": BEND + 1}, "all begin at one length"),
        ({"pieces": [[1.0, 2.0]]}, "beyond.pieces"),
        ({"more": 1}, "beyond has unknown 'more'"),
        ({"beyond": {}}, "beyond has unknown 'beyond'"),
    ):
        is_refused(path, "beyond", change, message)
