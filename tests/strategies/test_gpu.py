"""On a CUDA device: every kernel, and every strategy with all ranks on that one device.

Ranks communicate through host memory (staging.py, proven on the CPU by test_staging.py), so that
what is new here are the kernels. The oracle is the float64 layer on the CPU.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest
import torch

from megatron_paradyse.packing.row import contiguous
from megatron_paradyse.strategies import strategy_names
from megatron_paradyse.strategies.kernels import (
    CUDA_EFFICIENT,
    CUDA_FLASH,
    FLASH_ATTN,
    FUSED_TILES,
    TILED,
    choose_kernel,
)
from tests.strategies import test_packed_rows
from tests.strategies.cases import FLOAT32_TOLERANCE, AttentionCase, MlpCase, can_run
from tests.strategies.deviations import Deviation, combine
from tests.strategies.harness import run_every_case
from tests.strategies.layers import errors_of_one_process, run_case
from tests.strategies.pieces import HEADS, MASKS, attend_in_pieces
from tests.strategies.staging import staged
from tests.strategies.test_parity import CASES, LARGE_CASES

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

# A float32 product on tensor cores is that of parts of fewer bits: to 2^-21 or so of scores of 1e4.
LARGE_SCORE_TOLERANCE = 1e4 * 2**-21
HALF_TYPES = (torch.bfloat16, torch.float16)
# The gradient of a norm of heads in a half type has d values, and what they err by is luck: of
# single draws ours err by 0.5 to 2.3 times what one process does, of 24 by 0.94 to 0.98 times.
DRAWS = 4


def gpu_cases() -> dict[str, AttentionCase | MlpCase]:
    """The float32 cases of the CPU, each also in the half types; and some of more than one tile."""
    float32 = [case for case in CASES.values() if case.p in (1, 2, 4)]
    for strategy, p in itertools.product(strategy_names(), (1, 2, 4)):
        for mask, window in (("causal", None), ("bidirectional", None), ("packed_causal", 70)):
            case = AttentionCase(
                strategy, p, mask, n=8, g=4, d=64, h=64, s=512, window=window, rope="half"
            )
            if can_run(case):
                float32.append(case)
    half = [_larger(replace(case, dtype=dtype)) for case in float32 for dtype in HALF_TYPES]
    rows = {name: case for name, case in test_packed_rows.CASES.items() if case.p in (1, 2, 4)}
    for strategy, p, dtype in itertools.product(strategy_names(), (1, 2, 4), HALF_TYPES):
        row = contiguous((200, 60, 1, 130, 100), p, alignment=512)
        case = AttentionCase(
            strategy, p, n=8, g=4, d=64, h=64, s=512, b=1, rope="half", dtype=dtype, row=row
        )
        rows[f"{case.name}-row"] = case
    return {case.name: case for case in (*float32, *half)} | rows


def _larger(case: AttentionCase | MlpCase) -> AttentionCase | MlpCase:
    """Of enough elements that errors by norm do not depend on the luck of a few roundings."""
    case = replace(case, h=64, s=case.s if case.s > 96 else 96)
    if isinstance(case, MlpCase):
        return replace(case, f=128)
    if case.offset:  # one value a head
        case = replace(case, n=32, g=32 * case.g // case.n)
    return replace(case, d=32) if case.d == 8 else case


ALL_CASES = gpu_cases() | LARGE_CASES
# Those of one strategy and p run on ranks started once, in one of pytest's workers
# (-n 8 --dist loadgroup).
STRATEGY_CASES = [
    pytest.param(name, id=name, marks=pytest.mark.xdist_group(f"{case.strategy}-{case.p}"))
    for name, case in ALL_CASES.items()
]


def _run(group, case):
    torch.cuda.set_device(0)
    torch.set_float32_matmul_precision("highest")  # no TF32
    with staged():
        return run_case(group, case, "cuda")


def draws_of(case: AttentionCase | MlpCase) -> list[AttentionCase | MlpCase]:
    """The case, and where one says too little the same with other inputs."""
    if isinstance(case, MlpCase) or case.qk_norm is None or case.dtype == torch.float32:
        return [case]
    return [replace(case, draw=draw) for draw in range(DRAWS)]


@functools.cache
def _results(strategy: str, p: int):
    cases = {
        f"{name}-{i}": draw
        for name, case in ALL_CASES.items()
        for i, draw in enumerate(draws_of(case))
        if (case.strategy, case.p) == (strategy, p)
    }
    return run_every_case(p, _run, cases, timeout_seconds=600)


def check(deviations: Mapping[AttentionCase | MlpCase, Mapping[str, Deviation]], device: str):
    """Of all draws of a case: float32 by a tolerance; a half type by twice what one process errs.

    That by norm, root mean squares over the draws. In that process too gradients follow from the
    rounded output, as kernels have it.
    """
    case, errors = next(iter(deviations.items()))
    if case.dtype == torch.float32:
        large = isinstance(case, AttentionCase) and case.query_scale > 1.0
        tolerance = LARGE_SCORE_TOLERANCE if large else FLOAT32_TOLERANCE
        limits = dict.fromkeys(errors, tolerance)
        found = {tensor: part.relative for tensor, part in errors.items()}
    else:
        own = [errors_of_one_process(draw, device, from_output=True) for draw in deviations]
        limits = {tensor: 2 * _mean(one[tensor] for one in own) for tensor in errors}
        ours = deviations.values()
        found = {tensor: _mean(one[tensor].by_norm for one in ours) for tensor in errors}
    worse = {t: (found[t], limits[t]) for t in errors if not found[t] <= limits[t]}
    assert not worse, worse


def _mean(errors: Iterable[float]) -> float:
    """The root of the mean of their squares."""
    return math.sqrt(statistics.fmean(error**2 for error in errors))


@pytest.mark.parametrize("name", STRATEGY_CASES)
def test_strategies_on_cuda_match_the_float64_reference(name):
    case = ALL_CASES[name]
    results = _results(case.strategy, case.p)
    deviations = {}
    for i, draw in enumerate(draws_of(case)):
        by_rank = results[f"{name}-{i}"]
        if isinstance(by_rank, str):
            pytest.fail(by_rank, pytrace=False)
        deviations[draw] = combine(by_rank)
    check(deviations, "cuda")


KERNEL_CASES = [
    pytest.param(
        kernel,
        dtype,
        n,
        g,
        d,
        mask,
        id=f"{kernel.name if kernel else 'chosen'}-{dtype}-{n}-{g}-{d}-{mask}",
    )
    for kernel, dtypes, head_dims in (
        (CUDA_FLASH, HALF_TYPES, (40, 64, 128, 192)),  # 192: of DeepSeek's latent attention
        (FLASH_ATTN, HALF_TYPES, (64, 128, 192)),
        (CUDA_EFFICIENT, (torch.float32, *HALF_TYPES), (40, 64, 128, 192)),
        (FUSED_TILES, (torch.float32, *HALF_TYPES), (6, 64, 192)),
        (TILED, (torch.float64, torch.float32, *HALF_TYPES), (6, 64)),
        (None, (torch.float64, torch.float32, *HALF_TYPES), (6, 40, 64)),  # the one it chooses
    )
    for dtype in dtypes
    for d in head_dims
    for n, g in HEADS
    for mask, window in MASKS.items()
    if kernel is None or kernel.has_window or window is None
]


@pytest.mark.parametrize(("kernel", "dtype", "n", "g", "d", "mask"), KERNEL_CASES)
def test_cuda_kernels_match_float64_from_external_out_and_lse(kernel, dtype, n, g, d, mask):
    """Forward and backward over two pieces of keys, each backward from all keys' out and lse."""
    torch.set_float32_matmul_precision("highest")
    chosen = choose_kernel(torch.empty(1, 1, 1, d, dtype=dtype, device="cuda"))
    if kernel is FLASH_ATTN and chosen.forward is not FLASH_ATTN.forward:
        pytest.skip("needs the FlashAttention package")
    if kernel is CUDA_FLASH and chosen.forward not in (CUDA_FLASH.forward, FLASH_ATTN.forward):
        pytest.skip("needs compute capability 8.0")
    options = {"mask": mask, "n": n, "g": g, "d": d}
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}.get(dtype, 1e-12)
    truth = attend_in_pieces(TILED, dtype=torch.float64, **options)
    found = attend_in_pieces(kernel, dtype=dtype, device="cuda", **options)
    largest = max(true.norm() for true in truth)
    for got, true in zip(found, truth, strict=True):
        # A query that sees one key does not move its probability: the truth is 0, but for float64's
        # own roundings, and errors are told against the other tensors.
        size = true.norm() if true.norm() > 1e-9 * largest else largest
        error = (got.cpu().double() - true).norm() / size
        assert error <= tolerance, ((kernel or chosen).name, error)
