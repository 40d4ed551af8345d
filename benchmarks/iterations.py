"""How benchmarks on real ranks start."""

from __future__ import annotations

import os
import sys


def start_rank():
    """Megatron's arguments, from the model's flags on the command line, and its groups."""
    from megatron_paradyse.profiler.flags import megatron_flags
    from megatron_paradyse.train import plugin

    sys.argv[1:] = megatron_flags(
        sys.argv[1:], model_path=None, ranks=int(os.environ["WORLD_SIZE"])
    )
    plugin.install()
    from megatron.training import training
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args()
    training.initialize_megatron()
    args.check_for_nan_in_loss_and_grad = False  # its check wants to run inside train_step
    return args
