"""Of packed rows, the sizes that buffers of attention have, as numbers: no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Moments(NamedTuple):
    """Tokens in buffers of an exchange, besides the rank's own: the most of any step and rank.

    keys_first: that come and that are sent while the own are used; keys_in_use: then, with those
    that are used. gradients_in_use: of keys that are used, and of the step before, which are sent
    and come; gradients_sent: when those are sent. keys_at_once: in all of these, at most.
    """

    keys_first: int
    keys_in_use: int
    gradients_in_use: int
    gradients_sent: int
    keys_at_once: int


@dataclass(frozen=True, slots=True)
class RowSizes:
    """Tokens that buffers of attention on packed rows hold: the most of any rank or document.

    longest: of a document, of a wide row in one group; 0 where one is all that there is, without
    padding. piece: of a document, in one piece on a rank; piece_beside: in one that does not fill
    its rank; held: on a rank, in all its pieces. keys_sent: of a rank, those whose keys others
    need. fewest_keys: that come to the rank with the fewest. pieces: of documents, on a rank; 0:
    unknown. padded: whether documents leave room, at the end; or unknown. keys_at_once, and
    keys_first to gradients_sent: see Moments; 0: none, or but the first unknown.

    In one call of a flash kernel, 0: none, or unknown: call: of all tokens; call_here: of a rank's,
    and call_beside: in one that does not fill it; crossing: queries in one over another rank's
    keys. call_rows, call_here_rows, crossing_rows: that the backward of such calls sums.

    Within a window held is of one piece, of a document of which the rank has another.
    """

    longest: int = 0
    piece: int = 0
    piece_beside: int = 0
    held: int = 0
    keys_sent: int = 0
    keys_at_once: int = 0
    fewest_keys: int = 0
    pieces: int = 0
    padded: bool = True
    keys_first: int = 0
    keys_in_use: int = 0
    gradients_in_use: int = 0
    gradients_sent: int = 0
    call: int = 0
    call_rows: int = 0
    call_here: int = 0
    call_here_rows: int = 0
    call_beside: int = 0
    crossing: int = 0
    crossing_rows: int = 0

    @property
    def moments(self) -> Moments:
        """Where they are not known, no more than they can be."""
        found = self.keys_first, self.keys_in_use, self.gradients_in_use, self.gradients_sent
        most = self.keys_at_once
        return Moments(*found, most) if any(found) else Moments(most, most, most, most, most)
