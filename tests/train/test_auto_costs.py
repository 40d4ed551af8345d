"""Costs for a run that names none: which are kept apart, and what they are made of."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from megatron_paradyse.train import auto_costs, plugin
from tests.train.harness import with_defaults

# Of the fields that shape a model and its buffers: what its weights begin as, and what is logged.
DROPPED = {"init_method_std", "log_max_attention_logit"}


@pytest.fixture(scope="module")
def names():
    """Of all of Megatron's arguments."""
    plugin.install()
    from megatron.training.arguments import parse_args

    flags = with_defaults(["--mock-data", "--paradyse", "--paradyse-sequences", "fixed"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["pretrain_gpt", *flags])
        return set(vars(parse_args()))


def test_no_argument_that_costs_depend_on_is_left_out_of_their_name(names):
    """By Megatron's own lists of what a model and its gradients are; and one in none of them."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    shaping = {
        field.name
        for config in (MLATransformerConfig, DistributedDataParallelConfig)
        for field in dataclasses.fields(config)
    } & names | {"accumulate_allreduce_grads_in_fp32"}
    assert len(shaping) > 200 and shaping <= names
    assert {name for name in shaping if auto_costs.WITHOUT_EFFECT.fullmatch(name)} == DROPPED


@pytest.mark.parametrize(
    "name", ["lr", "min_lr", "decoupled_min_lr", "lr_warmup_iters", "lr_wsd_decay_style"]
)
def test_a_learning_rate_leaves_costs_as_they_are(name, names):
    assert name in names and auto_costs.WITHOUT_EFFECT.fullmatch(name)
