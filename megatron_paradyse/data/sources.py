"""Documents as a stream of chunks: from a tree of files, or from JSONL. FASTA is in fasta.py, and
texts of which a part is learnt are in supervised.py.

A source never holds more than one chunk of a file (JSONL: one line). Chunks that follow each other
and carry the same document number are one document; an empty document is one empty chunk.
"""

from __future__ import annotations

import codecs
import fnmatch
import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np

from megatron_paradyse.data.tokenizers import TokenArray, Tokenizer
from megatron_paradyse.errors import UserError
from megatron_paradyse.whole_file import is_temporary

CHUNK_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 28  # of one JSONL record; longer is taken for a file that is no JSONL
DEFAULT_SUFFIXES = (".py",)
DEFAULT_EXCLUDES = ("site-packages", "__pycache__", ".git", ".hg", ".svn", ".venv", "node_modules")


class SourceError(UserError):
    """A UserError of a source, whose message already says where in the input."""


class Chunk(NamedTuple):
    """A part of a document."""

    document: int  # number of the document in the source
    place: str  # where the document is, for messages: file or file:line
    data: Any  # bytes of a text; what is learnt in part comes whole, in the form of its source


class Marked(NamedTuple):
    """Ids of some tokens, and which of them are learnt; None: all of them."""

    tokens: TokenArray
    learnt: np.ndarray[Any, np.dtype[np.bool]] | None


class Source(Protocol):
    """Where documents come from."""

    kind: str
    learns_all: bool  # whether every token is learnt
    learns: str  # else what is, for messages
    total_bytes: int  # on the disk, compressed as it is
    read_bytes: int  # of total_bytes, so far

    def chunks(self) -> Iterator[Chunk]: ...

    def documents(self, tokenizer: Any, parts: Iterable[Any]) -> Iterator[Iterable[Marked]]:
        """The tokens of a document from the data of its chunks, in parts; or of several."""
        ...

    def parameters(self) -> dict[str, Any]:
        """How the documents were taken from the files; JSON values only, no paths."""
        ...


class TextSource:
    """Documents that are bytes of text, every token of which is learnt."""

    learns_all = True
    learns = "all is learnt"

    def documents(self, tokenizer: Tokenizer, parts: Iterable[bytes]) -> Iterator[Iterable[Marked]]:
        yield (Marked(tokens, None) for tokens in tokenizer.stream(parts))


class FileReader:
    """Opens files one after another, through gzip for .gz, and counts the bytes read."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = [os.fspath(path) for path in paths]
        self.total_bytes = sum(_regular_file_size(path) for path in self.paths)
        self.read_bytes = 0
        self._finished_bytes = 0
        self._raw: BinaryIO | None = None

    @contextmanager
    def open(self, path: str) -> Iterator[BinaryIO]:
        """The bytes of a file; damaged gzip data becomes a SourceError that names the file."""
        with open(path, "rb") as raw:
            self._raw = raw
            try:
                if path.lower().endswith(".gz"):
                    with gzip.open(raw) as stream:
                        yield stream  # type: ignore[misc]
                else:
                    yield raw
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise SourceError(
                    f"{path}: damaged gzip data ({error}): check it with gzip -t"
                ) from error
            self._finished_bytes += raw.tell()
            self.read_bytes = self._finished_bytes

    def note_progress(self) -> None:
        assert self._raw is not None
        self.read_bytes = self._finished_bytes + self._raw.tell()


def _regular_file_size(path: str) -> int:
    if os.path.isdir(path):
        raise SourceError(f"{path} is a folder: name its files, or use --source tree")
    if not os.path.isfile(path):
        raise SourceError(f"{path} does not exist or is no regular file: check the path")
    return os.path.getsize(path)


class TreeSource(TextSource):
    """Every file with one of the suffixes below the roots, in sorted order; one file, one document.

    A root may be a file. Files and folders whose name or relative path matches a pattern of
    `exclude` are left out, as is what we write or left unfinished; symbolic links are never
    followed.
    """

    kind = "tree"

    def __init__(
        self,
        roots: Sequence[str],
        *,
        suffixes: Sequence[str] = DEFAULT_SUFFIXES,
        exclude: Sequence[str] = DEFAULT_EXCLUDES,
    ) -> None:
        self.roots = [os.fspath(root) for root in roots]
        self.suffixes = tuple(suffixes)
        self.exclude = tuple(exclude)
        for root in self.roots:
            if not os.path.exists(root):
                raise SourceError(f"{root} does not exist: check the path")
        self.total_bytes = sum(size for _, size in self._files())
        self.read_bytes = 0

    def chunks(self) -> Iterator[Chunk]:
        found = False
        for document, (path, _) in enumerate(self._files()):
            found = True
            with open(path, "rb") as stream:
                data = stream.read(CHUNK_BYTES)
                yield Chunk(document, path, data)
                while data:
                    self.read_bytes += len(data)
                    data = stream.read(CHUNK_BYTES)
                    if data:
                        yield Chunk(document, path, data)
        if not found:
            raise SourceError(
                f"{', '.join(self.roots)}: no file ends in {' or '.join(self.suffixes)}: "
                "choose with --suffix, or leave out less with --exclude"
            )

    def paths(self) -> Iterator[str]:
        return (path for path, _ in self._files())

    def parameters(self) -> dict[str, Any]:
        return {"suffixes": list(self.suffixes), "exclude": list(self.exclude)}

    def _files(self) -> Iterator[tuple[str, int]]:
        for root in self.roots:
            if os.path.isdir(root):
                yield from self._walk(root, "")
            else:
                yield root, _regular_file_size(root)

    def _walk(self, folder: str, relative: str) -> Iterator[tuple[str, int]]:
        with os.scandir(folder) as entries:
            ordered = sorted(entries, key=lambda entry: os.fsencode(entry.name))
        for entry in ordered:
            name = f"{relative}{entry.name}"
            if self._is_excluded(entry.name, name):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from self._walk(entry.path, f"{name}/")
            elif entry.is_file(follow_symlinks=False) and entry.name.endswith(self.suffixes):
                yield entry.path, entry.stat(follow_symlinks=False).st_size

    def _is_excluded(self, name: str, relative: str) -> bool:
        return is_temporary(name) or any(
            fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(relative, pattern)
            for pattern in self.exclude
        )


KINDS = {  # of JSON values, by what Python makes of them
    dict: "an object",
    list: "a list",
    str: "a text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


class JsonlReader:
    """One JSON object per line, of which one key is read; blank lines are passed over."""

    def __init__(
        self, paths: Sequence[str], *, key: str, max_line_bytes: int = MAX_LINE_BYTES
    ) -> None:
        self.key = key
        self.max_line_bytes = max_line_bytes
        self._reader = FileReader(paths)
        self.total_bytes = self._reader.total_bytes

    @property
    def read_bytes(self) -> int:
        return self._reader.read_bytes

    def records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The place of each object, file:line, and the object."""
        for path in self._reader.paths:
            with self._reader.open(path) as stream:
                for number, line in enumerate(self._lines(path, stream), start=1):
                    if line.removeprefix(codecs.BOM_UTF8).strip():  # some editors begin with one
                        place = f"{path}:{number}"
                        yield place, self._record(line, place)
                        self._reader.note_progress()

    @property
    def example(self) -> dict[str, Any]:
        """What an object looks like, for messages."""
        return {self.key: "..."}

    @property
    def _one_a_line(self) -> str:
        return f"write one object a line, such as {json.dumps(self.example)}"

    def _lines(self, path: str, stream: BinaryIO) -> Iterable[bytes]:
        number = 0
        while line := stream.readline(self.max_line_bytes + 1):
            number += 1
            if len(line) > self.max_line_bytes:
                raise SourceError(
                    f"{path}:{number}: a line longer than {self.max_line_bytes >> 20} MiB: "
                    "JSONL has one record per line"
                )
            yield line

    def _record(self, line: bytes, place: str) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", None) or str(error)
            raise SourceError(
                f"{place}: not a JSON object on one line ({reason}): {self._one_a_line}"
            ) from error
        if not isinstance(record, dict):
            what = KINDS[type(record)]
            raise SourceError(f"{place}: {what} where an object is needed: {self._one_a_line}")
        return record


def value_of(record: dict[str, Any], key: str, place: str, *, flag: str = "--key") -> Any:
    """record[key]; SourceError that names the flag where it is missing."""
    if key not in record:
        keys = ", ".join(list(record)[:8])[:200] or "none"
        raise SourceError(f"{place}: no key {key!r} (keys: {keys}): name it with {flag}")
    return record[key]


def text_of(record: dict[str, Any], key: str, place: str, *, flag: str = "--key") -> bytes:
    """The text under a key in UTF-8; SourceError where there is none."""
    text = value_of(record, key, place, flag=flag)
    if isinstance(text, list):
        raise SourceError(
            f"{place}: {key!r} holds a list where text is needed: give --source chat for "
            f"conversations, or name the key of the text with {flag}"
        )
    if not isinstance(text, str):
        raise SourceError(
            f"{place}: {key!r} holds {KINDS[type(text)]} where text is needed: name the "
            f"key of the text with {flag}, or leave such lines out"
        )
    # JSON may escape half of a surrogate pair: kept as bytes, never a reason to stop.
    return text.encode("utf-8", errors="surrogatepass")


class JsonlSource(JsonlReader, TextSource):
    """The text under `key` of each object."""

    kind = "jsonl"

    def __init__(
        self, paths: Sequence[str], *, key: str = "text", max_line_bytes: int = MAX_LINE_BYTES
    ) -> None:
        super().__init__(paths, key=key, max_line_bytes=max_line_bytes)

    def chunks(self) -> Iterator[Chunk]:
        for document, (place, record) in enumerate(self.records()):
            yield Chunk(document, place, text_of(record, self.key, place))

    def parameters(self) -> dict[str, Any]:
        return {"key": self.key}
