"""The tiled attention in Triton: by its interpreter on the CPU, compiled for GPUs, on a device."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_paradyse.strategies.dropout import keep_mask_of_ranges
from megatron_paradyse.strategies.kernels import FUSED_TILES, TILED
from megatron_paradyse.strategies.tiled_kernel import BlockRule
from tests.strategies.interpreted import interpreted
from tests.strategies.pieces import attend_in_pieces

DROPOUT = {"dropout": 0.25, "dropout_seed": (9 << 32) + 5, "first_sequence": 3, "first_head": 6}
# b, n, g, queries, keys, d, rule; sizes and places that no tile divides
CASES = {
    "causal": (2, 2, 2, 70, 70, 24, {"causal": True, **DROPOUT}),
    "a block of others' keys": (1, 4, 2, 40, 75, 16, {"q_start": 90, "k_start": 10, **DROPOUT}),
    "a window": (1, 2, 1, 100, 100, 40, {"causal": True, "window": 33, **DROPOUT}),
    "the end of a window": (1, 2, 1, 70, 90, 16, {"q_start": 80, "window": 70}),
    "of no window's tiles": (1, 1, 1, 33, 65, 8, {"q_start": 65, "window": 40, **DROPOUT}),
    "wide heads": (1, 1, 1, 65, 65, 144, {"causal": True, "dropout": 0.5, "dropout_seed": 1}),
}
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
WHAT = ("out", "q", "k", "v", "lse")


def dense(q: Tensor, k: Tensor, v: Tensor, rule: BlockRule) -> tuple[Tensor, Tensor]:
    """Out and log-sum-exp with the whole matrix of scores; differentiable."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    spans = [range(rule.q_start, rule.q_start + q.shape[2])]
    spans.append(range(rule.k_start, rule.k_start + k.shape[2]))
    apart = torch.tensor(spans[0])[:, None] - torch.tensor(spans[1])
    hidden = apart < 0 if rule.causal else torch.zeros_like(apart, dtype=torch.bool)
    if rule.window is not None:
        hidden |= apart >= rule.window
    scores = (q @ k.transpose(-1, -2) * rule.scale).masked_fill(hidden.to(q.device), -torch.inf)
    lse = scores.logsumexp(-1)
    probs = torch.where(lse[..., None] > -torch.inf, (scores - lse[..., None]).exp(), 0.0)
    if rule.dropout:
        keep = keep_mask_of_ranges(
            rule.dropout_seed,
            sequences=range(rule.first_sequence, rule.first_sequence + q.shape[0]),
            heads=range(rule.first_head, rule.first_head + q.shape[1]),
            queries=spans[0],
            keys=spans[1],
            dropout=rule.dropout,
            device=q.device,
        )
        probs = probs * keep / (1.0 - rule.dropout)
    return probs @ v, lse


HALF_CASES = ("causal", "a window")  # on the CPU, where a case takes a second


def made_both_ways(device: str, dtypes=(torch.float32, torch.float16)) -> None:
    """Outputs, log-sum-exp and gradients, of views with strides, against float64."""
    from megatron_paradyse.strategies.fused_tiles import fused_backward, fused_forward

    for name, (b, n, g, sq, sk, d, given) in CASES.items():
        for dtype in dtypes if device == "cuda" or name in HALF_CASES else dtypes[:1]:
            random = torch.Generator().manual_seed(0)

            def draw(s, heads, random=random, dtype=dtype, b=b, d=d):
                whole = torch.randn(s + 3, b, heads, d + 1, generator=random).to(device, dtype)
                return whole[3:, ..., :d].permute(1, 2, 0, 3)  # [b, heads, s, d]

            q, k, v, grad_out = draw(sq, n), draw(sk, g), draw(sk, g), draw(sq, n)
            rule = BlockRule(scale=1 / math.sqrt(d), **given)
            inputs = [x.double().requires_grad_() for x in (q, k, v)]
            true_out, true_lse = dense(*inputs, rule)
            true_grads = torch.autograd.grad(true_out, inputs, grad_out.double())
            out, lse = fused_forward(q, k, v, rule)
            grads = fused_backward(grad_out, q, k, v, out, lse, rule)
            seen = true_lse > -torch.inf
            assert torch.equal(lse > -torch.inf, seen), name
            pairs = [(out, true_out), *zip(grads, true_grads, strict=True)]
            pairs.append((lse[seen], true_lse[seen]))
            for what, (found, truth) in zip(WHAT, pairs, strict=True):
                error = float((found.double() - truth.detach()).norm() / truth.norm())
                assert error < TOLERANCES[dtype], (name, dtype, what, error)
            assert {x.dtype for x in (out, *grads)} == {dtype} and lse.dtype == torch.float32
    for mask in ("window 70",):  # from an lse of other pieces too
        options = {"mask": mask, "n": 4, "g": 2, "d": 24}
        truth = attend_in_pieces(TILED, dtype=torch.float64, **options)
        parts = attend_in_pieces(FUSED_TILES, dtype=torch.float32, device=device, **options)
        for found, true in zip(parts, truth, strict=True):
            assert float((found.cpu().double() - true).norm() / true.norm()) < 2e-6, mask
    print("made")


def test_the_interpreter_makes_what_float64_does():
    pytest.importorskip("triton")
    assert interpreted("test_fused_tiles", "made_both_ways('cpu')") == "made\n"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_makes_what_float64_does():
    made_both_ways("cuda", (torch.float32, torch.bfloat16, torch.float16))


def _compiled(name: str, capability: int, dtype: torch.dtype, d: int, **given):
    """To machine code of a GPU that need not be there."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron_paradyse.strategies import fused_tiles, fused_tiles_kernels

    kernel = getattr(fused_tiles_kernels, name)
    q, k = torch.empty(1, 2, 9, d, dtype=dtype), torch.empty(1, 1, 9, d, dtype=dtype)
    tile = fused_tiles.tile_of(q)
    options = {option: tile.pop(option) for option in ("num_warps", "num_stages")}
    fixed = fused_tiles.choices(q, k, BlockRule(scale=1.0, **given)) | tile
    types = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(fixed, "constexpr")
    types |= {"scale": "fp32", "keep_scale": "fp32", "lse": "*fp32", "sums": "*fp32"}
    types |= dict.fromkeys(
        ("q", "k", "v", "out", "grad_out", "grad_q", "grad_k", "grad_v"),
        "*fp32" if dtype == torch.float32 else "*bf16",
    )
    source = ASTSource(
        kernel,
        {argument: types[argument] for argument in kernel.arg_names},
        {(kernel.arg_names.index(argument),): value for argument, value in fixed.items()},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize("name", ["forward", "of_queries", "of_keys"])
@pytest.mark.parametrize(
    "given", [{"causal": True, "window": 5, **DROPOUT}, DROPOUT], ids=["all masks", "dropout alone"]
)
def test_a_kernel_compiles_for_a_gpu_that_is_not_there(name, given):
    """To machine code of a Hopper."""
    made = _compiled(name, 90, torch.bfloat16, 40, **given)
    assert len(made.asm["cubin"]) > 1000 and made.metadata.shared <= 99 << 10


@pytest.mark.parametrize("name", ["forward", "of_queries", "of_keys"])
@pytest.mark.parametrize(("dtype", "d"), [(torch.float32, 256), (torch.bfloat16, 128)])
def test_the_shared_memory_of_smaller_gpus_holds_the_tiles_of_wide_heads(name, dtype, d):
    """Compute capability 8.6, 8.9 and 12 have 99 KiB for a program."""
    assert _compiled(name, 86, dtype, d, causal=True, **DROPOUT).metadata.shared <= 99 << 10
