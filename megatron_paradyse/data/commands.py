"""`megatron-paradyse data`: options and what they print; the work is imported when it is done."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Any

import click

from megatron_paradyse import gpu_packages
from megatron_paradyse.option_types import COUNT, RATIO, json_option
from megatron_paradyse.units import counted, printable

if TYPE_CHECKING:
    from megatron_paradyse.data.metadata import DatasetMetadata

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
    gpu_packages.hide_all()


@data.command(short_help="Turn source files, JSONL or FASTA into a data set.")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@output_prefix
@click.option(
    "--source",
    type=click.Choice(["auto", "tree", "jsonl", "fasta", "chat"]),
    default="auto",
    show_default=True,
    help="What INPUT is; auto: a folder is a tree, files by their suffix. chat: conversations, in "
    "JSONL.",
)
@click.option(
    "--tokenizer",
    "--tokenizer-type",
    type=click.Choice(["bytes", "kmer", *MEGATRON_TOKENIZERS, "SFTTokenizer"]),
    help="Default: kmer for FASTA, HuggingFaceTokenizer for chat, else bytes.",
)
@click.option("--kmer", type=int, metavar="K", help="kmer: bases.  [default: 3]")
@click.option("--tokenizer-model", metavar="PATH", help="File or folder of a Megatron tokenizer.")
@click.option("--vocab-file", metavar="PATH", help="GPT2BPETokenizer: vocab.json.")
@click.option("--merge-file", metavar="PATH", help="GPT2BPETokenizer: merges.txt.")
@click.option("--suffix", multiple=True, metavar=".EXT", help="tree: files to take [.py].")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="tree: also leave these out.")
@click.option("--key", help="jsonl: where the text is; chat: messages.  [default: text, messages]")
@click.option(
    "--prompt-key",
    metavar="KEY",
    help="jsonl: where a prompt is that is not learnt; --key: what follows.  [default: completion]",
)
@click.option(
    "--learn",
    type=click.Choice(["assistant", "each", "last", "all"]),
    help="chat: the assistant's turns; each of them as it is when it is the last, in several "
    "documents if need be; the last; or all that is written.  [default: assistant]",
)
@click.option("--chat-template", metavar="FILE", help="chat: in place of the tokenizer's own.")
@click.option(
    "--sft-tokenizer-prompt-format",
    metavar="FORMAT",
    help="SFTTokenizer: as for Megatron's --sft.  [default: nemotron-h-aligned]",
)
@click.option("--split-bases", type=COUNT, metavar="N", help="fasta: N bases a document.")
@click.option(
    "--append-eod/--no-append-eod",
    default=None,
    help="End each document with the end-of-document token.  [default: yes; chat: no]",
)
@click.option("--strict", is_flag=True, help="An empty document is an error, not left out.")
@click.option("--max-documents", type=COUNT, metavar="N", help="Stop after N documents.")
@overwrite_option
@json_option
def prepare(inputs: tuple[str, ...], output_prefix: str, as_json: bool, **options: Any) -> None:
    """Turn source files, JSONL or FASTA (.gz too) into a data set; one document, one sequence.

    A tree leaves out symbolic links, site-packages, __pycache__, .git and the like. K = 1024. Of
    prompts and conversations PREFIX.targets says which tokens are learnt.

    \b
    Examples:
      megatron-paradyse data prepare my_project/ -o data/code
      megatron-paradyse data prepare chats.jsonl --source chat -o data/chats \\
          --tokenizer-model my_tokenizer/
      megatron-paradyse data prepare questions.jsonl --prompt-key question --key answer -o data/qa
      megatron-paradyse data prepare docs.jsonl.gz --key body -o data/docs \\
          --tokenizer GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt
      megatron-paradyse data prepare GRCh38.fa.gz --split-bases 1M -o data/grch38
    """
    from megatron_paradyse.data import prepare as work
    from megatron_paradyse.data import prepare_inputs as prepared

    prepared.check_kept(inputs, options, output_prefix)
    kind = prepared.kind_of(inputs, options["source"])
    tokenizer = prepared.tokenizer_name(kind, options)
    source = prepared.make_source(kind, inputs, options)
    if kind == "tree":
        prepared.check_tree_kept(source, output_prefix)
    append_eod = options["append_eod"]
    metadata = work.prepare(
        source,
        prepared.make_tokenizer(kind, tokenizer, options),
        output_prefix,
        append_eod=kind != "chat" if append_eod is None else append_eod,
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
    from megatron_paradyse.data.metadata import is_synthetic
    from megatron_paradyse.whole_file import check_figure

    if plot is not None:
        check_figure(plot)
    index = read_index(prefix)
    summary = work.summarize(index, scale)
    if plot is not None:
        from megatron_paradyse.data.lengths_plot import plot_lengths

        source = "synthetic data" if is_synthetic(index.prefix) else "measured"
        label = printable(os.path.basename(index.prefix))
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


def _report(prefix: str, metadata: DatasetMetadata, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"prefix": prefix, **dataclasses.asdict(metadata)}, indent=2))
        return
    empty = metadata.num_empty_documents
    suffixes = ".bin, .idx, .json"
    if metadata.num_target_tokens is not None:
        suffixes = ".bin, .idx, .targets, .json"
    left_out = f"; left out {empty:,} empty" if empty else ""
    click.echo(
        f"{prefix}{suffixes}: {counted(metadata.num_documents, 'document')}, "
        f"{counted(metadata.num_tokens, 'token')}, "
        f"longest {metadata.max_document_tokens:,}{left_out}"
    )
    if metadata.num_target_tokens is not None:
        share = metadata.num_target_tokens / metadata.num_tokens
        click.echo(f"{metadata.num_target_tokens:,} tokens are learnt, {share:.1%}")
    click.echo(
        f"tokenizer {metadata.tokenizer}, vocabulary {metadata.vocab_size:,} ({metadata.dtype})"
    )
