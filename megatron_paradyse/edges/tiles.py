"""Tiles of a sequence that is shared over the ranks of a group: how large, and which rows.

s sequence, b batch, h hidden, v vocabulary, p ranks. A tile is the same t positions of every rank's
chunk, p t b rows in all: what a rank gathers of a tile and what it scatters are then whole rows of
its own chunk, and no rank ever waits for its turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

AUTO, OFF = "auto", "off"  # instead of the tokens of a tile
TILE_BYTES = 256 * 2**20
LEAST_TOKENS = 1024


def automatic_tile(*, h: int, vocab_shard: int, element_bytes: int) -> int:
    """Tokens (rows of logits) of a tile whose buffers take about 256 MiB, at least 1,024.

    A row has v/p logits in the model's dtype and, for a half type, again in float32, and four times
    h: gathered, being gathered, its gradient, the gradient being scattered. Below about a thousand
    rows the tiles' matrix products no longer cover adding each tile's share to the gradient of the
    weight, which costs the same whatever the tile.
    """
    row = RowBytes.of(h=h, vocab_shard=vocab_shard, element_bytes=element_bytes)
    return max(LEAST_TOKENS, TILE_BYTES // (row.logits + 4 * row.hidden))


@dataclass(frozen=True)
class RowBytes:
    """What a tile of the loss head holds of a row: logits, their gradient, and h values.

    logits: in the model's dtype and, for a half type, in float32 too.
    """

    logits: int
    gradient: int
    hidden: int

    @classmethod
    def of(cls, *, h: int, vocab_shard: int, element_bytes: int) -> RowBytes:
        narrow, wide = vocab_shard * element_bytes, vocab_shard * 4
        logits = narrow + wide if element_bytes < 4 else narrow
        return cls(logits, narrow, h * element_bytes)


def tiles(num_rows: int, batch_size: int, p: int, *, tile: int) -> Iterator[slice]:
    """Slices of the s/p rows of a rank's chunk, so that p t b <= tile wherever t > 1."""
    step = max(1, tile // (p * batch_size))
    return (slice(i, min(i + step, num_rows)) for i in range(0, num_rows, step))


def counted_tiles(
    counted: np.ndarray, p: int, *, tile: int, row: RowBytes
) -> Iterator[tuple[slice, np.ndarray]]:
    """Slices of the s/p rows of a rank's chunk, and which of their p t b rows [p t, b] count.

    counted: bool [b, s]. A slice that holds fewer counted rows than others is longer, as far as no
    more is held at any time than with tiles of which every row counts. Slices of no counted row
    are left out. What fits into one tile is one.
    """
    by_row = counted.reshape(len(counted), p, -1)  # [b, p, s/p]
    num_counted = np.concatenate([[0], np.cumsum(by_row.sum((0, 1)))])  # before each row
    num_rows = len(counted) * p * np.arange(len(num_counted))  # of tiles, before each of the chunk
    budget = _Budget(tile, p, row)
    rows, first = np.flatnonzero(np.diff(num_counted)), 0
    while first < len(rows):
        start = int(rows[first])
        stop = min(
            int(np.searchsorted(held, held[start] + most, side="right"))
            for held, most in budget.limits(num_counted, num_rows)
        )
        fits = counted.size <= tile
        first = len(rows) if fits else max(first + 1, int(np.searchsorted(rows, stop - 1)))
        stop = int(rows[first - 1]) + 1
        chosen = by_row[:, :, start:stop].transpose(1, 2, 0).reshape(-1).nonzero()[0]
        yield slice(start, stop), chosen
        budget.take(len(chosen), int(num_rows[stop] - num_rows[start]))


class _Budget:
    """Bytes for a tile of which some rows count, beside those for tiles of which all do.

    A tile takes the rows that count out of those gathered, then makes their logits, with the
    gradient of the tile before under way, and the rows of the next; then the gradient of its own
    rows, which is sent while that of the weight is made. With a half type that needs most, and the
    product that it adds is as large for any tile: so there the tile itself may need no more.
    """

    def __init__(self, tile: int, p: int, row: RowBytes):
        self._row = row
        self._gathered = row.hidden if p > 1 else 0  # p = 1: as they lie
        self._sent = row.hidden + (row.hidden // p if p > 1 else 0)  # and received
        beside = 2 * self._gathered + self._sent
        self._of_logits = tile * (row.logits + beside)
        self._of_product = tile * (row.gradient + beside)
        self._of_next = tile * self._gathered  # which the next one has in any case
        self._left, self._sending = self._of_logits, 0

    def limits(self, counted: np.ndarray, rows: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
        """(bytes of so many rows that count and rows in all, the most of them) at each time."""
        row, logits, product = self._row, self._of_logits, self._of_product
        yield row.hidden * counted + self._gathered * rows, logits - self._sending
        yield (row.logits + row.hidden) * counted, logits - self._sending - self._of_next
        yield (row.gradient + 2 * row.hidden) * counted + row.hidden * rows, logits - self._of_next
        yield (row.gradient + row.hidden) * counted + self._sent * rows, product - self._of_next
        yield self._gathered * rows, self._left

    def take(self, counted: int, rows: int) -> None:
        """A tile of so many rows, of which so many count."""
        numbers = np.array(counted), np.array(rows)
        _, *beside_next, _ = self.limits(*numbers)
        self._left = self._of_next + min(most - int(held) for held, most in beside_next)
        self._sending = self._sent * rows


def of_tile(by_token: Tensor, rows: slice, p: int) -> Tensor:
    """[b, s] -> [p t, b]: a tile of it, in the order in which gathered rows lie."""
    return by_token.unflatten(1, (p, -1))[:, :, rows].permute(1, 2, 0).flatten(0, 1)


def put_tile(by_token: Tensor, rows: slice, p: int, values: Tensor) -> None:
    """Write values [p t, b] to where of_tile reads them in [b, s]."""
    by_token.unflatten(1, (p, -1))[:, :, rows] = values.unflatten(0, (p, -1)).permute(2, 0, 1)
