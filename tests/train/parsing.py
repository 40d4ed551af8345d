"""Megatron's arguments of the harness's model, parsed and validated with the plugin in place."""

from __future__ import annotations

import sys

from megatron_paradyse.train import plugin
from tests.train.harness import with_defaults


def parsed(monkeypatch, *flags):
    """Megatron's arguments of MODEL with --paradyse, not yet validated."""
    plugin.install()
    from megatron.training.arguments import parse_args

    given = with_defaults([*flags, "--paradyse", "--data-path", "none"])
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt", *given])
    return parse_args()


def validated(args):
    from megatron.training.arguments import validate_args

    return validate_args(args)
