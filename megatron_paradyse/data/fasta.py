"""DNA from FASTA files, in blocks: memory does not grow with the length of a record or a line."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from megatron_paradyse.data.sources import (
    CHUNK_BYTES,
    Chunk,
    FileReader,
    SourceError,
    TextSource,
)
from megatron_paradyse.data.tokenizers import IUPAC_AMBIGUOUS, WHITESPACE, foreign_letter
from megatron_paradyse.errors import UserError

MAX_HEADER_BYTES = 1 << 16


class FastaSource(TextSource):
    """Each record is one document; with split_bases = n, each n bases of a record are.

    A record is a line that starts with `>` and the lines of sequence after it. Letters other than
    A, C, G, T, U and the ambiguous IUPAC ones, in either case, raise UserError with their line.
    """

    kind = "fasta"

    def __init__(
        self,
        paths: Sequence[str],
        *,
        split_bases: int | None = None,
        block_bytes: int = CHUNK_BYTES,
    ) -> None:
        if split_bases is not None and split_bases < 1:
            raise UserError(f"documents need at least 1 base, got --split-bases {split_bases}")
        self.split_bases = split_bases
        self._block_bytes = block_bytes
        self._reader = FileReader(paths)
        self.total_bytes = self._reader.total_bytes

    @property
    def read_bytes(self) -> int:
        return self._reader.read_bytes

    def parameters(self) -> dict[str, Any]:
        return {"split_bases": self.split_bases}

    def chunks(self) -> Iterator[Chunk]:
        pieces = self._records()
        return pieces if self.split_bases is None else self._split(pieces)

    def _records(self) -> Iterator[Chunk]:
        """Chunks of bases; each record starts with an empty chunk at its header's place."""
        document = -1
        for path in self._reader.paths:
            place = ""
            with self._reader.open(path) as stream:
                for line_number, is_header, data in _lines_in_blocks(stream, self._block_bytes):
                    self._reader.note_progress()
                    if is_header:
                        _check_header(data, f"{path}:{line_number}")
                        document += 1
                        place = f"{path}:{line_number}"
                        yield Chunk(document, place, b"")
                        continue
                    bases = data.translate(None, WHITESPACE)
                    if bases and not place:
                        blank_lines = data[: len(data) - len(data.lstrip())].count(b"\n")
                        raise SourceError(
                            f"{path}:{line_number + blank_lines}: sequence before the first "
                            "line that starts with '>': this is no FASTA file"
                        )
                    if foreign_letter(bases) is not None:
                        raise _foreign_letter_error(path, line_number, data)
                    if bases:
                        yield Chunk(document, place, bases)

    def _split(self, pieces: Iterator[Chunk]) -> Iterator[Chunk]:
        """Cut records into documents of split_bases bases; the last of a record may be shorter."""
        assert self.split_bases is not None
        document, record, room = -1, None, 0
        for piece in pieces:
            data = memoryview(piece.data)
            if piece.document != record:
                record, room = piece.document, self.split_bases
                document += 1
                yield Chunk(document, piece.place, b"")
            while len(data):
                if room == 0:
                    document, room = document + 1, self.split_bases
                yield Chunk(document, piece.place, bytes(data[:room]))
                taken = min(room, len(data))
                data, room = data[taken:], room - taken


def _lines_in_blocks(stream: BinaryIO, block_bytes: int) -> Iterator[tuple[int, bool, bytes]]:
    """Cut a file into (line number, is a header, bytes) without ever holding more than a block.

    Headers come whole (up to MAX_HEADER_BYTES and a block, longer ones cut short there); sequence
    comes as blocks that may hold many lines or part of one. The line number is that of the first
    byte.
    """
    line, at_line_start = 1, True
    first = stream.read(len(codecs.BOM_UTF8)).removeprefix(codecs.BOM_UTF8)  # of some editors
    header: bytes | None = None  # of a header line that is not over yet
    for block in itertools.chain((first,), iter(lambda: stream.read(block_bytes), b"")):
        position = 0
        while position < len(block):
            if header is None and at_line_start and block[position] == ord(">"):
                header = b""
            if header is not None:
                end = block.find(b"\n", position)
                stop = len(block) if end < 0 else end + 1
                if len(header) <= MAX_HEADER_BYTES:
                    header += block[position:stop]
                position = stop
                if end >= 0:
                    yield line, True, header
                    header, at_line_start, line = None, True, line + 1
                continue
            next_header = block.find(b"\n>", position)
            stop = len(block) if next_header < 0 else next_header + 1
            data = block[position:stop]
            yield line, False, data
            line += data.count(b"\n")
            at_line_start = data.endswith(b"\n")
            position = stop
    if header is not None:
        yield line, True, header


def _check_header(header: bytes, place: str) -> None:
    if len(header) > MAX_HEADER_BYTES:
        raise SourceError(
            f"{place}: a header longer than {MAX_HEADER_BYTES >> 10} KiB: this is no FASTA file"
        )
    if b"\r" in header.rstrip(b"\r\n"):
        raise SourceError(
            f"{place}: lines that end in a carriage return alone, so that bases are taken for a "
            "header: convert them with tr '\\r' '\\n'"
        )


def _foreign_letter_error(path: str, line: int, data: bytes) -> SourceError:
    """The error for the first foreign letter of a block that starts on the given line."""
    for offset, text in enumerate(data.split(b"\n")):
        letter = foreign_letter(text)
        if letter is not None:
            return SourceError(
                f"{path}:{line + offset}: the letter {letter} is no nucleotide: FASTA may hold "
                f"A, C, G, T, U and the IUPAC letters {IUPAC_AMBIGUOUS.decode()}"
            )
    raise AssertionError("called without a foreign letter")
