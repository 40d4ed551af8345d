"""Factors learnt from microbatches find the truth, and change plans only with reason."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_paradyse.costs.correction import (
    DOUBT,
    DRIFT,
    FADE,
    MOST_FACTOR,
    NOISE,
    PRIOR_DRIFT,
    PRIOR_STRATEGY,
    Correction,
    Observation,
    corrected,
)
from megatron_paradyse.costs.table import OperationCosts

NAMES = ("megatron_ts", "ulysses_z", "metp", "metp+recompute")


def learn(correction, true, *, rounds=60, noise=0.1, ran=NAMES[:2], seed=0):
    """Microbatches of one or two strategies, measured with true factors and noise."""
    random = np.random.default_rng(seed)
    for _ in range(rounds):
        observations = []
        for _ in range(4):
            chosen = random.choice(ran, size=random.integers(1, len(ran) + 1), replace=False)
            costs = {str(name): random.uniform(0.1, 1) for name in chosen}
            measured = sum(seconds * true[name] for name, seconds in costs.items())
            predicted = {n: seconds * correction.factors(n)[0] for n, seconds in costs.items()}
            seen = measured * math.exp(random.normal(0, noise))
            observations.append(Observation(predicted, seen))
        values = correction.update(correction.sums(observations), correction.peaks(observations))
        correction.apply(values)


@pytest.mark.parametrize("true", [(1.4, 0.8), (3.0, 3.0), (0.4, 1.0)])
def test_the_factors_of_what_runs_come_to_within_5_percent_of_the_truth(true):
    correction = Correction(NAMES)
    learn(correction, dict(zip(NAMES, true, strict=False)))
    for name, factor in zip(NAMES[:2], true, strict=True):
        assert correction.factors(name)[0] == pytest.approx(factor, rel=0.05)


def test_factors_are_those_of_a_regression_with_a_prior_in_which_older_microbatches_fade():
    """Rows of the drift and each strategy's own, by least squares."""
    correction = Correction(NAMES)
    seen = ({"megatron_ts": 0.75, "ulysses_z": 0.25}, 1.2), ({"metp": 1.0}, 0.9)
    for predicted, measured in seen:
        sums = correction.sums([Observation(predicted, measured)])
        found = correction.update(sums, correction.peaks([]))[0]
    weight = np.array([FADE**0.5 / NOISE, 1 / NOISE])
    rows = np.array([[1, 0.75, 0.25, 0], [1, 0, 0, 1]]) * weight[:, None]
    prior = np.diag([1 / PRIOR_DRIFT, *[1 / PRIOR_STRATEGY] * 3])
    told = np.concatenate([np.log([1.2, 0.9]) * weight, np.zeros(4)])
    state = np.linalg.lstsq(np.concatenate([rows, prior]), told, rcond=None)[0]
    np.testing.assert_allclose(found, state[0] + state[1:], rtol=1e-9)


def test_longer_microbatches_weigh_more():
    """Of as many that say one thing and the other."""
    correction = Correction(NAMES)
    long, short = Observation({"metp": 2.0}, 3.0), Observation({"metp": 0.2}, 0.2)
    for _ in range(20):
        correction.apply(correction.update(correction.sums([long, short]), correction.peaks([])))
        factor = correction.factors("metp")[0]
        long, short = (
            Observation({"metp": size * factor}, size * true)
            for size, true in ((2.0, 1.5), (0.2, 1.0))
        )
    assert 1.35 < factor < 1.45


def test_no_microbatch_weighs_more_than_four_of_average_length():
    correction = Correction(NAMES)
    ones = [correction.sums([Observation({"metp": size}, size)])[0, 0] for size in (1.0, 1e6)]
    assert ones == pytest.approx([1 / NOISE**2, 4 / NOISE**2])


def test_a_machine_slower_at_everything_changes_no_order():
    """What has not run follows the drift that all show, so that it does not look cheaper."""
    correction = Correction(NAMES)
    learn(correction, {"megatron_ts": 2.0}, ran=NAMES[:1])
    ran, other = correction.factors("megatron_ts")[0], correction.factors("metp")[0]
    assert ran == pytest.approx(2.0, rel=0.05)
    assert 0.9 * ran < other < ran


def test_recomputation_shares_the_factors_of_its_strategy():
    correction = Correction(NAMES)
    learn(correction, {"metp": 1.5}, ran=["metp"])
    for suffix in ("+recompute", "+offload"):
        assert correction.factors(f"metp{suffix}") == correction.factors("metp")
    assert correction.factors("unheard-of") == (1.0, 1.0)


def test_a_microbatch_of_which_no_seconds_are_left_counts_as_a_fast_one():
    """As where multi-token prediction is predicted to take longer than all that was measured."""
    correction, fast = Correction(NAMES), [Observation({"metp": 1.0}, 0.0)] * 9
    correction.apply(correction.update(correction.sums(fast), correction.peaks(fast)))
    assert 0.5 < correction.factors("metp")[0] < 0.9


def test_one_stalled_microbatch_moves_no_factor_by_more_than_its_share():
    correction = Correction(NAMES)
    learn(correction, {"megatron_ts": 1.0}, ran=NAMES[:1])
    before = correction.factors("megatron_ts")[0]
    stalled = [Observation({"megatron_ts": 0.5}, 500.0)]
    correction.apply(correction.update(correction.sums(stalled), correction.peaks(stalled)))
    assert correction.factors("megatron_ts")[0] < 1.1 * before


def test_stalls_of_one_microbatch_in_ten_count_no_more_than_others():
    """They count as 1.65 times the prediction, so that the rest of the ten outweigh them."""
    correction = Correction(NAMES)
    for _ in range(60):
        seconds = correction.factors("megatron_ts")[0] * 0.5
        observations = [Observation({"megatron_ts": seconds}, 0.5)] * 9
        observations.append(Observation({"megatron_ts": seconds}, 50.0))
        values = correction.update(correction.sums(observations), correction.peaks(observations))
        correction.apply(values)
    assert 1.0 < correction.factors("megatron_ts")[0] < 1.1


def test_noise_around_the_truth_leaves_plans_alone_once_learnt():
    correction = Correction(NAMES)
    learn(correction, {"megatron_ts": 1.3, "ulysses_z": 1.1})
    inforce = correction.seconds.copy()
    changes = 0
    for seed in range(20):
        learn(correction, {"megatron_ts": 1.3, "ulysses_z": 1.1}, rounds=1, seed=1 + seed)
        changes += not np.array_equal(correction.seconds, inforce)
        inforce = correction.seconds.copy()
    assert changes <= 4


def test_a_peak_beyond_the_prediction_raises_the_bytes_of_its_strategies_for_good():
    correction = Correction(NAMES)
    none = correction.sums([])
    over = [Observation({"metp": 1.0}, 1.0, peak_ratio=1.5), Observation({"ulysses_z": 1.0}, 1.0)]
    assert correction.apply(correction.update(none, correction.peaks(over)))
    assert correction.factors("metp")[1] == 1.5 and correction.factors("ulysses_z")[1] == 1.0
    small = [Observation({"metp": 1.0}, 1.0, peak_ratio=1.1)]  # of the corrected prediction
    correction.apply(correction.update(none, correction.peaks(small)))
    assert correction.factors("metp")[1] == pytest.approx(1.65)
    correction.apply(correction.update(none, correction.peaks([])))
    assert correction.factors("metp")[1] == pytest.approx(1.65)


def test_corrected_costs_scale_what_they_should():
    correction = Correction(NAMES)
    correction.seconds[:] = [math.log(2), 0, 0]
    correction.bytes[:] = [3, 1, 2]
    costs = corrected(lambda *key: OperationCosts(1, 2, 10, 20, 30), correction)
    assert costs("megatron_ts+recompute", "mlp", 8, 1) == OperationCosts(2, 4, 30, 60, 90)
    assert costs("ulysses_z", "mlp", 8, 1) == OperationCosts(1, 2, 10, 20, 30)
    assert costs("metp", "mlp", 8, 1) == OperationCosts(1, 2, 20, 40, 60)
    assert costs("model", "head", 8, 1) == OperationCosts(1, 2, 10, 20, 30)


def test_drift_is_told_once_for_each_strategy_that_ran():
    correction = Correction(NAMES)
    learn(correction, {"megatron_ts": 1.0 + 2 * DRIFT, "ulysses_z": 1.0})
    lines = correction.drifted(["megatron_ts", "ulysses_z"])
    assert len(lines) == 1 and "profile again" in lines[0] and lines[0].startswith("megatron_ts")
    assert correction.drifted(["megatron_ts", "ulysses_z"]) == []


def run_the_fastest(correction, prices, true, *, rounds, explore=True, noise=0.05):
    """Microbatches of the strategy that costs least by corrected prices; its names, by round."""
    random, ran = np.random.default_rng(0), []
    for _ in range(rounds):
        planned = {name: price * correction.factors(name)[0] for name, price in prices.items()}
        chosen = min(planned, key=planned.__getitem__)
        ran.append(chosen)
        measured = [
            prices[chosen] * true[chosen] * math.exp(random.normal(0, noise)) for _ in range(4)
        ]
        observations = [Observation({chosen: planned[chosen]}, seconds) for seconds in measured]
        sums, peaks = correction.sums(observations), correction.peaks(observations)
        correction.apply(correction.update(sums, peaks, explore=explore))
    return ran


PRICES = {"megatron_ts": 1.0, "ulysses_z": 1.1, "metp": 2.5}


def test_a_strategy_priced_too_low_is_left_for_one_that_trials_show_to_be_faster():
    """Its own time is 1.6 of the file's; without trials all others are believed to be as slow."""
    true = {"megatron_ts": 1.6, "ulysses_z": 1.0, "metp": 1.0}
    ran = run_the_fastest(Correction(NAMES), PRICES, true, rounds=100)
    assert set(ran[10:]) == {"ulysses_z"}
    ran = run_the_fastest(Correction(NAMES), PRICES, true, rounds=100, explore=False)
    assert set(ran) == {"megatron_ts"}


def test_where_all_are_slower_each_is_tried_once_at_most_and_the_fastest_stays():
    """metp would need to be 2.5 times as fast as believed: nobody tries it."""
    correction = Correction(NAMES)
    ran = run_the_fastest(correction, PRICES, dict.fromkeys(PRICES, 1.6), rounds=100)
    assert ran.count("ulysses_z") == 1 and "metp" not in ran
    assert ran[10:] == ["megatron_ts"] * 90
    assert correction.factors("ulysses_z")[0] == pytest.approx(1.6, rel=0.05)


@pytest.mark.parametrize("factor", [0.6, 1.0, 1.08])
def test_nothing_is_tried_while_the_file_is_about_right(factor):
    ran = run_the_fastest(Correction(NAMES), PRICES, dict.fromkeys(PRICES, factor), rounds=60)
    assert set(ran) == {"megatron_ts"}


def test_nothing_is_tried_before_three_microbatches_were_seen():
    correction, slow = Correction(NAMES), [Observation({"megatron_ts": 1.0}, 1.6)]
    for tried in (False, False, True):
        sums, peaks = correction.sums(slow), correction.peaks(slow)
        assert bool(correction.update(sums, peaks, explore=True)[1].any()) == tried


@pytest.mark.parametrize("took", [1.3, 1.6])
def test_a_hope_is_the_drift_beyond_doubt_up_to_one_deviation(took):
    correction, slow = Correction(NAMES), [Observation({"megatron_ts": 1.0}, took)] * 9
    found = correction.update(correction.sums(slow), correction.peaks(slow), explore=True)[1]
    drift = math.log(took) / (1 + (PRIOR_STRATEGY**2 + NOISE**2 / len(slow)) / PRIOR_DRIFT**2)
    hope = min(drift - math.log1p(DOUBT), PRIOR_STRATEGY)
    assert found == pytest.approx([0.0, hope, hope])


def test_given_factors_are_in_force_within_bounds():
    """As a trace tells them."""
    correction = Correction(NAMES)
    correction.set_seconds({"megatron_ts": 0.5, "ulysses_z": 1e3, "unheard-of": 2.0})
    found = [correction.factors(name)[0] for name in NAMES[:3]]
    assert found == pytest.approx([0.5, MOST_FACTOR, 1.0])
    correction.set_seconds({"megatron_ts": 0.0})
    assert correction.factors("megatron_ts")[0] == pytest.approx(1 / MOST_FACTOR)


def test_trials_are_told_once_and_by_the_trace_while_they_last():
    correction = Correction(NAMES)
    assert correction.trials() == []
    slow = [Observation({"megatron_ts": 1.0}, 1.6)] * 9
    sums, peaks = correction.sums(slow), correction.peaks(slow)
    assert correction.apply(correction.update(sums, peaks, explore=True))
    told = "what ran takes longer than the cost file says: trying, where they may be faster, "
    assert correction.trials() == [told + "for a few iterations ulysses_z, metp"]
    assert correction.trials() == []
    record = correction.as_record()
    assert record["hopes"]["megatron_ts"] == 1.0 and record["hopes"]["metp"] < 0.9
    believed = record["seconds_factors"]["metp"]
    assert correction.factors("metp")[0] == pytest.approx(believed * record["hopes"]["metp"], 1e-3)
    assert correction.apply(correction.update(0 * sums, peaks))  # too few iterations are left
    assert "hopes" not in correction.as_record()
