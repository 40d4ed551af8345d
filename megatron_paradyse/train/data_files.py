"""The data sets that a run's flags name, and the vocabulary that they were prepared with."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import Any

from megatron_paradyse.data.index import read_index
from megatron_paradyse.data.megatron_tokenizers import (
    MEGATRON_TYPES,
    VOCABULARY,
    vocabulary_digest,
)
from megatron_paradyse.data.metadata import DatasetMetadata, read_metadata
from megatron_paradyse.data.targets import has_targets
from megatron_paradyse.errors import UserError

DATA_FLAGS = (
    "--data-path",
    "--data-args-path",
    "--train-data-path",
    "--valid-data-path",
    "--test-data-path",
    "--per-split-data-args-path",
)


def data_prefixes(args: argparse.Namespace) -> list[str]:
    """The data sets of all splits without their weights, each once, as Megatron reads the flags.

    UserError where it cannot read them.
    """
    from megatron.training.utils import get_blend_and_blend_per_split

    values = {flag: _value(args, flag) for flag in DATA_FLAGS}
    given = [flag for flag, value in values.items() if value is not None]
    try:
        blend, per_split = get_blend_and_blend_per_split(args)
    except (OSError, ValueError, KeyError, AssertionError, TypeError) as error:
        reason = f"{type(error).__name__} {' '.join(str(error).split())[:200]}".rstrip()
        raise UserError(
            f"{' and '.join(given)} cannot be read as data sets ({reason}): give one flag, and "
            "PREFIX or WEIGHT PREFIX WEIGHT PREFIX"
        ) from error
    blends = [blend] if blend is not None else per_split or []
    for weights in (each[1] for each in blends if each and each[1] is not None):
        if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
            told = ", ".join(f"{weight:g}" for weight in weights)
            raise UserError(
                f"{' and '.join(given)} with the weights {told}: give numbers of 0 or more, not "
                "all of them 0"
            )
    return list(dict.fromkeys(prefix for each in blends if each for prefix in each[0]))


def check_split(split: str | None) -> None:
    """Megatron takes the digits that it finds, without their signs, and divides by their sum."""
    if split is None:
        return
    try:
        shares = [float(share) for share in re.findall(r"[.0-9]+", split)]
    except ValueError:
        shares = []
    strange = re.search(r"[-+a-zA-Z]", split)  # between numbers Megatron takes any separator
    if strange or len(shares) > 3 or not any(shares):
        raise UserError(
            f"--split {split}: give the shares of training, validation and test, such as 969,30,1"
        )


def check_named(args: argparse.Namespace) -> None:
    if not data_prefixes(args):
        raise UserError(
            "no data: give --data-path PREFIX, as 'megatron-paradyse data prepare' wrote it"
        )


def check_targets(prefixes: list[str]) -> None:
    """UserError for data of which the file is missing that says what is learnt."""
    for prefix in prefixes:
        try:
            learns_all = read_metadata(prefix).num_target_tokens is None
        except (UserError, OSError):  # not of `data prepare`
            continue
        if not learns_all and not has_targets(prefix):
            raise UserError(
                f"{prefix}.targets not found, which says which tokens of {prefix}.bin are learnt: "
                "copy it beside the others, or prepare the data again"
            )


def learns_all(args: argparse.Namespace) -> bool:
    """Whether every token of the data is learnt."""
    return args.mock_data or not any(has_targets(prefix) for prefix in data_prefixes(args))


def refuse_targets(prefixes: list[str], what: str, remedy: str) -> None:
    """UserError for data of which not every token is learnt, where all would be."""
    for prefix in prefixes:
        if has_targets(prefix):
            raise UserError(
                f"{prefix}.targets says that not every token is learnt, and {what} all: {remedy}, "
                "or remove that file"
            )


def check_there(prefixes: list[str]) -> None:
    for prefix in prefixes:
        if not Path(f"{prefix}.idx").is_file():
            raise UserError(
                f"data file {prefix}.idx not found: give the prefix that 'megatron-paradyse data "
                "prepare' wrote, without .bin or .idx, and weights for all or none"
            )


def check_fixed_splits(args: argparse.Namespace) -> None:
    """UserError for a split of Megatron's own data with a share and no token, or none to train on.

    Its index builder counts epochs of such a split without end, whether it is evaluated or not;
    without a share for training it would end at once, as if all were well. Without evaluations it
    makes one epoch's samples of one data set and none of several, and ends where there is none.
    """
    if args.mock_data or args.sft or args.object_storage_cache_path:  # no .idx here to read
        return
    refuse_targets(
        data_prefixes(args), "Megatron's loader learns", "give --paradyse-sequences documents"
    )
    check_split(args.split)
    told, splits = _fixed_splits(args)
    for name, prefixes, share in splits:
        if share is None and (name != "training" or args.skip_train):
            continue
        parts = [_part(prefix, share) for prefix in prefixes]
        for prefix, lengths in zip(prefixes, parts, strict=True):
            if not lengths.any():
                raise UserError(
                    f"{told} leaves the {name} split none of the "
                    f"{len(read_index(prefix).sequence_lengths)} documents of {prefix}: add data, "
                    "or give another --split, such as 100,0,0 with --eval-iters 0"
                )
        without_sample = len(parts) > 1 or parts[0].sum() <= args.seq_length
        if name != "training" and args.eval_iters == 0 and without_sample:
            raise UserError(
                f"--eval-iters 0 with {told}: Megatron makes no sample of the {name} split and "
                "ends: give --eval-iters 1 or more, or --split 100,0,0 of --data-path"
            )


Split = tuple[str, list[str], tuple[float, float] | None]


def _fixed_splits(args: argparse.Namespace) -> tuple[str, list[Split]]:
    """What says how data are split, and of each split its name, data sets and share of them."""
    from megatron.core.datasets import blended_megatron_dataset_config as config
    from megatron.training.utils import get_blend_and_blend_per_split

    blend, per_split = get_blend_and_blend_per_split(args)
    names = ("training", "validation", "test")
    if blend is not None:
        split = args.split or "969,30,1"
        vector = config.parse_and_normalize_split(split)
        shares = config.convert_split_vector_to_split_matrix(vector)
        told = f"--split {split}"
        return told, [(n, blend[0], share) for n, share in zip(names, shares, strict=True)]
    given = next((flag for flag in DATA_FLAGS[2:] if _value(args, flag) is not None), "no data")
    blends = zip(names, per_split or [], strict=False)
    whole: list[Split] = [(name, each[0], (0.0, 1.0)) for name, each in blends if each]
    return given, whole


def _part(prefix: str, share: tuple[float, float] | None) -> Any:
    """The lengths of the documents that a share of a data set has."""
    lengths = read_index(prefix).sequence_lengths
    first, last = (round(edge * float(len(lengths))) for edge in share or (0, 0))
    return lengths[first:last]


def _value(args: argparse.Namespace, flag: str) -> Any:
    return getattr(args, flag[2:].replace("-", "_"))


def take_vocabulary(args: argparse.Namespace, prefixes: list[str]) -> None:
    """Without --tokenizer-type, the vocabulary that the data were prepared with, in place.

    A checkpoint may say NullTokenizer, and does not say of which vocabulary.
    """
    if args.tokenizer_type not in (None, "NullTokenizer") or args.vocab_size is not None:
        return  # a PREFIX.json may then be anything, such as what a .bin was made of
    prefix, metadata = _common_metadata(prefixes)
    if metadata is None:
        return
    if args.eod_mask_loss and metadata.eod is None:
        raise UserError(
            f"--eod-mask-loss with {prefix}, whose tokenizer ends no document: leave it out"
        )
    names = ("tokenizer_type", "vocab_size", "null_tokenizer_eod_id")
    args.paradyse_instead_of |= {name: getattr(args, name) for name in names}
    args.tokenizer_type = "NullTokenizer"  # tokens are ready; only the vocabulary's size is needed
    args.vocab_size = metadata.vocab_size
    args.null_tokenizer_eod_id = metadata.eod


def _common_metadata(prefixes: list[str]) -> tuple[str, DatasetMetadata | None]:
    """Of the data sets that have any, and the first of them; UserError where they differ."""
    found = {p: read_metadata(p) for p in prefixes if Path(f"{p}.json").is_file()}
    if not found:
        return "", None
    first, *others = found.items()
    digested = [(p, m) for p, m in found.items() if VOCABULARY in m.tokenizer_parameters]
    pairs = [(first, other) for other in others] + [(digested[0], other) for other in digested[1:]]
    for (one, its), (other, theirs) in pairs:
        alike = VOCABULARY in its.tokenizer_parameters and VOCABULARY in theirs.tokenizer_parameters
        mine, that = (_vocabulary(m, digest=alike) for m in (its, theirs))
        if mine != that:
            raise UserError(
                f"{one} has the vocabulary of {mine} and {other} of {that}: prepare them with "
                "one tokenizer"
            )
    return first


def _vocabulary(metadata: DatasetMetadata, *, digest: bool) -> str:
    """digest: whether to tell what the ids stand for, which older data do not know."""
    told = f"{metadata.tokenizer} with {metadata.vocab_size} ids, end of document {metadata.eod}"
    return told + (f", digest {metadata.tokenizer_parameters[VOCABULARY]!s:.40}" if digest else "")


def other_vocabulary(args: argparse.Namespace, tokenizer: Any) -> str | None:
    """News of data that another tokenizer than the one of --tokenizer-type has made, or None.

    Their ids are learnt all the same; what ends or masks a document may be another one.
    """
    if args.tokenizer_type == "NullTokenizer":
        return None
    for prefix in data_prefixes(args):
        try:
            metadata = read_metadata(prefix)
        except (UserError, OSError):  # not of `data prepare`
            continue
        theirs = metadata.tokenizer_parameters.get(VOCABULARY)
        mine = vocabulary_digest(tokenizer, metadata.vocab_size)
        older = theirs is None and metadata.tokenizer in MEGATRON_TYPES
        if mine not in (None, theirs) and not older:
            named = f"{metadata.tokenizer} {metadata.tokenizer_parameters.get('model', '')!s:.200}"
            return (
                f"{prefix} was prepared with {named.rstrip()}, whose ids stand for other tokens "
                f"than those of --tokenizer-type {args.tokenizer_type} here: give that tokenizer, "
                "or leave --tokenizer-type out"
            )
    return None
