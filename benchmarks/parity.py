"""Every strategy against the float64 layer on one process, over a random sample of cases.

The cases, the oracle and the tolerances are those of tests/strategies. float32: the relative error
of output and gradients, a failure above 1e-5. bfloat16: the error over that of a single-process
bfloat16 layer, a failure above 2; without query/key norms, whose gradients are d values each, too
few for a ratio of two rounding errors to mean anything.

    .venv/bin/python benchmarks/parity.py --json
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.common import finish, options
from megatron_paradyse.errors import UserError
from megatron_paradyse.strategies import get_strategy, parse_strategy_name, strategy_names
from tests.strategies.cases import FLOAT32_TOLERANCE, MASKS, AttentionCase, MlpCase
from tests.strategies.deviations import Deviation, combine
from tests.strategies.harness import run_ranks
from tests.strategies.layers import errors_of_one_process, run_case

BFLOAT16_TOLERANCE = 2.0
SEED = 3


def sample(strategy: str, p: int, count: int) -> list[AttentionCase | MlpCase]:
    """So many different cases that the strategy runs on p ranks; one in four is an MLP."""
    generator = random.Random(f"{SEED} {strategy} {p}")
    cases: dict[str, AttentionCase | MlpCase] = {}
    for case in _stream(generator, strategy, p):
        if len(cases) == count:
            break
        if isinstance(case, MlpCase) or (_runs(case) and _has_gradients(case)):
            cases[case.name] = case
    return list(cases.values())


def _stream(generator: random.Random, strategy: str, p: int) -> Iterator[AttentionCase | MlpCase]:
    choose = generator.choice
    while True:
        name = f"{strategy}{choose(['', '', '', '+recompute'])}"
        dtype = choose([torch.float32, torch.float32, torch.bfloat16])
        s, b, h = p * choose([6, 10, 15]), choose([1, 2, 3]), 8 * choose([2, 3, 5]) * p
        if choose(range(4)) == 0:
            gated, bias = choose([False, True]), choose([False, True])
            yield MlpCase(name, p, gated, bias, h=h, f=24 * p, s=s, b=b, dtype=dtype)
            continue
        mask, float32 = choose(MASKS), dtype == torch.float32
        n = p * choose([1, 2, 3]) if p > 2 else choose([2, 4, 6])
        yield AttentionCase(
            name,
            p,
            mask,
            n=n,
            g=choose([g for g in range(1, n + 1) if n % g == 0]),
            d=choose([8, 16]),
            h=h,
            s=s,
            b=b,
            bias=choose([False, True]),
            rope=choose([None, "half", "interleaved", "partial"]),
            qk_norm=choose([None, None, "layernorm", "rmsnorm", "l2"] if float32 else [None]),
            window=choose([None, None, 5]) if mask.endswith("causal") else None,
            dropout=choose([0.0, 0.0, 0.2]) if float32 else 0.0,
            dtype=dtype,
        )


def _has_gradients(case: AttentionCase) -> bool:
    """A bias that all keys share changes nothing: its gradient is 0, unless RoPE turns it."""
    return case.qk_norm != "layernorm" or case.rope is not None


def _runs(case: AttentionCase) -> bool:
    try:
        get_strategy(parse_strategy_name(case.strategy)[0]).check(case.shape, case.p)
    except UserError:
        return False
    return True


def _error(case, parts: dict[str, Deviation]) -> float:
    """What the tolerance of the case's dtype is about, of the worst tensor."""
    if case.dtype == torch.float32:
        return max(part.relative for part in parts.values())
    own = errors_of_one_process(case)
    return max(part.by_norm / own[name] if part.by_norm else 0.0 for name, part in parts.items())


def run(ranks: tuple[int, ...], count: int) -> dict:
    """`count` cases per strategy and group size."""
    errors: dict[torch.dtype, dict[str, float]] = {torch.float32: {}, torch.bfloat16: {}}
    for p in ranks:
        cases = {c.name: c for name in strategy_names() for c in sample(name, p, count)}
        print(f"p={p}: {len(cases)} cases", file=sys.stderr, flush=True)
        for name, by_rank in run_ranks(p, run_case, cases).items():
            errors[cases[name].dtype][name] = _error(cases[name], combine(by_rank))
    limits = {torch.float32: FLOAT32_TOLERANCE, torch.bfloat16: BFLOAT16_TOLERANCE}
    failed = {
        name: error
        for dtype, limit in limits.items()
        for name, error in errors[dtype].items()
        if not error <= limit
    }
    return {
        "cases": sum(map(len, errors.values())),
        "failures": len(failed),
        "failed": failed,
        "max_rel_error_fp32": max(errors[torch.float32].values()),
        "max_bf16_error_over_single_process": max(errors[torch.bfloat16].values()),
    }


def main() -> None:
    arguments = options(__doc__.splitlines()[0]).parse_args()
    ranks, count = ((2,), 12) if arguments.quick else ((1, 2, 3, 4, 8), 30)
    configuration = {"ranks": ranks, "cases_per_strategy_and_group": count, "seed": SEED}
    finish("parity", run(ranks, count), configuration, arguments)


if __name__ == "__main__":
    main()
