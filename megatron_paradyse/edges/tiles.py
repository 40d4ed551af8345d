"""Tiles of a sequence that is shared over the ranks of a group: how large, and which rows.

s sequence, b batch, h hidden, v vocabulary, p ranks. A tile is the same t positions of every rank's
chunk, p t b rows in all: what a rank gathers of a tile and what it scatters are then whole rows of
its own chunk, and no rank ever waits for its turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

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
    logit_bytes = element_bytes + 4 if element_bytes < 4 else element_bytes
    row_bytes = vocab_shard * logit_bytes + 4 * h * element_bytes
    return max(LEAST_TOKENS, TILE_BYTES // row_bytes)


def tiles(num_rows: int, batch_size: int, p: int, *, tile: int) -> Iterator[slice]:
    """Slices of the s/p rows of a rank's chunk, so that p t b <= tile wherever t > 1."""
    step = max(1, tile // (p * batch_size))
    return (slice(i, min(i + step, num_rows)) for i in range(0, num_rows, step))


def of_tile(by_token: Tensor, rows: slice, p: int) -> Tensor:
    """[b, s] -> [p t, b]: a tile of it, in the order in which gathered rows lie."""
    return by_token.unflatten(1, (p, -1))[:, :, rows].permute(1, 2, 0).flatten(0, 1)


def put_tile(by_token: Tensor, rows: slice, p: int, values: Tensor) -> None:
    """Write values [p t, b] to where of_tile reads them in [b, s]."""
    by_token.unflatten(1, (p, -1))[:, :, rows] = values.unflatten(0, (p, -1)).permute(2, 0, 1)
