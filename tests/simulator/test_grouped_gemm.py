"""Experts computed together, in simulations with --moe-grouped-gemm."""

from __future__ import annotations

import argparse
import types

import pytest
import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import nn
from torch.nn.functional import gelu
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_paradyse.costs.table import MLP
from megatron_paradyse.errors import UserError
from megatron_paradyse.live_bytes import LiveBytes
from megatron_paradyse.simulator.grouped_gemm import check_grouped_gemm, grouped_gemm
from tests.simulator.small_models import simulated

HIDDEN, WIDE, TOKENS = 10, 8, 5


class Linear(nn.Module):
    def __init__(self, wide: int, narrow: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(wide, narrow, dtype=torch.float64))

    def forward(self, x):
        return x @ self.weight.t(), None


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear_fc1, self.linear_fc2 = Linear(WIDE, HIDDEN), Linear(HIDDEN, WIDE)

    def forward(self, hidden, probs):
        inner, _ = self.linear_fc1(hidden)
        inner = gelu(inner) * probs.unsqueeze(-1)  # lets go of what went in, as Megatron's MLP does
        return self.linear_fc2(inner)


class Products(TorchDispatchMode):
    """Counts those that run inside."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm):
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def alike() -> types.SimpleNamespace:
    """Three experts of the same weights, for in a simulation one stands for all."""
    torch.manual_seed(3)
    experts = nn.ModuleList([Expert() for _ in range(3)])
    for expert in experts[1:]:
        expert.load_state_dict(experts[0].state_dict())
    config = types.SimpleNamespace(
        moe_apply_probs_on_input=False, fp8=None, fp4=None, recompute_granularity=None
    )
    return types.SimpleNamespace(num_local_experts=3, local_experts=experts, config=config)


def ran(alike: types.SimpleNamespace) -> tuple[list[torch.Tensor], list[str]]:
    """Output and gradients of three times five tokens, and the products that ran."""
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(3 * TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    probs = torch.rand(3 * TOKENS, generator=generator, dtype=torch.float64)
    hidden.requires_grad_()
    with Products() as products:
        counts = torch.tensor([TOKENS] * 3)
        output, _ = SequentialMLP.forward(alike, hidden, counts, probs)
        wanted = [hidden, *alike.local_experts.parameters()]
        grads = torch.autograd.grad((output**2).sum(), wanted)
    return [output, *grads], products.names


def test_experts_of_one_weight_compute_together_what_they_compute_alone(alike):
    expected, alone = ran(alike)
    assert alone == 18 * ["mm"]  # of 3 experts: 2 forward, 4 backward
    with grouped_gemm():
        result, together = ran(alike)
    assert together == 6 * ["bmm"]
    assert alike.num_local_experts == 3
    for got, wanted in zip(result, expected, strict=True):
        torch.testing.assert_close(got, wanted)
    again, names = ran(alike)
    assert names == alone
    torch.testing.assert_close(again, expected)


def test_activations_that_run_again_leave_results_alone(alike):
    expected, _ = ran(alike)
    alike.config.recompute_granularity = "selective"
    alike.config.recompute_modules = ["core_attn", "moe_act"]
    with grouped_gemm():
        result, products = ran(alike)
    assert products == 6 * ["bmm"]
    for got, wanted in zip(result, expected, strict=True):
        torch.testing.assert_close(got, wanted)
    assert ran(alike)[1] == 18 * ["mm"], "the experts' own forwards are back"


@pytest.mark.parametrize("granularity", [None, "selective"])
def test_what_goes_into_the_activation_is_there_beside_the_output(granularity, alike):
    """As in Megatron's TEGroupedMLP, where nothing is kept for a backward."""
    alike.config.recompute_granularity = granularity
    alike.config.recompute_modules = ["moe_act"]
    hidden = torch.zeros(3 * TOKENS, HIDDEN, dtype=torch.float64)
    probs = torch.ones(3 * TOKENS, dtype=torch.float64)
    counts = torch.tensor([TOKENS] * 3)
    counted = LiveBytes([hidden, probs, *alike.local_experts.parameters()])
    with grouped_gemm(), torch.no_grad(), counted:
        SequentialMLP.forward(alike, hidden, counts, probs)
    assert counted.peak_bytes == 8 * 3 * TOKENS * (2 * WIDE + HIDDEN)


def test_tokens_that_do_not_divide_are_held(alike):
    hidden = torch.zeros(3 * TOKENS + 2, HIDDEN, dtype=torch.float64, requires_grad=True)
    with grouped_gemm():
        counts = torch.tensor([TOKENS + 1, TOKENS + 1, TOKENS])
        output, _ = SequentialMLP.forward(alike, hidden, counts, hidden.sum(dim=1))
    assert output.shape == hidden.shape
    output.sum().backward()


def test_biases_of_experts_are_refused():
    given = {"moe_grouped_gemm": True, "add_bias_linear": True}
    with pytest.raises(UserError, match="--moe-grouped-gemm is not simulated with biases"):
        check_grouped_gemm(argparse.Namespace(**given))
    check_grouped_gemm(argparse.Namespace(**given | {"add_bias_linear": False}))
    check_grouped_gemm(argparse.Namespace(**given | {"moe_grouped_gemm": False}))


def test_grouped_experts_keep_as_much_and_take_less_time_or_run_activations_again(tmp_path):
    flags = ["--num-layers", 1, "--hidden-size", 64, "--num-attention-heads", 8]
    flags += ["--vocab-size", 96, "--num-experts", 8, "--moe-router-topk", 2, "--swiglu"]
    flags += ["--disable-bias-linear", "--moe-token-dispatcher-type", "alltoall"]
    flags += ["--moe-ffn-hidden-size", 128]
    options = {"p": 2, "strategies": ("megatron_ts",), "dtype": "bfloat16", "fused": True}
    alone = simulated(tmp_path / "alone", flags, **options)
    flags.append("--moe-grouped-gemm")
    together = simulated(tmp_path / "together", flags, **options)
    assert together.constants == alone.constants
    by_operation = [{m.operation: m for m in t.measurements} for t in (alone, together)]
    mlp, grouped = (measured.pop(MLP) for measured in by_operation)
    assert by_operation[0] == by_operation[1]
    assert grouped.kept_bytes == mlp.kept_bytes
    assert grouped.forward_seconds < 0.8 * mlp.forward_seconds
    assert grouped.backward_seconds < 0.8 * mlp.backward_seconds

    flags += ["--recompute-granularity", "selective", "--recompute-modules", "moe_act"]
    again = simulated(tmp_path / "again", flags, **options)
    activated = {m.operation: m for m in again.measurements}.pop(MLP)
    result_bytes = 2 * 128 * 128 // 2 * 2  # two experts a token, of 128 tokens; bfloat16, p = 2
    assert grouped.kept_bytes - activated.kept_bytes == result_bytes
    assert activated.backward_bytes - grouped.backward_bytes == result_bytes
    assert activated.forward_bytes == grouped.forward_bytes
    assert activated.forward_seconds == grouped.forward_seconds
    assert activated.backward_seconds > grouped.backward_seconds
