"""What one sample is: a checkpoint says how many were consumed, and a run goes on behind them."""

from __future__ import annotations

import argparse

from megatron_paradyse.data.choices import BUCKETED
from megatron_paradyse.settings import FIXED
from megatron_paradyse.train.batch_sizes import group_size


def samples_of(args: argparse.Namespace) -> str:
    """The samples in which a run counts; packed documents are counted as documents."""
    settings = args.paradyse_settings
    if settings.sequences == FIXED:
        return _fixed(args.seq_length)
    groups = f", in groups of {group_size(args)}," if settings.order == BUCKETED else ""
    return (
        f"{settings.order} documents{groups} of up to {args.seq_length} tokens "
        f"(longer ones: {settings.long_documents})"
    )


def _fixed(seq_length: int) -> str:
    return f"fixed sequences of {seq_length} tokens"


def warning(args: argparse.Namespace, of_checkpoint: argparse.Namespace) -> str | None:
    """Where the run goes on in other samples than the checkpoint has counted; None: in the same.

    Stock Megatron's checkpoints count fixed sequences.
    """
    consumed = getattr(of_checkpoint, "consumed_train_samples", 0)
    theirs = getattr(of_checkpoint, "paradyse_samples", None)
    if theirs is None and not getattr(of_checkpoint, "paradyse", False):
        theirs = _fixed(of_checkpoint.seq_length)
    if not consumed or theirs in (None, args.paradyse_samples):
        return None
    return (
        f"the checkpoint has consumed {consumed} samples and counted {theirs}; this run counts "
        f"{args.paradyse_samples} and leaves out the first {consumed} of them: give "
        "--override-ckpt-iteration 0 to begin data and iterations anew, or --finetune to begin "
        "all but the weights anew"
    )
