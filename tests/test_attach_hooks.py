"""On which blocks the hook is, and what each asks a policy for."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
from megatron.core.transformer.transformer_block import TransformerBlock

from megatron_paradyse import hook as hooks
from megatron_paradyse.hook import Counts
from megatron_paradyse.plan import uniform_plan

P, HIDDEN = 2, torch.zeros(4, 1, 8)  # [s/p, b, h]


class _Policy:
    def __init__(self):
        self.asked = []

    def plan(self, batch_size, seq_length, layer_numbers, **how):
        self.asked.append((batch_size, seq_length, layer_numbers))
        return uniform_plan(layer_numbers, "metp")


class _Attached(TransformerBlock):
    """A block of so many layers, of none of Megatron's making."""

    def __init__(self, *numbers: int, shards: int | None = P):
        torch.nn.Module.__init__(self)
        self.config = SimpleNamespace(
            sequence_parallel=shards is not None, attention_dropout=0.0,
            recompute_granularity="full", recompute_method="block", recompute_num_layers=1,
        )  # fmt: skip
        self.tp_group = SimpleNamespace(size=lambda: shards or P)
        self.pre_process, self.seen = True, []
        self.layers = torch.nn.ModuleList(map(_layer, numbers))

    __call__ = torch.nn.Module.__call__  # not Megatron's, of CUDA graphs

    def forward(self, hidden_states, attention_mask=None, packed_seq_params=None):
        self.seen.append(packed_seq_params)
        return hidden_states + 1


class _Prediction(MultiTokenPredictionBlock):
    def __init__(self, *numbers: int):
        torch.nn.Module.__init__(self)
        self.layers = torch.nn.ModuleList(torch.nn.Module() for _ in numbers)
        for layer, number in zip(self.layers, numbers, strict=True):
            layer.mtp_model_layer = _layer(number)
        self.seen: list = []

    def forward(self, hidden_states, packed_seq_params=None):
        self.seen.append(packed_seq_params)
        return hidden_states + 2


def _layer(number: int):
    layer = torch.nn.Module()
    layer.plan_number = number
    layer.self_attention = SimpleNamespace(attn_mask_type=AttnMaskType.causal, core_attention=None)
    return layer


class _Observer:
    def __init__(self):
        self.seen: list = []

    def begins(self, planned, hidden):
        self.seen.append("begins")

    def forward_ends(self, output):
        self.seen.append(output)


def _attach(monkeypatch, chunks, policy, observer=None):
    monkeypatch.setattr(hooks, "get_data_parallel_rank", lambda: 0)
    return hooks.attach_hooks(
        chunks, policy_of=lambda block: policy, counts=lambda: Counts(1, 0, None), observer=observer
    )


def test_every_block_asks_for_its_layers_and_those_of_the_prediction_after_it(monkeypatch):
    policy, observer = _Policy(), _Observer()
    first, last, prediction = _Attached(1, 2), _Attached(3, shards=None), _Prediction(4, 5)
    chunks = [torch.nn.ModuleList([first]), torch.nn.ModuleList([last, prediction])]
    assert _attach(monkeypatch, chunks, policy, observer) is chunks
    first(HIDDEN)
    assert torch.equal(observer.seen[1], HIDDEN + 1)
    prediction(last(HIDDEN))
    assert policy.asked == [(1, 8, (1, 2)), (1, 4, (3, 4, 5))]
    assert observer.seen[0] == observer.seen[2] == "begins" and len(observer.seen) == 4
    assert torch.equal(observer.seen[3], HIDDEN + 3), "the prediction runs last"
    assert first.seen[0].plan.layers == uniform_plan((1, 2), "metp").layers
    assert prediction.seen == last.seen and prediction.seen[0].plan.layers.keys() == {3, 4, 5}
    with torch.no_grad():
        first(HIDDEN)
    assert len(observer.seen) == 4


def test_what_megatron_recomputes_itself_is_marked(monkeypatch):
    """Its first layer of a block of two, and none of a prediction, of 'block' of one layer."""
    block, prediction = _Attached(1, 2), _Prediction(3)
    _attach(monkeypatch, [torch.nn.ModuleList([block, prediction])], _Policy())
    layers = [*block.layers, prediction.layers[0].mtp_model_layer]
    assert [layer.megatron_recomputes for layer in layers] == [True, False, False]


def test_a_stage_without_layers_has_no_hook_and_one_of_a_prediction_alone_does(monkeypatch):
    policy = _Policy()
    empty, before, prediction = _Attached(), _Attached(), _Prediction(2)
    _attach(monkeypatch, [torch.nn.ModuleList([empty])], policy)
    empty(HIDDEN)
    assert empty.seen == [None] and policy.asked == []
    _attach(monkeypatch, [torch.nn.ModuleList([before, prediction])], policy)
    prediction(before(HIDDEN))
    assert policy.asked[0][2] == (2,) and prediction.seen == before.seen != [None]
