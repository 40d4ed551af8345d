"""What ranks send each other of the documents of a packed row, while a load of it is counted.

Within a sliding window keys go to the ranks whose queries see them: packing/work.py says the same
rank by rank, and strategies/routes.py does it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_paradyse.packing.work import moments
from megatron_paradyse.strategies.row_sizes import Moments
from megatron_paradyse.strategies.sizes import DOCUMENT_ROWS

# Up to so many ranks are told which of them sends how much to which: squares of their number.
MOST_TOLD = 16

Pieces = list[tuple[int, int, int]]  # of a document, in its order: (rank, start, stop) inside it
# By receiver and sender: queries, their parts, and whether these are whole pieces.
Calls = dict[tuple[int, int], tuple[int, int, bool]]


class Exchange:
    """Of p ranks, documents added one after the other.

    sent: by rank, tokens whose keys others need.
    """

    def __init__(self, p: int):
        self.sent = [0] * p
        self.crossing = Crossing()
        self._sharing: dict[int, set[int]] = {}  # by rank, itself among them
        # [receiver][sender]: tokens
        self._moved: list[list[int]] = [[0] * p for _ in range(p if p <= MOST_TOLD else 0)]

    def add(self, pieces: Pieces, tokens: dict[int, int], *, causal: bool) -> None:
        """All keys that are needed. tokens: of the document, by rank."""
        last, _, _ = pieces[-1]
        for rank, count in tokens.items():
            hidden = _hidden(pieces) if causal and rank == last else 0
            self.sent[rank] += count - hidden
            self._sharing.setdefault(rank, set()).update(tokens)
        if self._moved:
            self._add_moved(pieces, tokens, causal)

    def add_within(self, pieces: Pieces, tokens: dict[int, int], window: int) -> None:
        """Those that are no farther away than a window."""
        _, _, length = pieces[-1]
        if length <= window:
            self.add(pieces, tokens, causal=True)
            self.crossing.add_whole(tokens, max(pieces_by_rank(pieces).values()))
            return
        calls: Calls = {}
        for seen in seen_within(pieces, window):
            ranks = seen.receiver, seen.sender
            self.sent[seen.sender] += seen.keys if seen.is_first else 0
            queries, parts, whole = calls.get(ranks, (0, 0, True))
            calls[ranks] = queries + seen.queries, parts + 1, whole and seen.whole
            if self._moved:
                self._moved[seen.receiver][seen.sender] += seen.keys
            for rank in ranks:
                self._sharing.setdefault(rank, set()).update(ranks)
        self.crossing.add(calls)

    def _add_moved(self, pieces: Pieces, tokens: dict[int, int], causal: bool) -> None:
        """What ranks get of each other before their last piece."""
        starts = {rank: start for rank, start, _ in pieces}  # of the last
        before: dict[int, int] = {}
        for rank, start, stop in pieces:
            if start == starts[rank]:
                into = self._moved[rank]
                for other, count in (before if causal else tokens).items():
                    if other != rank:
                        into[other] += count
            before[rank] = before.get(rank, 0) + stop - start

    @property
    def peers(self) -> int:
        """Of the rank that has the most."""
        return max(map(len, self._sharing.values()), default=1) - 1

    def moments(self, received: list[int], rows: int) -> Moments:
        """Of ranks that are not told, as of what is not known, but the most of all moments.

        received: tokens whose keys a rank needs of others, by rank. rows: of a rank.
        """
        if not self.peers:
            return Moments(0, 0, 0, 0, 0)
        if self._moved:
            return Moments(*map(max, *moments(self._moved, rows)))
        most = min(self.peers, 2) * max(self.sent)
        at_once = max(min(come, most) + go for come, go in zip(received, self.sent, strict=True))
        return Moments(0, 0, 0, 0, at_once)


def _hidden(pieces: Pieces) -> int:
    """Tokens of the last rank that no other rank's queries see."""
    last, _, _ = pieces[-1]
    hidden = 0
    for rank, start, stop in reversed(pieces):
        if rank != last:
            break
        hidden += stop - start
    return hidden


def pieces_by_rank(pieces: Pieces) -> Counter[int]:
    """How many there are."""
    return Counter(rank for rank, _, _ in pieces)


class Seen(NamedTuple):
    """Keys of a piece that another rank's queries see, and these.

    whole: whether the queries are all of their piece. is_first: whether no rank before saw any.
    """

    receiver: int
    sender: int
    keys: int
    queries: int
    whole: bool
    is_first: bool


def seen_within(pieces: Pieces, window: int) -> Iterator[Seen]:
    """The nearest piece of a rank sees the most, and is the one that is told."""
    told: set[tuple[int, int]] = set()  # pieces, and ranks that see them
    sent: set[int] = set()
    for i, (rank, start, stop) in enumerate(pieces):
        for j in range(i - 1, -1, -1):
            other, first, last = pieces[j]
            reach = window - 1 - (start - last)
            if reach <= 0:
                break
            if other == rank or (j, rank) in told:
                continue
            told.add((j, rank))
            queries = min(stop - start, reach)
            whole = queries == stop - start
            yield Seen(rank, other, min(last - first, reach), queries, whole, j not in sent)
            sent.add(j)


class Crossing:
    """Calls of a flash kernel over keys of another rank: the most queries, and rows of summed_rows.

    Documents join whose queries, and keys, lie side by side: none behind one that is not whole.
    """

    def __init__(self) -> None:
        self.most = self.most_rows = 0
        self._open: dict[int, tuple[int, int]] = {}  # by receiver: queries and parts so far

    def add_whole(self, tokens: dict[int, int], parts: int) -> None:
        """Of a document of which all queries may see all keys: so many parts on a rank, at most."""
        for rank, count in tokens.items():
            joined, joined_parts = self._open.get(rank, (0, 0))
            found = joined + count, joined_parts + parts
            self._open[rank] = found
            self._note(*found)

    def add(self, calls: Calls) -> None:
        """Of a document."""
        receivers = {receiver for receiver, _ in calls}
        before = {receiver: self._open.pop(receiver, (0, 0)) for receiver in receivers}
        for (receiver, _), (queries, parts, whole) in calls.items():
            joined, joined_parts = before[receiver]
            found = joined + queries, joined_parts + parts
            self._note(*found)
            if whole:
                self._open[receiver] = max(found, self._open.get(receiver, (0, 0)))

    def _note(self, queries: int, parts: int) -> None:
        self.most = max(self.most, queries)
        self.most_rows = max(self.most_rows, summed_rows(queries, parts))


def summed_rows(tokens: int, documents: int) -> int:
    """That a flash kernel's backward sums in a call."""
    return tokens + (documents * DOCUMENT_ROWS if documents > 1 else -tokens % DOCUMENT_ROWS)


def largest_call(sizes: Sequence[int], window: int) -> tuple[int, int]:
    """The most tokens in one call of a flash kernel, and rows of summed_rows.

    sizes: tokens of documents, or of pieces, as they lie side by side. Those that are no longer
    than the window are one call, of what is longer each is one (strategies/joined_blocks.py).
    """
    if max(sizes, default=0) <= window:
        tokens = sum(sizes)
        return tokens, summed_rows(tokens, len(sizes))
    most = most_rows = tokens = documents = 0
    for size in sizes:
        joins = documents > 0 and size <= window
        tokens, documents = (tokens + size, documents + 1) if joins else (size, int(size <= window))
        if tokens > most:
            most = tokens
        rows = summed_rows(tokens, documents)
        if rows > most_rows:
            most_rows = rows
    return most, most_rows
