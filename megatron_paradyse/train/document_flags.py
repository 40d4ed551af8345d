"""Which of Megatron's flags go with documents, and what documents set by themselves."""

from __future__ import annotations

import argparse

from megatron_paradyse.errors import UserError
from megatron_paradyse.settings import Settings
from megatron_paradyse.train.data_files import (
    check_split,
    check_targets,
    check_there,
    data_prefixes,
    refuse_targets,
    take_vocabulary,
)
from megatron_paradyse.train.model_kind import BERT

OF_DOCUMENTS = ("order", "long_documents", "balance")  # settings


def refuse_of_documents(settings: Settings) -> None:
    """UserError for a setting that Megatron's own data, in their own order, do not heed."""
    for name in OF_DOCUMENTS:
        value = getattr(settings, name)
        if value != getattr(Settings, name):
            flag = f"--paradyse-{name.replace('_', '-')}"
            raise UserError(
                f"{flag if value is True else f'{flag} {value}'} with --paradyse-sequences fixed, "
                "whose samples and order are Megatron's: leave it out, or train on documents"
            )


def prepare_documents(args: argparse.Namespace) -> None:
    """Complete what documents need, in place; UserError for what cannot be had with them."""
    if args.mock_data:
        raise UserError(
            "--mock-data has no documents: give --data-path, or --paradyse-sequences fixed"
        )
    if args.sft:
        raise UserError(
            f"--sft with --paradyse-sequences {args.paradyse_settings.sequences}: prepare the "
            "conversations with 'megatron-paradyse data prepare --source chat' and leave --sft "
            "out, or use fixed"
        )
    for name in (
        "fim_data",
        "object_storage_cache_path",
        "logits_save_dir",
        "logits_load_dir",
    ):
        if getattr(args, name, False):
            flag = "--" + name.replace("_", "-")
            raise UserError(
                f"{flag} with --paradyse-sequences {args.paradyse_settings.sequences}: use fixed, "
                f"or drop {flag}"
            )
    _prepare_validation(args)
    if args.seq_length is None:
        raise UserError("--seq-length is missing: give the longest sequence to train on")
    if args.seq_length < 1:
        raise UserError(f"--seq-length {args.seq_length}: give the longest sequence to train on")
    args.calculate_per_token_loss = True  # documents of all lengths weigh by their tokens
    check_split(args.split)
    prefixes = data_prefixes(args)
    take_vocabulary(args, prefixes)
    check_there(prefixes)
    check_targets(prefixes)
    if args.paradyse_model == BERT:
        refuse_targets(prefixes, "a BERT may learn", "train a GPT")


def _prepare_validation(args: argparse.Namespace) -> None:
    """Of --full-validation Megatron 0.19.2 runs the form with several data sets only."""
    if args.multiple_validation_sets and not args.full_validation:
        raise UserError("--multiple-validation-sets needs --full-validation in Megatron: give both")
    if not args.full_validation:
        return
    args.multiple_validation_sets = True


def check_validation(args: argparse.Namespace) -> None:
    """Once Megatron has validated them; UserError where it cannot evaluate whole data sets."""
    if args.full_validation and args.virtual_pipeline_model_parallel_size:
        raise UserError(
            "--full-validation with interleaved pipeline stages, which Megatron cannot evaluate: "
            "drop one"
        )
