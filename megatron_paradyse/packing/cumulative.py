"""Megatron's own packed sequences (--sft) as a row."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_paradyse.errors import UserError
from megatron_paradyse.packing.row import Range, Row


def row_of_cumulative(
    cumulative: Sequence[int], padded: Sequence[int], *, seq_length: int, p: int
) -> Row:
    """Documents one after the other over contiguous chunks of s rows.

    cumulative: sums of the documents' tokens, from 0 on; padded: where each begins, and where the
    last one's padding ends: the same sums where nothing is padded. Empty documents are left out.
    """
    lengths, pieces = [], []  # pieces: in the order of rows, ranges of positions or of padding
    padding, row, position = cumulative[-1] - cumulative[0], 0, 0
    for number, start in enumerate(padded[:-1]):
        length = cumulative[number + 1] - cumulative[number]
        if start < row or length < 0 or start + length > seq_length:
            raise UserError(
                f"packed sequences are ascending ranges of {seq_length} tokens, got cu_seqlens "
                f"{list(cumulative)[:9]} at {list(padded)[:9]}"
            )
        if row < start:
            pieces.append((padding, padding + start - row))
            padding += start - row
        if length:
            pieces.append((position, position + length))
            lengths.append(length)
        row, position = start + length, position + length
    if not lengths:
        raise UserError(
            f"packed sequences have a token at least, got cu_seqlens {list(cumulative)[:9]}: "
            "leave out microbatches of padding alone"
        )
    if row < seq_length:
        pieces.append((padding, padding + seq_length - row))
    return Row(tuple(lengths), tuple(_chunks(pieces, seq_length // p)))


def _chunks(pieces: list[Range], size: int):
    """The pieces cut into runs of `size` positions."""
    chunk: list[Range] = []
    room = size
    for start, stop in pieces:
        while start < stop:
            end = min(stop, start + room)
            chunk.append((start, end))
            room -= end - start
            start = end
            if not room:
                yield tuple(chunk)
                chunk, room = [], size
