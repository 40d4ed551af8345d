"""Which of Megatron's flags go with documents, and what documents set by themselves."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_paradyse.data.metadata import read_metadata
from megatron_paradyse.errors import UserError


def prepare_documents(args: argparse.Namespace) -> None:
    """Complete what documents need, in place; UserError for what cannot be had with them."""
    if args.mock_data:
        raise UserError(
            "--mock-data has no documents: give --data-path, or --paradyse-sequences fixed"
        )
    for name in (
        "sft",
        "fim_data",
        "full_validation",
        "multiple_validation_sets",
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
    if args.seq_length is None:
        raise UserError("--seq-length is missing: give the longest sequence to train on")
    args.calculate_per_token_loss = True  # documents of all lengths weigh by their tokens
    for name in ("rampup_batch_size", "step_batch_size_schedule", "decrease_batch_size_if_needed"):
        if args.paradyse_settings.balance and getattr(args, name):
            raise UserError(
                f"--paradyse-balance with --{name.replace('_', '-')}: global batches of one size "
                "only: drop one"
            )
    _take_tokenizer_from_data(args)
    for entry in args.data_path or []:
        if not _is_number(entry) and not Path(f"{entry}.idx").is_file():
            raise UserError(
                f"data file {entry}.idx not found: give --data-path the prefix that "
                "'megatron-paradyse data prepare' wrote, without .bin or .idx"
            )


def _take_tokenizer_from_data(args: argparse.Namespace) -> None:
    """Without --tokenizer-type, the vocabulary that the data were prepared with.

    A checkpoint may say NullTokenizer, and does not say of which vocabulary.
    """
    prefixes = [entry for entry in args.data_path or [] if not _is_number(entry)]
    given = args.tokenizer_type not in (None, "NullTokenizer") or args.vocab_size is not None
    if given or not prefixes:
        return
    if not Path(f"{prefixes[0]}.json").is_file():
        return
    metadata = read_metadata(prefixes[0])
    if args.eod_mask_loss and metadata.eod is None:
        raise UserError(
            f"--eod-mask-loss with {prefixes[0]}, whose tokenizer ends no document: leave it out"
        )
    names = ("tokenizer_type", "vocab_size", "null_tokenizer_eod_id")
    args.paradyse_instead_of |= {name: getattr(args, name) for name in names}
    args.tokenizer_type = "NullTokenizer"  # tokens are ready; only the vocabulary's size is needed
    args.vocab_size = metadata.vocab_size
    args.null_tokenizer_eod_id = metadata.eod


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
