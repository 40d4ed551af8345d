"""How strategies reach Megatron's and TransformerEngine's parameters."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.nn import functional as F

from megatron_paradyse.attention import SwitchableSelfAttention
from megatron_paradyse.core_attention import CoreAttention
from megatron_paradyse.microbatch_params import planned_microbatch
from megatron_paradyse.packing.row import Row, contiguous
from megatron_paradyse.parameters import announce_use, bias_of, normalised, of_strategy
from megatron_paradyse.plan import Plan
from megatron_paradyse.prediction import PredictionLayer
from megatron_paradyse.strategies.second_run import second_run, without_values
from megatron_paradyse.submodules import (
    SwitchableLayer,
    SwitchableMLP,
)
from tests.fused_linear import FusedLinear, parameter_under_ddp

FUSED = SimpleNamespace(gradient_accumulation_fusion=True)


class _EngineLinear(torch.nn.Module):
    """As Megatron wraps TransformerEngine's: without FP8 nothing sets the mark again."""

    def __init__(self, weight):
        super().__init__()
        self.weight, self.is_first_microbatch = weight, True

    def forward(self, x):
        overwrites, self.is_first_microbatch = self.is_first_microbatch, False
        return FusedLinear.apply(x, self.weight, overwrites)


def _in_a_layer(linear, monkeypatch):
    """As it is after a SwitchableLayer that holds it has been made."""

    def make(self):
        torch.nn.Module.__init__(self)
        self.inside, self.recompute_mlp = torch.nn.ModuleList([linear]), False

    monkeypatch.setattr(TransformerLayer, "__init__", make)
    return SwitchableLayer().inside[0]


def test_the_projection_of_a_prediction_adds_from_the_start_too(monkeypatch):
    """Which of short microbatches is Megatron's, of long ones ours: its first may come late."""

    def make(self):
        torch.nn.Module.__init__(self)
        self.config, self.layer_number = SimpleNamespace(num_layers=4), 2
        self.eh_proj = _EngineLinear(torch.zeros(2, 2))
        self.mtp_model_layer = torch.nn.Module()
        self.mtp_model_layer.self_attention = torch.nn.Module()
        self.mtp_model_layer.self_attention.core_attention = torch.nn.Module()

    monkeypatch.setattr(MultiTokenPredictionLayer, "__init__", make)
    layer = PredictionLayer()
    assert not layer.eh_proj.is_first_microbatch
    assert layer.mtp_model_layer.self_attention.plan_number == 6


@pytest.mark.parametrize("order", ["fs", "sf", "ffssf", "sfsfs"])
def test_gradients_of_fused_linears_and_of_strategies_add_up(order, monkeypatch):
    """f: a fused linear of a layer, s: a strategy; microbatch after microbatch."""
    torch.manual_seed(0)
    weight, expected = parameter_under_ddp(), torch.zeros(3, 4, dtype=torch.float64)
    linear = _in_a_layer(_EngineLinear(weight), monkeypatch)
    for step in order:
        x, grad = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
        expected += grad.t() @ x
        x.requires_grad_()  # as an activation does: a fused linear alone needs no weight gradient
        if step == "f":
            y = linear(x)
        else:
            y = x @ of_strategy(weight, FUSED).t()
        y.backward(grad)
        assert weight.grad is None  # the hook took it
    torch.testing.assert_close(weight.main_grad, expected)


def test_without_the_strategys_mark_its_gradient_would_be_lost():
    weight = parameter_under_ddp()
    weight.grad_added_to_main_grad = True  # left by a fused linear in an earlier microbatch
    (torch.ones(1, 4, dtype=torch.float64) @ weight.t()).sum().backward()
    assert weight.main_grad.abs().max() == 0
    (torch.ones(1, 4, dtype=torch.float64) @ of_strategy(weight, FUSED).t()).sum().backward()
    assert (weight.main_grad == 1).all()


def test_without_fusion_the_parameter_itself_is_used():
    weight = torch.nn.Parameter(torch.zeros(2))
    assert of_strategy(weight, SimpleNamespace(gradient_accumulation_fusion=False)) is weight


@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_norm_inside_a_linear_is_applied_with_gradients(normalization, zero_centred):
    torch.manual_seed(0)
    x = torch.randn(6, 2, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(8, dtype=torch.float64))
    bias = torch.nn.Parameter(torch.randn(8, dtype=torch.float64))
    config = SimpleNamespace(
        normalization=normalization,
        layernorm_zero_centered_gamma=zero_centred,
        layernorm_epsilon=1e-3,
    )
    linear = SimpleNamespace(layer_norm_weight=weight, layer_norm_bias=bias)
    if normalization == "RMSNorm":
        linear.layer_norm_bias = None
    got = normalised(x, linear, config)
    scale = weight + 1 if zero_centred else weight
    if normalization == "LayerNorm":
        centred = x - x.mean(-1, keepdim=True)
        truth = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt() * scale + bias
    else:
        truth = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * scale
    inputs = [x, weight, *([bias] if normalization == "LayerNorm" else [])]
    grad = torch.randn_like(x)
    torch.testing.assert_close(got, truth)
    for mine, true in zip(
        torch.autograd.grad(got, inputs, grad),
        torch.autograd.grad(truth, inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(mine, true)


def test_a_linear_without_a_norm_inside_leaves_its_input_alone():
    x = torch.ones(2)
    assert normalised(x, SimpleNamespace(), None) is x


def test_hooks_that_wait_for_parameters_run_where_a_strategy_reads_them():
    """Megatron's of --overlap-param-gather; those that want keyword arguments are others'."""
    seen, module = [], torch.nn.Linear(2, 2)
    module.register_forward_pre_hook(lambda *given: seen.append(given))
    module.register_forward_pre_hook(lambda *given: seen.append("others"), with_kwargs=True)
    announce_use(None, torch.nn.Linear(2, 2), module)
    assert seen == [(module, ())]


def test_an_empty_bias_is_none():
    """As TransformerEngine's linears have it."""
    assert bias_of(SimpleNamespace(bias=torch.empty(0))) is None
    assert bias_of(SimpleNamespace(bias=None)) is None
    bias = torch.nn.Parameter(torch.zeros(3))
    assert bias_of(SimpleNamespace(bias=bias)) is bias
    with pytest.raises(RuntimeError):  # what a strategy would do with it
        F.linear(torch.ones(1, 4), torch.ones(3, 4), torch.empty(0))


@pytest.mark.parametrize(
    ("row", "core", "softmax", "megatrons"),
    [
        (None, None, "vanilla", True),
        (None, None, "learnable", True),
        (contiguous((3, 5), 2), None, "vanilla", True),
        (contiguous((3, 5), 2), None, "learnable", False),
        (Row((3, 5), (((4, 8),), ((0, 4),))), None, "vanilla", False),
        (Row((3, 5), (((4, 8),), ((0, 4),))), "ours", "learnable", True),
    ],
)
def test_megatrons_own_kernels_run_rows_in_order_only(row, core, softmax, megatrons):
    """Others run megatron_ts of this package: they bring the row into order first."""
    core = object.__new__(CoreAttention) if core else None
    config = SimpleNamespace(softmax_type=softmax)
    attention = SimpleNamespace(core_attention=core, config=config)
    planned = planned_microbatch(None, row, None, plan=Plan({}), seed=0)
    assert SwitchableSelfAttention._megatron_can(attention, planned) is megatrons


@pytest.mark.parametrize(
    ("declared", "mask", "given"),
    [
        (AttnMaskType.padding, None, AttnMaskType.no_mask),
        (AttnMaskType.padding, torch.zeros(1, 1, 1, 8, dtype=torch.bool), AttnMaskType.padding),
        (AttnMaskType.causal, None, AttnMaskType.causal),
    ],
)
def test_a_bert_without_padding_asks_for_no_mask(declared, mask, given, monkeypatch):
    """TransformerEngine's attention refuses "padding" without a mask."""
    attention = object.__new__(SwitchableSelfAttention)
    torch.nn.Module.__init__(attention)
    attention.attn_mask_type, attention.core_attention = declared, None
    seen = []
    monkeypatch.setattr(
        SelfAttention, "forward", lambda self, *_, **__: seen.append(self.attn_mask_type)
    )
    attention.forward(torch.zeros(8, 1, 4), mask)
    assert seen == [given] and attention.attn_mask_type == declared


def test_a_call_without_a_plan_runs_megatrons_own_mlp(monkeypatch):
    """What the plan of an earlier microbatch chose is forgotten: generation has another layout."""
    layer, mlp = object.__new__(SwitchableLayer), object.__new__(SwitchableMLP)
    torch.nn.Module.__init__(layer)
    torch.nn.Module.__init__(mlp)
    layer.mlp, mlp.strategy, mlp.in_tiles = mlp, "metp", True
    seen = []
    monkeypatch.setattr(
        TransformerLayer, "forward", lambda self, **_: seen.append((mlp.strategy, mlp.in_tiles))
    )
    layer.forward(hidden_states=torch.zeros(2, 1, 4))
    assert seen == [("megatron_ts", False)]


PLAIN = {"activation_func_clamp_value": None, "glu_linear_offset": 0.0, "gtp_weight_remat_size": 1}


@pytest.mark.parametrize("setting", PLAIN)
def test_an_mlp_that_no_strategy_computes_is_never_tiled(setting, monkeypatch):
    """A long evaluation and what runs again stay Megatron's own, whole."""
    mlp = object.__new__(SwitchableMLP)
    torch.nn.Module.__init__(mlp)
    mlp.config, mlp.in_tiles = SimpleNamespace(**{**PLAIN, setting: 7}), True
    monkeypatch.setattr(MLP, "forward", lambda self, x, *_: "Megatron's own")
    assert mlp.forward(torch.zeros(1, 1, 1).expand(1 << 20, 1, 1)) == "Megatron's own"


class _Unread(torch.autograd.Function):
    """The MLP of a second run: a graph and no values."""

    @staticmethod
    def forward(ctx, x):
        return without_values(x, x.shape)

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


@pytest.mark.parametrize("bias", [None, torch.ones(3)])
@pytest.mark.parametrize(
    ("dropout", "training", "again", "is_dense"),
    [
        (0.5, True, True, True),
        (0.0, True, True, False),
        (0.5, False, True, False),
        (0.5, True, False, False),
    ],
)
def test_dropout_of_a_second_run_gets_a_dense_tensor_in_memory_that_is_there(
    dropout, training, again, is_dense, bias, monkeypatch
):
    """A GPU's random numbers go to elements by layout; without dropout there is nothing to read."""
    layer = object.__new__(SwitchableLayer)
    torch.nn.Module.__init__(layer)
    layer.train(training)
    layer.hidden_dropout = dropout
    given = []

    def bias_dropout_add(self, output_with_bias, residual):
        given.append(output_with_bias)
        return residual + output_with_bias[0]

    monkeypatch.setattr(TransformerLayer, "_forward_post_mlp", bias_dropout_add)
    x, residual = (torch.randn(4, 1, 3, requires_grad=True) for _ in range(2))
    with second_run() if again else contextlib.nullcontext():
        layer._forward_post_mlp((_Unread.apply(x), bias), residual).sum().backward()
    output, same_bias = given[0]
    assert same_bias is bias and output.shape == x.shape
    assert output.is_contiguous() is is_dense
    assert (output.data_ptr() == residual.data_ptr()) is is_dense
    assert (x.grad == 2).all() and (residual.grad == 1).all()
