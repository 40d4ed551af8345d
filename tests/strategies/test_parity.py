"""Every strategy equals the float64 layer on one process: output and every gradient."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch

from megatron_paradyse.strategies import strategy_names
from tests.strategies.cases import FLOAT32_TOLERANCE, MASKS, AttentionCase, MlpCase, can_run
from tests.strategies.deviations import Deviation, combine
from tests.strategies.harness import run_ranks
from tests.strategies.layers import errors_of_one_process, run_case

# A log-sum-exp of 1e4 is a multiple of 1e-3 in float32, and probabilities are exp(score - lse).
LARGE_SCORE_TOLERANCE = 2e-3

HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}
BIAS_AND_ROPE = list(itertools.product((False, True), (None, "half", "interleaved", "partial")))


def _attention_grid(strategy: str, p: int):
    """Mask x heads in full; bias x rope in turn, so that each pair of factors occurs."""
    for i, mask in enumerate(MASKS):
        for j, (n, g) in enumerate(HEADS.values()):
            bias, rope = BIAS_AND_ROPE[(3 * i + 3 * j + p) % len(BIAS_AND_ROPE)]
            yield AttentionCase(strategy, p, mask, n=n, g=g, bias=bias, rope=rope)


def _special_attention(strategy: str, p: int):
    """What the grid leaves out: norms, windows, dropout, other sizes."""
    make = functools.partial(AttentionCase, strategy, p)
    yield make("causal", g=2, qk_norm="layernorm", rope="half", bias=True)
    yield make("packed_causal", g=1, qk_norm="rmsnorm", rope="half")
    yield make("bidirectional", qk_norm="l2", rope="interleaved")
    yield make("packed_causal", g=2, qk_norm="layernorm", rope="scaled")
    for window in (1, 5, 9, 10, 23):  # narrow up to (p-1)/2p of the 24
        yield make("causal", g=2, window=window)
    yield make("causal", g=1, window=4, dropout=0.3, rope="half", bias=True, qk_norm="rmsnorm")
    yield make("padded_causal", g=2, window=7, rope="interleaved")
    yield make("packed_causal", window=3, rope="half")
    yield make("causal", g=2, dropout=0.3)
    yield make("padded", dropout=0.5, rope="half")
    yield make("causal", g=2, offset=True, rope="scaled", bias=True)
    yield make("padded_causal", g=2, offset=True, window=5)
    yield make("packed", offset=True, dropout=0.3)
    for (n, g), mask in itertools.product(HEADS.values(), ("causal", "packed_causal", "padded")):
        bias, rope = BIAS_AND_ROPE[(n // g + len(mask) + p) % len(BIAS_AND_ROPE)]
        yield make(mask, n=n, g=g, bias=bias, rope=rope, gate=True)
    yield make("causal", g=2, gate=True, qk_norm="layernorm", dropout=0.3, offset=True, bias=True)
    yield make("packed_causal", g=1, gate=True, qk_norm="rmsnorm", rope="scaled", window=5)
    yield make("bidirectional", n=8, g=2, gate=True, d=6, h=10, b=3, tile_rows=6)
    yield make("causal", b=1, s=4 * p)
    yield make("causal", s=p)
    yield make("causal", g=1, d=6, h=10, b=3)


def _key_heads_one_by_one():
    """METP's backward after a second run of a long sequence, with several key heads in a block."""
    make = functools.partial(AttentionCase, "metp+recompute", tile_rows=4)
    yield make(2, "causal", n=8, g=4, rope="half", bias=True, dropout=0.3)
    yield make(2, "packed", n=6, g=6, qk_norm="l2", rope="scaled")
    yield make(3, "bidirectional", n=12, g=6, d=6, qk_norm="rmsnorm", rope="partial")
    yield make(4, "packed_causal", n=12, g=3, rope="interleaved", offset=True)
    yield make(1, "padded_causal", n=4, g=2, qk_norm="layernorm", rope="half", dropout=0.2)
    yield make(2, "causal", n=8, g=4, rope="half", bias=True, gate=True, offset=True)
    yield make(4, "packed_causal", n=12, g=3, qk_norm="rmsnorm", gate=True)


def _few_attention(strategy: str, p: int):
    n = 2 * p
    for mask in ("causal", "bidirectional", "packed_causal", "padded"):
        yield AttentionCase(strategy, p, mask, n=n, g=n, rope="half")
    yield AttentionCase(strategy, p, "causal", n=n, g=1, d=6, bias=True)
    yield AttentionCase(strategy, p, "causal", n=n, g=p, window=8)
    yield AttentionCase(strategy, p, "packed", n=n, g=p, dropout=0.2)
    yield AttentionCase(strategy, p, "causal", n=n, g=1, offset=True)
    yield AttentionCase(strategy, p, "causal", n=n, g=1, gate=True, bias=True)
    yield AttentionCase(strategy, p, "packed_causal", n=n, g=n, gate=True, rope="half")


def _cases() -> list[AttentionCase | MlpCase]:
    cases: list[AttentionCase | MlpCase] = []
    for strategy in strategy_names():
        for p in (1, 2, 4):
            cases += _attention_grid(strategy, p)
            cases += _special_attention(strategy, p)
            for gated, bias in itertools.product((False, True), repeat=2):
                cases.append(MlpCase(strategy, p, gated, bias))
            recompute = f"{strategy}+recompute"
            again = AttentionCase(recompute, p, "causal", g=2, dropout=0.2, qk_norm="rmsnorm")
            cases += [again, replace(again, offset=True), replace(again, gate=True, bias=True)]
            cases.append(MlpCase(recompute, p, gated=True, bias=True))
        offload = f"{strategy}+offload"
        cases.append(AttentionCase(offload, 2, "causal", g=2, dropout=0.2, rope="half"))
        cases.append(AttentionCase(offload, 2, "causal", g=1, gate=True, rope="half"))
        cases.append(MlpCase(offload, 2, gated=True, bias=True))
        for p, tile_rows in ((1, 4), (2, 10), (4, 2), (3, 6)):  # of 24/p positions, b = 2
            cases.append(MlpCase(f"{strategy}+recompute", p, True, True, tile_rows=tile_rows))
        cases.append(MlpCase(offload, 2, tile_rows=4))
        for p in (3, 8):
            cases += _few_attention(strategy, p)
            cases.append(MlpCase(strategy, p, gated=True, bias=True))
            cases.append(MlpCase(strategy, p, gated=False))
    cases += _key_heads_one_by_one()
    return [case for case in cases if isinstance(case, MlpCase) or can_run(case)]


def _half_cases() -> list[AttentionCase | MlpCase]:
    cases: list[AttentionCase | MlpCase] = []
    for strategy, p in itertools.product(strategy_names(), (1, 2, 4)):
        for mask, g in (("causal", 2), ("packed_causal", 4)):
            rope = "half" if mask == "causal" else "scaled"
            case = AttentionCase(strategy, p, mask, g=g, rope=rope, bias=True)
            cases.append(_with_dtype(case, torch.bfloat16))
        cases.append(MlpCase(strategy, p, gated=True, bias=True, dtype=torch.bfloat16))
        cases.append(_with_dtype(AttentionCase(strategy, p, "causal"), torch.float16))
        for mask in ("causal", "padded"):  # 16 heads: of 4 offsets roundings may cancel by chance
            case = AttentionCase(strategy, p, mask, n=16, g=8, offset=True)
            cases.append(_with_dtype(case, torch.bfloat16))
            case = AttentionCase(strategy, p, mask, g=2, gate=True, bias=True, rope="half")
            cases.append(_with_dtype(case, torch.bfloat16))
        recompute = f"{strategy}+recompute"
        cases.append(MlpCase(recompute, p, True, True, dtype=torch.bfloat16, tile_rows=4))
        long = AttentionCase(recompute, p, rope="half", tile_rows=4)
        cases.append(_with_dtype(long, torch.bfloat16))
    cases.append(MlpCase("ulysses_z+offload", 2, gated=True, bias=True, dtype=torch.bfloat16))
    return [case for case in cases if isinstance(case, MlpCase) or can_run(case)]


def _with_dtype(case: AttentionCase, dtype: torch.dtype) -> AttentionCase:
    return AttentionCase(**{**case.__dict__, "dtype": dtype})


CASES = {case.name: case for case in _cases()}
HALF_CASES = {case.name: case for case in _half_cases()}
LARGE_CASES = {
    case.name: case
    for strategy, p in itertools.product(strategy_names(), (1, 2, 4))
    for mask in ("causal", "padded", "packed_causal")
    if can_run(case := AttentionCase(strategy, p, mask, query_scale=3000.0))
}


def test_grid_covers_every_pair_of_factors():
    for strategy in strategy_names():
        cases = [case for p in (1, 2, 4) for case in _attention_grid(strategy, p)]
        factors = {
            "p": (1, 2, 4),
            "mask": MASKS,
            "g": [g for _, g in HEADS.values()],
            "bias": (False, True),
            "rope": (None, "half", "interleaved", "partial"),
        }
        for first, second in itertools.combinations(factors, 2):
            covered = {(getattr(case, first), getattr(case, second)) for case in cases}
            assert covered >= set(itertools.product(factors[first], factors[second])), (
                first,
                second,
            )


@functools.cache
def _results(p: int) -> dict[str, dict[str, Deviation]]:
    """Deviations of all cases on p ranks, from one spawn."""
    cases = {n: case for n, case in (CASES | HALF_CASES | LARGE_CASES).items() if case.p == p}
    return {name: combine(ranks) for name, ranks in run_ranks(p, run_case, cases).items()}


@pytest.mark.parametrize("name", CASES)
def test_float32_output_and_gradients_match_float64_reference(name):
    errors = {t: part.relative for t, part in _results(CASES[name].p)[name].items()}
    assert max(errors.values()) <= FLOAT32_TOLERANCE, errors


@pytest.mark.parametrize("name", LARGE_CASES)
def test_scores_of_ten_thousand_stay_finite_and_right(name):
    errors = {t: part.relative for t, part in _results(LARGE_CASES[name].p)[name].items()}
    assert max(errors.values()) <= LARGE_SCORE_TOLERANCE, errors


@pytest.mark.parametrize("name", HALF_CASES)
def test_half_types_err_at_most_twice_as_much_as_one_process(name):
    """By norm: the largest single element of so few is off by a rounding more or less."""
    case = HALF_CASES[name]
    errors = {t: part.by_norm for t, part in _results(case.p)[name].items()}
    own = errors_of_one_process(case)
    worse = {t: (errors[t], own[t]) for t in errors if not errors[t] <= 2 * own[t]}
    assert not worse, worse
