"""Factors and sums that a half type would round: errors whose mean is not zero.

An error by norm hides them: a factor of 1.0016 on everything adds nothing to see to roundings of
bfloat16. What is compared is the slope of what came on what is true.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch.overrides import TorchFunctionMode

from megatron_paradyse.edges.cross_entropy import ROUNDINGS, _common_factor
from megatron_paradyse.edges.embedding import tiled_positions
from megatron_paradyse.parameters import normalised
from megatron_paradyse.strategies import strategy_names
from megatron_paradyse.strategies.contract import AttentionShape
from megatron_paradyse.strategies.heads import head_norm
from megatron_paradyse.strategies.reference import _with_rounded_row_sums
from tests.strategies.cases import AttentionCase
from tests.strategies.harness import run_ranks
from tests.strategies.layers import rank_layer, run_and_differentiate, run_reference

MOST = 7e-4  # of 24,576 values with errors of 2e-3 each, and of the shorter sums inside


def _slopes(group, case: AttentionCase) -> dict[str, float]:
    layer = rank_layer(group, case)
    output, grad_x, grads = run_and_differentiate(layer.run, layer.x, layer.weights, layer.grad)
    true_output, true_x, true_grads = run_reference(case, torch.float64)
    pairs = {"output": (output, true_output), "x": (grad_x, true_x)}
    pairs |= {name: (grads[name], getattr(true_grads, name)) for name in ("qkv", "proj")}
    return {name: _slope(*pair) for name, pair in pairs.items()}


def _slope(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found.double() * true).sum() / true.square().sum()) - 1


@functools.cache
def _slopes_of_all() -> dict[str, list]:
    cases = {
        name: AttentionCase(
            name, 1, n=4, g=2, d=16, h=96, s=256, b=1, dropout=0.1, dtype=torch.bfloat16
        )
        for name in strategy_names()
    }
    return run_ranks(1, _slopes, cases)


@pytest.mark.parametrize("strategy", strategy_names())
def test_dropout_scales_by_what_it_should(strategy):
    """1 / (1 - 0.1) in bfloat16 is 1.6e-3 too small."""
    (slopes,) = _slopes_of_all()[strategy]
    assert all(abs(slope) < MOST for slope in slopes.values()), slopes


def test_the_reference_can_take_row_sums_from_its_rounded_output():
    """As kernels do: the errors that they are told against on a GPU."""
    random = torch.Generator().manual_seed(0)
    scores = torch.randn(1, 2, 5, 7, generator=random).requires_grad_()
    v, grad = (torch.randn(s, 1, 2, 3, generator=random).bfloat16() for s in (7, 5))
    probs, lse = scores.softmax(-1), scores.logsumexp(-1)
    out = torch.einsum("bnqk,kbnd->qbnd", probs, v.float()).bfloat16()
    same = _with_rounded_row_sums(out, probs, lse, v)
    assert torch.equal(same, out)
    same.backward(grad)
    row_sums = (grad.float() * out.float()).sum(-1).permute(1, 2, 0)[..., None]
    grad_probs = torch.einsum("qbnd,kbnd->bnqk", grad.float(), v.float())
    torch.testing.assert_close(scores.grad, probs.detach() * (grad_probs - row_sums).detach())


def _positions(group, num_documents: int) -> tuple[float, float]:
    """Slopes of the gradient of learned positions, with and without restart."""
    random = torch.Generator().manual_seed(3)
    positions = torch.arange(8).repeat(num_documents)[None]
    grad = (1 + torch.randn(num_documents * 8, 1, 16, generator=random)).bfloat16()
    true = grad.double().view(num_documents, 8, 16).sum(0)
    slopes = []
    for restart in (True, False):
        weight = torch.randn(8, 16, generator=random).bfloat16().requires_grad_()
        out = tiled_positions(positions, weight, group, tile=8, restart=restart)
        slopes.append(_slope(torch.autograd.grad(out, weight, grad)[0], true))
    return slopes[0], slopes[1]


def test_positions_of_many_documents_are_summed_wide():
    """In bfloat16 a sum of a thousand stops growing."""
    ((with_restart, without),) = run_ranks(1, _positions, {"many": 1024})["many"]
    assert abs(with_restart) < MOST and abs(without) > 0.05


def test_the_factor_of_the_losses_is_a_number():
    """A GPU would round a tensor of one value to the dtype of what it multiplies."""
    weights = torch.tensor([[1.0, 0.0, 1.0]])
    factor = _common_factor(weights / 43607, weights)
    assert isinstance(factor, float) and factor == pytest.approx(1 / 43607, rel=1e-6)
    assert _common_factor(torch.tensor([[1.0, 0.5, 1.0]]), weights) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_off_by_more_than_roundings_has_no_common_factor(dtype):
    weights = torch.tensor([[1.0, 0.5, 0.25]], dtype=dtype)
    for roundings, is_common in ((ROUNDINGS / 2, True), (2 * ROUNDINGS, False)):
        off = torch.tensor([[1.0, 1.0, 1.0 + roundings * torch.finfo(dtype).eps]], dtype=dtype)
        assert (_common_factor(3 * weights * off, weights) is not None) == is_common
    assert _common_factor(0 * weights, 0 * weights) == 0.0
    assert _common_factor(weights, 0 * weights) is None


class _Waits(TorchFunctionMode):
    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        waiting = (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__bool__)
        self.count += func in waiting
        return func(*args, **(kwargs or {}))


def test_the_factor_of_the_losses_waits_for_a_gpu_once():
    weights = torch.tensor([[1.0, 0.0, 1.0]])
    with _Waits() as waits:
        _common_factor(weights / 3, weights)
    assert waits.count == 1


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gains_are_not_rounded_as_one_plus_a_small_weight(kind, dtype):
    shape = AttentionShape(
        4, 4, 64, causal=True, softmax_scale=1.0, qk_norm=kind, qk_norm_plus_one=True
    )
    x = torch.randn(4096, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight = torch.full((64,), 0.003, dtype=dtype)
    bias = None if kind == "rmsnorm" else torch.zeros(64, dtype=dtype)
    centred = x.double() - (0 if kind == "rmsnorm" else x.double().mean(-1, keepdim=True))
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + shape.qk_norm_eps)
    true = centred * scale * (1 + weight.double())
    assert abs(_slope(head_norm(x, weight, bias, shape), true)) < 1e-4

    class Linear:
        layer_norm_weight, layer_norm_bias = weight, bias

    class Config:
        layernorm_zero_centered_gamma, layernorm_epsilon = True, shape.qk_norm_eps
        normalization = "RMSNorm" if kind == "rmsnorm" else "LayerNorm"

    assert abs(_slope(normalised(x, Linear, Config), true)) < 1e-4


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("head_dim", [4, 8, 64])
def test_norms_with_gains_around_one_are_as_exact_as_plain_ones(kind, head_dim):
    """Output and gradients against float64: at most twice the error of the norm without the one."""
    random = torch.Generator().manual_seed(2)
    x, grad = (torch.randn(400, 4, head_dim, generator=random).bfloat16() for _ in "xg")
    weight = (0.1 * torch.randn(head_dim, generator=random)).bfloat16()
    errors = []
    for plus_one, gain in ((True, weight), (False, 1 + weight)):
        shape = AttentionShape(4, 4, head_dim, True, 1.0, qk_norm=kind, qk_norm_plus_one=plus_one)
        found = []
        for dtype in (torch.bfloat16, torch.float64):
            leaves = [t.to(dtype).requires_grad_() for t in ((x + 1.5), gain)]
            out = head_norm(*leaves, None, shape)
            found.append([out, *torch.autograd.grad(out, leaves, grad.to(dtype))])
        errors.append([float((a - b).norm() / b.norm()) for a, b in zip(*found, strict=True)])
    assert all(ours <= 2 * plain for ours, plain in zip(*errors, strict=True)), errors
