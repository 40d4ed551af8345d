"""Documents in, Megatron's .bin and .idx out: `data prepare` as a function."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from megatron_paradyse.data.metadata import DatasetMetadata
from megatron_paradyse.data.progress import Progress
from megatron_paradyse.data.sources import Chunk, Marked, Source, SourceError
from megatron_paradyse.data.tokenizers import Tokenizer
from megatron_paradyse.data.writer import DatasetWriter, WriteError
from megatron_paradyse.errors import UserError


def prepare(
    source: Source,
    tokenizer: Tokenizer,
    prefix: str,
    *,
    append_eod: bool = True,
    strict: bool = False,
    max_documents: int | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> DatasetMetadata:
    """Tokenize the documents of source into PREFIX.bin, .idx and .json; each is one sequence.

    Where not every token is learnt, PREFIX.targets says which. Documents without tokens, or without
    one that is learnt, are counted and left out; with strict they are an error. Nothing is left
    behind when it fails. Memory: a chunk (1 MiB) and its tokens for tokenizers that stream,
    the longest document for the others, and about 110 bytes per document.

    Raises UserError for bad input, with its place, and for a disk that is full; and OSError.
    """
    if append_eod and tokenizer.eod is None:
        raise UserError(f"{tokenizer.name} has no end-of-document token: give --no-append-eod")
    if max_documents is not None and max_documents < 1:
        raise UserError(f"at least 1 document is needed, got --max-documents {max_documents}")
    empty_documents = 0
    with (
        DatasetWriter(
            prefix, tokenizer.vocab_size, learns_all=source.learns_all, overwrite=overwrite
        ) as writer,
        Progress("preparing", source.total_bytes, quiet=quiet) as progress,
    ):
        chunks = _watched(source, writer, progress)
        end = tokenizer.eod if append_eod else None
        for place, is_written in _write_documents(writer, source, tokenizer, chunks, end):
            if strict and not is_written:
                what = "an empty document" if source.learns_all else "nothing to learn"
                raise UserError(f"{place}: {what}: remove it, or leave --strict away")
            empty_documents += not is_written
            if writer.num_documents == max_documents:
                break
        if writer.num_documents == 0:
            what, remedy = "a token", "check the input"
            if not source.learns_all:
                what, remedy = "a token to learn", source.learns
            raise UserError(
                f"the {source.kind} source holds no document with {what} ({empty_documents} empty):"
                f" {remedy}"
            )
        return writer.commit(
            tokenizer=tokenizer.name,
            tokenizer_parameters=tokenizer.parameters(),
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
            append_eod=append_eod,
            num_empty_documents=empty_documents,
            source=source.kind,
            source_parameters=source.parameters(),
        )


def _watched(source: Source, writer: DatasetWriter, progress: Progress) -> Iterator[Chunk]:
    for chunk in source.chunks():
        tokens = writer.num_tokens + writer.document_tokens
        progress.update(source.read_bytes, writer.num_documents, tokens)
        yield chunk


def _write_documents(
    writer: DatasetWriter,
    source: Source,
    tokenizer: Tokenizer,
    chunks: Iterator[Chunk],
    end: int | None,
) -> Iterator[tuple[str, bool]]:
    """The place of each document, and whether it was written: see _write_document."""
    for _, document in itertools.groupby(chunks, key=lambda chunk: chunk.document):
        first = next(document)
        parts = (chunk.data for chunk in itertools.chain([first], document))
        try:
            for tokens in source.documents(tokenizer, parts):
                yield first.place, _write_document(writer, tokens, end)
        except (SourceError, WriteError):
            raise
        except UserError as error:
            # A tokenizer or the writer knows the text but not where it came from.
            raise UserError(f"{first.place}: {error}") from error


def _write_document(writer: DatasetWriter, tokens: Iterable[Marked], end: int | None) -> bool:
    """Write one document and the id that ends it; False when it has none to learn: no trace."""
    is_empty = True
    for part in tokens:
        if len(part.tokens) and (part.learnt is None or part.learnt.any()):
            writer.add_tokens(*part)
            is_empty = False
    if end is not None and not is_empty:
        writer.add_tokens(np.array([end]))
    writer.end_document()
    return not is_empty
