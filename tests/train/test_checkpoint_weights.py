"""What Megatron loads of a legacy checkpoint where PyTorch refuses it."""

from __future__ import annotations

import contextlib

import pytest
import torch
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.transformer import TransformerConfig

from megatron_paradyse.errors import UserError
from megatron_paradyse.train import checkpoint_weights
from megatron_paradyse.train.checkpoint_weights import weights_all_read


class Layer(torch.nn.Module):
    """With a norm, or without, and with what TransformerEngine's modules keep besides weights."""

    def __init__(self, *, norm: bool, width: int = 2) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(width, width)
        self.fc.get_extra_state = lambda: None
        if norm:
            self.norm = torch.nn.LayerNorm(width)


def wrapped(layer: Layer) -> torch.nn.Module:
    config = TransformerConfig(num_layers=1, hidden_size=2, num_attention_heads=1)
    return _BaseDataParallel(config, layer)


def load_as_megatron(layer: Layer, saved: dict) -> None:
    """Megatron's wrapper of a model returns nothing of what its module said."""
    model = wrapped(layer)
    with weights_all_read("/saved"):
        try:
            model.load_state_dict(saved, strict=True)
        except Exception:
            assert model.load_state_dict(saved, strict=False) is None


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(checkpoint_weights, "print_rank_0", lines.append)
    return lines


def test_weights_that_a_checkpoint_lacks_are_refused(said):
    """Megatron left them as they were drawn, and printed "load_return: None"."""
    saved = Layer(norm=False).state_dict()
    with pytest.raises(UserError, match=r"in /saved cannot .*: it lacks norm\.weight and 1 more, "):
        load_as_megatron(Layer(norm=True), saved)
    assert said == []


def test_weights_that_a_model_lacks_are_told(said):
    saved = Layer(norm=True).state_dict()
    layer = Layer(norm=False)
    load_as_megatron(layer, saved)
    assert layer.fc.weight.equal(saved["fc.weight"])
    assert said == [
        "> paradyse: the checkpoint in /saved has norm.weight and 1 more, which this model does "
        "not have: passed over"
    ]


def test_what_engines_keep_besides_weights_may_differ(said):
    """For which Megatron loads a second time at all."""
    saved = Layer(norm=True).state_dict()
    saved["fc._extra_state"] = saved["norm._extra_state"] = torch.zeros(1)
    load_as_megatron(Layer(norm=True), saved)
    assert said == []


def test_other_loads_stay_pytorchs(said):
    load = torch.nn.Module.load_state_dict
    saved = Layer(norm=False).state_dict()
    with weights_all_read("/saved"), contextlib.suppress(RuntimeError):
        assert Layer(norm=True).load_state_dict(saved, strict=False).missing_keys
        Layer(norm=True, width=3).load_state_dict(saved)
    assert torch.nn.Module.load_state_dict is load
    assert said == []
