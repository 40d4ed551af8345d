"""Where Megatron's training loop is, for the seeds of microbatches."""

from __future__ import annotations

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training import get_args

from megatron_paradyse.hook import Counts


def loop_counts() -> Counts:
    """Of the current iteration; Megatron may run it again to validate it, and counts then anew."""
    args = get_args()
    return Counts(args.seed, getattr(args, "curr_iteration", 0) or 0, get_num_microbatches())
