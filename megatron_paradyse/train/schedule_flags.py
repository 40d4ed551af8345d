"""Schedules of training that Megatron would refuse without a word, or not at all.

Its own checks of the learning rate come once the model is built, and say nothing.
"""

from __future__ import annotations

import argparse

from megatron_paradyse.errors import UserError


def check_schedule(args: argparse.Namespace) -> None:
    """UserError for iterations, learning rates and phases that cannot be followed."""
    if args.log_interval < 1:
        raise UserError(
            f"--log-interval {args.log_interval}, by which Megatron divides: give 1 or more"
        )
    _check_intervals(args)
    begun = args.override_ckpt_iteration
    if begun is not None and begun < 0:
        raise UserError(
            f"--override-ckpt-iteration {begun}: give 0 to begin data and iterations anew, or "
            "leave it out"
        )
    if args.train_iters is None and args.train_samples is None:  # --skip-train reads it too
        raise UserError("how long to train is missing: give --train-iters or --train-samples")
    for unit in ("iters", "samples"):
        _check_unit(args, unit)
    if not args.skip_train and args.lr is None:
        raise UserError("--lr is missing, and Megatron has no learning rate of its own: give one")
    _check_learning_rate(args)
    interval = args.eval_interval
    if not (interval and interval > 0) and not (args.skip_train or args.full_validation):
        given = "is missing" if interval is None else f"{interval} is no interval"
        raise UserError(
            f"--eval-interval {given}, and Megatron counts evaluations by it even with "
            "--eval-iters 0: give --eval-interval 1000"
        )
    phases = args.phase_transition_iterations
    if phases and not args.train_samples:
        raise UserError(
            f"--phase-transition-iterations {phases} without --train-samples: Megatron counts "
            "phases in samples: give --train-samples, iterations times --global-batch-size"
        )
    if phases and args.step_batch_size_schedule:
        raise UserError(
            f"--phase-transition-iterations {phases} with --step-batch-size-schedule: Megatron "
            "counts a phase's samples by one batch size: drop one"
        )


def _check_intervals(args: argparse.Namespace) -> None:
    """Of those that Megatron divides or counts by in the middle of a training."""
    scales = args.fp16 and args.loss_scale is None
    for name, is_read in (
        ("tensorboard_log_interval", args.tensorboard_dir is not None),
        ("check_weight_hash_across_dp_replicas_interval", True),
        ("loss_scale_window", scales),
        ("log_memory_interval", True),
        ("gpu_sniff_test_interval", True),
    ):
        value = getattr(args, name)
        if is_read and value is not None and value < 1:
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{flag} {value:g} is no interval: give 1 or more, or leave it out")
    if args.manual_gc and args.manual_gc_interval < 0:
        raise UserError(
            f"--manual-gc-interval {args.manual_gc_interval} is no interval: give 1 or more, or 0 "
            "to collect before evaluations alone"
        )


def _check_unit(args: argparse.Namespace, unit: str) -> None:
    """Of a schedule in "iters" or in "samples"."""
    asked = getattr(args, f"train_{unit}")
    if asked is not None and asked < 1 and not args.skip_train:
        raise UserError(f"--train-{unit} {asked} trains nothing: give 1 or more, or --skip-train")
    decay = getattr(args, f"lr_decay_{unit}")
    if decay is not None and decay < 1:
        raise UserError(
            f"--lr-decay-{unit} {decay} leaves no {unit} to decay over: give 1 or more, or leave "
            "it out"
        )
    total, warmup = decay or asked, getattr(args, f"lr_warmup_{unit}")
    if total and warmup >= total:
        raise UserError(
            f"--lr-warmup-{unit} {warmup} with a learning rate of {total} {unit}: give fewer, "
            f"or more --train-{unit} or --lr-decay-{unit}"
        )
    if asked and args.lr_decay_style == "WSD" and getattr(args, f"lr_wsd_decay_{unit}") is None:
        raise UserError(
            f"--lr-decay-style WSD with --train-{unit} {asked} does not say when it begins to "
            f"decay: give --lr-wsd-decay-{unit}"
        )


def _check_learning_rate(args: argparse.Namespace) -> None:
    share = args.lr_warmup_fraction
    if share is not None and not 0 <= share < 1:
        raise UserError(
            f"--lr-warmup-fraction {share:g} of the decay leaves nothing to decay: give less than 1"
        )
    if args.lr is not None and args.lr_warmup_init > args.lr:
        raise UserError(
            f"--lr-warmup-init {args.lr_warmup_init:g} is above --lr {args.lr:g}, to which it "
            "warms up: give less"
        )
