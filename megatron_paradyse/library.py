"""Strategies that switch in a training loop of your own: megatron-core without Megatron's loop.

Import it before megatron, for it makes that ready for this machine. Build a GPTModel with
switchable_spec(...), then attach([model], ...).
"""

from __future__ import annotations

from megatron_paradyse import megatron_start
from megatron_paradyse.train.megatron_version import check_megatron

check_megatron()
try:
    megatron_start.make_ready()
    from megatron_paradyse.train.own_loop import Attached, attach, switchable_spec
except Exception as error:
    raise megatron_start.cannot_import(error) from error

__all__ = ["Attached", "attach", "switchable_spec"]
