"""Write Megatron's .bin and .idx, our .json and .targets: streaming, and all or nothing."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import warnings
from collections.abc import Iterator
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np

from megatron_paradyse.data import targets
from megatron_paradyse.data.metadata import MARKS, DatasetMetadata, strip_suffix
from megatron_paradyse.data.tokenizers import TokenArray
from megatron_paradyse.errors import UserError
from megatron_paradyse.whole_file import check_replaced, sync, temporary_path

MAX_DOCUMENT_TOKENS = np.iinfo(np.int32).max  # .idx keeps lengths as int32
SUFFIXES = (targets.SUFFIX, ".bin", ".idx", ".json")


def smallest_dtype(vocab_size: int) -> type[np.number[Any]]:
    """The smallest dtype of Megatron's that holds ids below vocab_size: uint8, uint16 or int32."""
    if vocab_size <= 1 << 8:
        return np.uint8
    return np.uint16 if vocab_size <= 1 << 16 else np.int32


class WriteError(UserError):
    """A data set cannot be written, whatever the input that was met first."""


class DatasetWriter:
    """Writes a data set under temporary names; commit() gives it its names, leaving removes it.

    Tokens go to the disk as they come: a document of any length costs no memory beyond the array
    it is given in. Each document costs about 110 bytes until commit(), for its entry in the index.

    .json is renamed last and removed first, so that a .json stands only beside the .bin and .idx
    that it describes, and .targets first and last, so that no .bin lacks its own, whenever the
    process is killed.
    """

    def __init__(
        self, prefix: str, vocab_size: int, *, learns_all: bool = True, overwrite: bool = False
    ) -> None:
        """learns_all: every token is learnt, and no .targets is written."""
        self.prefix = os.fspath(prefix)
        self.num_target_tokens = None if learns_all else 0
        self.dtype = smallest_dtype(vocab_size)
        self.num_documents = 0
        self.num_tokens = 0
        self.max_document_tokens = 0
        self.document_tokens = 0  # of the document that is being written
        self._committed = False
        self._check_target(overwrite)

    def _check_target(self, overwrite: bool) -> None:
        folder, name = os.path.split(self.prefix)
        bare = strip_suffix(self.prefix)
        if bare != self.prefix:
            raise UserError(f"{self.prefix} is no PREFIX: .bin and .idx are added: give {bare}")
        if not name:
            raise UserError(
                f"{self.prefix or repr(self.prefix)} is a folder: give PREFIX as folder/name"
            )
        existing = [self.prefix + s for s in SUFFIXES if os.path.lexists(self.prefix + s)]
        if existing and not overwrite:
            raise UserError(f"{existing[0]} exists: choose another prefix, or give --overwrite")
        if self.prefix + ".json" in existing:  # such as a tokenizer's own
            with self._naming_the_prefix():
                check_replaced(self.prefix + ".json", "the metadata of a data set", MARKS)
        if os.path.exists(folder) and not os.path.isdir(folder):
            raise UserError(f"{folder} is not a folder: choose another prefix than {self.prefix}")
        with self._naming_the_prefix():
            os.makedirs(folder or ".", exist_ok=True)
        temporary = temporary_path(self.prefix)
        written = SUFFIXES[1:] if self.num_target_tokens is None else SUFFIXES
        self._temporary = {suffix: temporary + suffix for suffix in written}

    def __enter__(self) -> Self:
        return self

    @functools.cached_property
    def _builder(self) -> Any:
        """Made with the first tokens, so that input without any is refused before torch loads."""
        builder = _import_builder()
        with self._naming_the_prefix():
            return builder(self._temporary[".bin"], dtype=self.dtype)

    @functools.cached_property
    def _targets(self) -> BinaryIO:
        with self._naming_the_prefix():
            return open(self._temporary[targets.SUFFIX], "xb")  # closed by commit() or on leaving

    @contextlib.contextmanager
    def _naming_the_prefix(self) -> Iterator[None]:
        """An error tells the name that was given, not a temporary one, and as WriteError."""
        try:
            yield
        except OSError as error:
            raise WriteError(
                f"{self.prefix}.bin cannot be written: {error.strerror or error}: choose another "
                "place, or make room there"
            ) from error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._committed:
            made = vars(self)
            opened = [made["_targets"]] if "_targets" in made else []
            opened += [self._builder.data_file] if "_builder" in made else []
            try:
                for stream in opened:
                    # A full disk fails again when the last buffer is flushed.
                    with contextlib.suppress(OSError):
                        stream.close()
            finally:
                self._remove_temporary()

    def add_tokens(self, tokens: TokenArray, learnt: TokenArray | None = None) -> None:
        """Append tokens to the document that is being written; learnt: which are, None: all."""
        self.document_tokens += len(tokens)
        if self.document_tokens > MAX_DOCUMENT_TOKENS:
            raise UserError(
                f"a document of more than {MAX_DOCUMENT_TOKENS} tokens, which Megatron's index "
                "cannot hold: split it (FASTA: --split-bases)"
            )
        # Not builder.add_item: that needs the whole document, as a tensor, and copies it twice.
        stream = self._builder.data_file
        with self._naming_the_prefix():
            stream.write(np.ascontiguousarray(tokens, dtype=self.dtype).data)
            if self.num_target_tokens is not None:
                self._add_targets(np.ones(len(tokens), bool) if learnt is None else learnt)

    def _add_targets(self, learnt: TokenArray) -> None:
        assert self.num_target_tokens is not None
        self._targets.write(learnt.astype(np.uint8).data)
        self.num_target_tokens += int(np.count_nonzero(learnt))

    def end_document(self) -> None:
        """Close the document; an empty one leaves no trace."""
        tokens, self.document_tokens = self.document_tokens, 0
        if tokens:
            self._builder.sequence_lengths.append(tokens)
            self._builder.end_document()
            self.num_documents += 1
            self.num_tokens += tokens
            self.max_document_tokens = max(self.max_document_tokens, tokens)

    def commit(self, **description: Any) -> DatasetMetadata:
        """Write .idx and .json and give all three files their names; returns what .json says.

        description: the fields of DatasetMetadata that the writer cannot know.
        """
        metadata = DatasetMetadata(
            dtype=np.dtype(self.dtype).name,
            num_documents=self.num_documents,
            num_tokens=self.num_tokens,
            max_document_tokens=self.max_document_tokens,
            num_target_tokens=self.num_target_tokens,
            **description,
        )
        with self._naming_the_prefix():
            self._finish(metadata)
        # The names must survive a crash; some file systems cannot sync a folder.
        with contextlib.suppress(OSError):
            sync(os.path.dirname(self.prefix) or ".")
        return metadata

    def _finish(self, metadata: DatasetMetadata) -> None:
        self._builder.finalize(self._temporary[".idx"])
        if self.num_target_tokens is not None:
            self._targets.close()
        with open(self._temporary[".json"], "w", encoding="utf-8") as stream:
            stream.write(metadata.to_json())
        for path in self._temporary.values():
            sync(path)
        self._remove_named()
        try:
            for suffix, path in self._temporary.items():
                os.replace(path, self.prefix + suffix)
        except BaseException:
            self._remove_named()
            raise
        self._committed = True

    def _remove_named(self) -> None:
        for suffix in reversed(SUFFIXES):
            if os.path.lexists(self.prefix + suffix):
                os.unlink(self.prefix + suffix)

    def _remove_temporary(self) -> None:
        for path in self._temporary.values():
            if os.path.lexists(path):
                os.unlink(path)


def _import_builder() -> Any:
    """Megatron's builder, imported late (torch, seconds) and without the chatter of its import."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    return IndexedDatasetBuilder
