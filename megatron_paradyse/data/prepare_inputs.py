"""What the options of `data prepare` say to read: the kind of source, and the tokenizer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megatron_paradyse.data import fasta, sources, supervised, tokenizers
from megatron_paradyse.data.chat_tokenizers import (
    HUGGING_FACE,
    PromptFormatTokenizer,
    TemplateTokenizer,
)
from megatron_paradyse.data.megatron_tokenizers import MEGATRON_TYPES, MegatronTokenizer
from megatron_paradyse.data.writer import SUFFIXES
from megatron_paradyse.errors import UserError

JSONL_SUFFIXES = (".jsonl", ".json", ".ndjson")
FASTA_SUFFIXES = (".fa", ".fasta", ".fna", ".ffn", ".frn")
OF_SOURCE = {
    "suffix": ("tree",),
    "exclude": ("tree",),
    "key": ("jsonl", "chat"),
    "prompt_key": ("jsonl",),
    "learn": ("chat",),
    "chat_template": ("chat",),
    "split_bases": ("fasta",),
}
SFT_TOKENIZER, DEFAULT_FORMAT = "SFTTokenizer", "nemotron-h-aligned"  # as Megatron's flags
CHAT_TOKENIZERS = (HUGGING_FACE, SFT_TOKENIZER)
DEFAULT_TOKENIZERS = {"fasta": "kmer", "chat": HUGGING_FACE}
OF_TOKENIZER = {
    "kmer": "kmer",
    "chat_template": HUGGING_FACE,
    "sft_tokenizer_prompt_format": SFT_TOKENIZER,
}


def kind_of(inputs: tuple[str, ...], asked: str) -> str:
    """Which source reads the inputs; UserError where their names tell none, or several."""
    if asked != "auto":
        return asked
    kinds = set()
    for path in inputs:
        name = path.lower().removesuffix(".gz")
        if os.path.isdir(path):
            kinds.add("tree")
        elif name.endswith(JSONL_SUFFIXES):
            kinds.add("jsonl")
        elif name.endswith(FASTA_SUFFIXES):
            kinds.add("fasta")
        elif not os.path.exists(path):
            raise UserError(f"{path} does not exist: check the path")
        else:
            raise UserError(
                f"{path}: unknown kind of file: give --source tree, jsonl, chat or fasta"
            )
    if len(kinds) > 1:
        raise UserError(f"inputs of kinds {', '.join(sorted(kinds))}: prepare each kind alone")
    return kinds.pop()


def check_kept(inputs: tuple[str, ...], options: dict[str, Any], prefix: str) -> None:
    """UserError for a file that is read and would be replaced, as docs.json by the PREFIX docs."""
    names = ("tokenizer_model", "vocab_file", "merge_file", "chat_template")
    for path in (*inputs, *(options[name] for name in names)):
        if path and _is_of(path, prefix):
            raise UserError(
                f"{path} is read, and --output-prefix {prefix} would replace it: choose another "
                "prefix"
            )


def check_tree_kept(source: Any, prefix: str) -> None:
    """check_kept, of the files that a tree holds: what an earlier run wrote there, most often."""
    ours = (prefix + suffix for suffix in SUFFIXES)
    if not any(os.path.exists(path) and path.endswith(source.suffixes) for path in ours):
        return  # the tree need not be walked
    for path in source.paths():
        if _is_of(path, prefix):
            raise UserError(
                f"{path} is read, and --output-prefix {prefix} would replace it: choose another "
                f"prefix, or leave it out with --exclude {os.path.basename(path)}"
            )


def _is_of(path: str, prefix: str) -> bool:
    """Whether it is a file of the data set of that prefix, which is there."""
    ours = [prefix + suffix for suffix in SUFFIXES]
    return os.path.exists(path) and any(
        os.path.exists(written) and os.path.samefile(path, written) for written in ours
    )


def tokenizer_name(kind: str, options: dict[str, Any]) -> str:
    """The tokenizer for a kind of source; UserError for an option that it or the source lacks."""
    name = options["tokenizer"] or DEFAULT_TOKENIZERS.get(kind, "bytes")
    for option, its in OF_SOURCE.items():
        if options[option] not in (None, ()) and kind not in its:
            right = " or ".join(its)
            raise UserError(
                f"{_flag(option)} is of --source {right}, and this is {kind}: leave it out"
            )
    for option, its_tokenizer in OF_TOKENIZER.items():
        if options[option] is not None and name != its_tokenizer:
            raise UserError(
                f"{_flag(option)} with --tokenizer {name}: leave it out, or --tokenizer "
                f"{its_tokenizer}"
            )
    if (name in CHAT_TOKENIZERS or kind != "chat") and (name != SFT_TOKENIZER or kind == "chat"):
        return name
    remedy = " or ".join(CHAT_TOKENIZERS) if kind == "chat" else "another, or --source chat"
    raise UserError(f"--source {kind} with --tokenizer {name}: give {remedy}")


def make_source(kind: str, inputs: tuple[str, ...], options: dict[str, Any]) -> Any:
    """The source of that kind; options: the command's, by name."""
    if kind == "tree":
        return sources.TreeSource(
            inputs,
            suffixes=options["suffix"] or sources.DEFAULT_SUFFIXES,
            exclude=(*sources.DEFAULT_EXCLUDES, *options["exclude"]),
        )
    if kind == "fasta":
        return fasta.FastaSource(inputs, split_bases=options["split_bases"])
    prompt_key = options["prompt_key"]
    given = {} if options["key"] is None else {"key": options["key"]}
    if kind == "chat":
        learn = options["learn"] or supervised.ASSISTANT
        return supervised.ChatSource(inputs, learn=learn, **given)
    if prompt_key is not None:
        return supervised.PromptSource(inputs, prompt_key=prompt_key, **given)
    return sources.JsonlSource(inputs, **given)


def make_tokenizer(kind: str, name: str, options: dict[str, Any]) -> Any:
    """The tokenizer of a name that tokenizer_name() gave."""
    files = {
        "model": options["tokenizer_model"],
        "vocab_file": options["vocab_file"],
        "merge_file": options["merge_file"],
    }
    if kind == "chat":
        return _chat_tokenizer(name, options)
    if name in MEGATRON_TYPES:
        return MegatronTokenizer(name, **files)
    if any(files.values()):
        raise UserError(f"--tokenizer {name} reads no files: name the type with --tokenizer")
    if name == "bytes":
        return tokenizers.BytesTokenizer()
    kmer = options["kmer"]
    return tokenizers.KmerTokenizer() if kmer is None else tokenizers.KmerTokenizer(kmer)


def _chat_tokenizer(name: str, options: dict[str, Any]) -> Any:
    for option in ("vocab_file", "merge_file"):
        if options[option]:
            raise UserError(f"{_flag(option)} with --source chat: give --tokenizer-model PATH")
    model, template, learn = (options[k] for k in ("tokenizer_model", "chat_template", "learn"))
    if name == SFT_TOKENIZER:
        if learn in (supervised.LEARN_LAST, supervised.LEARN_EACH):
            raise UserError(
                f"--learn {learn} with --tokenizer {name}: leave it out, or {HUGGING_FACE}"
            )
        return PromptFormatTokenizer(
            model=model, prompt_format=options["sft_tokenizer_prompt_format"] or DEFAULT_FORMAT
        )
    if template is not None:
        try:
            template = Path(template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--chat-template {template} cannot be read ({error})") from error
    return TemplateTokenizer(model=model, chat_template=template)


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")
