"""How benchmarks on real ranks start, time what they run, and end."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_paradyse.costs.model import CostModel
from megatron_paradyse.costs.table import ATTENTION
from megatron_paradyse.strategies import RECOMPUTE, strategy_names


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


def end_rank(output: str, result: Any) -> None:
    """The first rank writes the result as JSON."""
    import torch

    if torch.distributed.get_rank() == 0:
        Path(output).write_text(json.dumps(result))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def say(text: str) -> None:
    """A line on stderr, of the first rank."""
    if os.environ["RANK"] == "0":
        print(text, file=sys.stderr, flush=True)


def seconds_of(run: Callable[[], object]) -> float:
    """Of one run that all ranks begin together; the slowest rank's."""
    import torch

    from megatron_paradyse.profiler.model import largest_over_ranks

    torch.distributed.barrier()
    start = time.perf_counter()
    run()
    return largest_over_ranks([time.perf_counter() - start])[0]


def strategies_of(model: CostModel) -> list[str]:
    """Those of which costs were fitted, in the registry's order."""
    known = model.strategies(ATTENTION)
    ordered = [name for base in strategy_names() for name in (base, base + RECOMPUTE)]
    return [name for name in ordered if name in known]
