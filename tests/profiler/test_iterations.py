"""An iteration of a profile after one that has failed."""

from __future__ import annotations

import argparse
import inspect
import weakref

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_paradyse.profiler.iterations import forget_gradients


class Layer(TransformerLayer):
    """As one whose MLP ran out of memory, at an input that autograd has computed."""

    def __init__(self):
        torch.nn.Module.__init__(self)
        self.weight = torch.nn.Parameter(torch.ones(3))
        computed = (self.weight * 2).exp()
        self.input = weakref.ref(computed)
        self.mlp_norm_manager = argparse.Namespace(tensor=computed)

    def zero_grad_buffer(self):
        self.weight.main_grad = None


def test_a_failure_within_a_layer_keeps_nothing_for_the_next_iteration():
    """The name is Megatron's: from the norm before the MLP until that has run."""
    assert "self.mlp_norm_manager = self.off_interface(" in inspect.getsource(TransformerLayer)
    layer = Layer()
    layer.weight.grad = torch.ones(3)
    forget_gradients(argparse.Namespace(chunks=[layer]))
    assert layer.weight.grad is None and layer.input() is None
