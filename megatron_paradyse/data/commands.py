"""`megatron-paradyse data`: options and what they print; the work is imported when it is done."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Any

import click

from megatron_paradyse.errors import UserError
from megatron_paradyse.option_types import COUNT, RATIO, json_option
from megatron_paradyse.units import counted

if TYPE_CHECKING:
    from megatron_paradyse.data.metadata import DatasetMetadata

JSONL_SUFFIXES = (".jsonl", ".json", ".ndjson")
FASTA_SUFFIXES = (".fa", ".fasta", ".fna", ".ffn", ".frn")
OF_SOURCE = {"suffix": "tree", "exclude": "tree", "key": "jsonl", "split_bases": "fasta"}
# Written out here, because help must not import what builds them; a test compares.
MEGATRON_TOKENIZERS = (
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "GPT2BPETokenizer",
)


output_prefix = click.option(
    "-o",
    "--output-prefix",
    required=True,
    metavar="PREFIX",
    help="Write PREFIX.bin, PREFIX.idx and PREFIX.json.",
)
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace an existing data set.")


@click.group()
def data() -> None:
    """Prepare, inspect and synthesize data sets in Megatron's .bin/.idx format."""


@data.command(short_help="Turn source files, JSONL or FASTA into a data set.")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@output_prefix
@click.option(
    "--source",
    type=click.Choice(["auto", "tree", "jsonl", "fasta"]),
    default="auto",
    show_default=True,
    help="What INPUT is; auto: a folder is a tree, files by their suffix.",
)
@click.option(
    "--tokenizer",
    "--tokenizer-type",
    type=click.Choice(["bytes", "kmer", *MEGATRON_TOKENIZERS]),
    help="Default: kmer for FASTA, else bytes.",
)
@click.option("--kmer", type=int, metavar="K", help="kmer: bases.  [default: 3]")
@click.option("--tokenizer-model", metavar="PATH", help="File or folder of a Megatron tokenizer.")
@click.option("--vocab-file", metavar="PATH", help="GPT2BPETokenizer: vocab.json.")
@click.option("--merge-file", metavar="PATH", help="GPT2BPETokenizer: merges.txt.")
@click.option("--suffix", multiple=True, metavar=".EXT", help="tree: files to take [.py].")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="tree: also leave these out.")
@click.option("--key", help="jsonl: where the text is.  [default: text]")
@click.option("--split-bases", type=COUNT, metavar="N", help="fasta: N bases a document.")
@click.option(
    "--append-eod/--no-append-eod",
    default=True,
    show_default=True,
    help="End each document with the end-of-document token.",
)
@click.option("--strict", is_flag=True, help="An empty document is an error, not left out.")
@click.option("--max-documents", type=COUNT, metavar="N", help="Stop after N documents.")
@overwrite_option
@json_option
def prepare(inputs: tuple[str, ...], output_prefix: str, as_json: bool, **options: Any) -> None:
    """Turn source files, JSONL or FASTA (.gz too) into a data set; one document, one sequence.

    A tree leaves out symbolic links, site-packages, __pycache__, .git and the like. K = 1024.

    \b
    Examples:
      megatron-paradyse data prepare my_project/ -o data/code
      megatron-paradyse data prepare docs.jsonl.gz --key body -o data/docs \\
          --tokenizer GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt
      megatron-paradyse data prepare GRCh38.fa.gz --split-bases 1M -o data/grch38
    """
    from megatron_paradyse.data import prepare as work

    source_kind = _source_kind(inputs, options["source"])
    name = options["tokenizer"] or ("kmer" if source_kind == "fasta" else "bytes")
    _check_used(source_kind, name, options)
    source = _source(source_kind, inputs, options)
    metadata = work.prepare(
        source,
        _tokenizer(name, options),
        output_prefix,
        append_eod=options["append_eod"],
        strict=options["strict"],
        max_documents=options["max_documents"],
        overwrite=options["overwrite"],
        quiet=as_json,
    )
    _report(output_prefix, metadata, as_json)


@data.command(short_help="Show how long the sequences of a data set are.")
@click.argument("prefix")
@click.option("--scale", type=RATIO, default="1", help="Multiply the buckets' edges, 1/32 say.")
@click.option("--plot", metavar="FILE", help="Draw it too: .png, .svg or .pdf.")
@json_option
def lengths(prefix: str, scale: float, plot: str | None, as_json: bool) -> None:
    """Show how long the sequences of PREFIX.idx are, beside the paper's two corpora.

    \b
    Examples:
      megatron-paradyse data lengths data/code
      megatron-paradyse data lengths data/synthetic --scale 1/32 --plot lengths.png
    """
    from megatron_paradyse.data import lengths as work
    from megatron_paradyse.data.index import read_index
    from megatron_paradyse.data.metadata import read_metadata
    from megatron_paradyse.whole_file import check_figure

    if plot is not None:
        check_figure(plot)
    index = read_index(prefix)
    summary = work.summarize(index, scale)
    if plot is not None:
        from megatron_paradyse.data.lengths_plot import plot_lengths

        described = os.path.exists(index.prefix + ".json")
        synthetic = described and read_metadata(index.prefix).is_synthetic
        source = "synthetic data" if synthetic else "measured"
        label = os.path.basename(index.prefix)
        plot_lengths(summary, plot, label=label, source=f"{label}: {source}")
    if as_json:
        click.echo(json.dumps(work.to_json_values(summary), indent=2))
        return
    from rich.console import Console

    Console().print(work.length_table(summary))
    for line in work.summary_lines(summary):
        click.echo(line)
    if plot is not None:
        click.echo(f"drew {plot}")


@data.command(short_help="Write documents with published lengths.")
@output_prefix
@click.option(
    "--distribution",
    type=click.Choice(["githubcode", "grch38"]),
    required=True,
    help="Whose published lengths.",
)
@click.option("--documents", type=COUNT, required=True, metavar="N", help="How many.")
@click.option("--scale", type=RATIO, default="1", help="Multiply the lengths, 1/32 say.")
@click.option("--max-tokens", type=COUNT, metavar="N", help="Cut longer documents to N tokens.")
@click.option(
    "--vocab-size",
    type=COUNT,
    default=256,
    show_default=True,
    metavar="N",
    help="Number of ids; the last ends a document.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same bytes.")
@overwrite_option
@json_option
def synthesize(output_prefix: str, documents: int, as_json: bool, **options: Any) -> None:
    """Write documents with the lengths of one of the paper's corpora and learnable tokens.

    Lengths are log-uniform inside each published bucket, from 32 tokens up to the published
    maximum (GitHubCode 309K, GRCh38 624K; K = 1024). Tokens are a Markov chain, so a loss falls.

    \b
    Example:
      megatron-paradyse data synthesize --distribution githubcode --documents 1000 \\
          --scale 1/32 -o data/synthetic
    """
    from megatron_paradyse.data import synthesize as work

    metadata = work.synthesize(output_prefix, num_documents=documents, quiet=as_json, **options)
    _report(output_prefix, metadata, as_json)


def _source_kind(inputs: tuple[str, ...], asked: str) -> str:
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
            raise UserError(f"{path}: unknown kind of file: give --source tree, jsonl or fasta")
    if len(kinds) > 1:
        raise UserError(f"inputs of kinds {', '.join(sorted(kinds))}: prepare each kind alone")
    return kinds.pop()


def _check_used(kind: str, tokenizer: str, options: dict[str, Any]) -> None:
    """UserError for an option of another kind of source, or of another tokenizer."""
    for name, its in OF_SOURCE.items():
        if options[name] not in (None, ()) and kind != its:
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{flag} is of --source {its}, and this is {kind}: leave it out")
    if options["kmer"] is not None and tokenizer != "kmer":
        raise UserError(f"--kmer with --tokenizer {tokenizer}: leave it out, or --tokenizer kmer")


def _source(kind: str, inputs: tuple[str, ...], options: dict[str, Any]) -> Any:
    from megatron_paradyse.data import fasta, sources

    if kind == "tree":
        return sources.TreeSource(
            inputs,
            suffixes=options["suffix"] or sources.DEFAULT_SUFFIXES,
            exclude=(*sources.DEFAULT_EXCLUDES, *options["exclude"]),
        )
    if kind == "jsonl":
        key = options["key"]
        return sources.JsonlSource(inputs, key="text" if key is None else key)
    return fasta.FastaSource(inputs, split_bases=options["split_bases"])


def _tokenizer(name: str, options: dict[str, Any]) -> Any:
    from megatron_paradyse.data import tokenizers

    files = {
        "model": options["tokenizer_model"],
        "vocab_file": options["vocab_file"],
        "merge_file": options["merge_file"],
    }
    if name in MEGATRON_TOKENIZERS:
        from megatron_paradyse.data.megatron_tokenizers import MegatronTokenizer

        return MegatronTokenizer(name, **files)
    if any(files.values()):
        raise UserError(f"--tokenizer {name} reads no files: name the type with --tokenizer")
    if name == "bytes":
        return tokenizers.BytesTokenizer()
    kmer = options["kmer"]
    return tokenizers.KmerTokenizer() if kmer is None else tokenizers.KmerTokenizer(kmer)


def _report(prefix: str, metadata: DatasetMetadata, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"prefix": prefix, **dataclasses.asdict(metadata)}, indent=2))
        return
    empty = metadata.num_empty_documents
    left_out = f"; left out {empty:,} empty" if empty else ""
    click.echo(
        f"{prefix}.bin, .idx, .json: {counted(metadata.num_documents, 'document')}, "
        f"{metadata.num_tokens:,} tokens, longest {metadata.max_document_tokens:,}{left_out}"
    )
    click.echo(
        f"tokenizer {metadata.tokenizer}, vocabulary {metadata.vocab_size:,} ({metadata.dtype})"
    )
