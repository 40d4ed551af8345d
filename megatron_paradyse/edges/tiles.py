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
    return max(LEAST_TOKENS, TILE_BYTES // (row.logits + row.gathered))


@dataclass(frozen=True)
class RowBytes:
    """What a tile of the loss head holds of a row: its logits, its input and their gradients."""

    logits: int
    gathered: int
    selected: int  # its input and that input's gradient once more, where only some rows count

    @classmethod
    def of(cls, *, h: int, vocab_shard: int, element_bytes: int) -> RowBytes:
        wide = 4 if element_bytes < 4 else 0
        own = h * element_bytes
        return cls(vocab_shard * (element_bytes + wide), 4 * own, 2 * own)


def tiles(num_rows: int, batch_size: int, p: int, *, tile: int) -> Iterator[slice]:
    """Slices of the s/p rows of a rank's chunk, so that p t b <= tile wherever t > 1."""
    step = max(1, tile // (p * batch_size))
    return (slice(i, min(i + step, num_rows)) for i in range(0, num_rows, step))


def counted_tiles(
    counted: np.ndarray, p: int, *, tile: int, row: RowBytes
) -> Iterator[tuple[slice, np.ndarray]]:
    """Slices of the s/p rows of a rank's chunk, and which of their p t b rows [p t, b] count.

    counted: bool [b, s]. A slice that holds fewer counted rows than others is longer: none holds
    more bytes than a tile of which every row counts. Slices of no counted row are left out.
    """
    by_row = counted.reshape(len(counted), p, -1)  # [b, p, s/p]
    num_counted = by_row.sum((0, 1))
    of_row = num_counted * (row.logits + row.selected) + len(counted) * p * row.gathered
    held = np.concatenate([[0], np.cumsum(of_row)])  # by the rows before each
    most, rows, first = tile * (row.logits + row.gathered), np.flatnonzero(num_counted), 0
    while first < len(rows):
        start = int(rows[first])
        stop = max(start + 1, int(np.searchsorted(held, held[start] + most, side="right")) - 1)
        chosen = by_row[:, :, start:stop].transpose(1, 2, 0).reshape(-1).nonzero()[0]
        yield slice(start, stop), chosen
        first = int(np.searchsorted(rows, stop))


def of_tile(by_token: Tensor, rows: slice, p: int) -> Tensor:
    """[b, s] -> [p t, b]: a tile of it, in the order in which gathered rows lie."""
    return by_token.unflatten(1, (p, -1))[:, :, rows].permute(1, 2, 0).flatten(0, 1)


def put_tile(by_token: Tensor, rows: slice, p: int, values: Tensor) -> None:
    """Write values [p t, b] to where of_tile reads them in [b, s]."""
    by_token.unflatten(1, (p, -1))[:, :, rows] = values.unflatten(0, (p, -1)).permute(2, 0, 1)
