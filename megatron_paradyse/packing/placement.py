"""Which rank holds which tokens of a packed row: long documents spread, short ones whole.

Every rank holds s/p rows, and about the same unmasked scores of attention. A document over k ranks
is cut into 2k pieces, of which the j-th rank holds the j-th from the start and the j-th from the
end (zigzag): with a causal mask the ranks then have the same scores of it. With a sliding window
the queries beyond it all have the same: then its first tokens lie so, the others in k pieces. In
bidirectional attention all queries have, and each rank holds one piece.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from megatron_paradyse.packing.row import Row, aligned, contiguous
from megatron_paradyse.packing.work import scores_between

MOST_PADDING = 1 / 32  # of a row, for which no document has to cross ranks
EVEN = 1.10  # scores of the fullest rank over the mean that need no more documents across ranks
SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625)  # of a rank's mean scores, for what it holds of a document


def alignment(tensor_parallel_size: int) -> int:
    """Sequence lengths are padded to a multiple of this: two half chunks for every rank."""
    return 2 * tensor_parallel_size if tensor_parallel_size > 1 else 1


def place(
    lengths: Sequence[int],
    p: int,
    *,
    causal: bool,
    alignment: int | None = None,
    window: int | None = None,
) -> Row:
    """A row of the documents over p ranks, in which as few documents as possible cross ranks.

    If the documents, dealt longest first, lie whole, each on one rank, with the alignment's or 1/32
    of padding and even scores, they do. Otherwise s is the smallest multiple of alignment (None: of
    p, whose multiple it is), and the documents of most scores are spread over 2, 4, ..., p ranks,
    as few as make the scores even; of the others those are cut that fill the last room of a rank.
    Depends on the arguments alone.

    window: keys that a query sees, where every attention has one: scores are those that it leaves.
    """
    alignment = alignment or p
    if p == 1:
        return contiguous(lengths, p, alignment=alignment)
    order = sorted(range(len(lengths)), key=lambda number: (-lengths[number], number))
    total = [scores_between(length, 0, length, causal, window) for length in lengths]
    whole = _whole(lengths, order, total, p, alignment)
    if whole is not None:
        return whole
    found: list[_Ranks] = []
    for share in SHARES:
        ranks = _Ranks(lengths, p, alignment, causal, window)
        ranks.fill(order, total, share)
        if ranks.imbalance <= EVEN:
            return ranks.row()
        found.append(ranks)
    return min(found, key=lambda ranks: ranks.imbalance).row()


def _whole(
    lengths: Sequence[int], order: list[int], total: list[int], p: int, alignment: int
) -> Row | None:
    """Every document on one rank, the longest first to that of the fewest tokens."""
    tokens = sum(lengths)
    most = max(tokens * (1 + MOST_PADDING), tokens + alignment - 1)  # the least s, or a 32nd more
    if len(lengths) < p or lengths[order[0]] * p > most:
        return None
    held: list[list[int]] = [[] for _ in range(p)]
    heap = [(0, 0, rank) for rank in range(p)]
    for number in order:
        load, scores, rank = heap[0]
        held[rank].append(number)
        heapq.heapreplace(heap, (load + lengths[number], scores + total[number], rank))
    size = aligned(max(load for load, _, _ in heap) * p, alignment) // p
    even = max(scores for _, scores, _ in heap) * p <= EVEN * sum(total)
    if not even or size * p > most:
        return None
    ranks = _Ranks(lengths, p, alignment, causal=True, size=size)
    for rank, numbers in enumerate(held):
        for number in numbers:
            ranks.hold(number, [(rank, lengths[number])])
    return ranks.row()


class _Ranks:
    """What the ranks hold so far: scores, room for rows, and ranges of documents."""

    def __init__(
        self,
        lengths: Sequence[int],
        p: int,
        alignment: int,
        causal: bool,
        window: int | None = None,
        size: int | None = None,
    ):
        """size: s/p; None: the least."""
        self._lengths, self._p, self._causal, self._window = lengths, p, causal, window
        self.size = size or aligned(sum(lengths), alignment) // p
        self.room = [self.size] * p
        self.scores = [0] * p
        self._ranges: list[list[tuple[int, int, int]]] = [[] for _ in range(p)]

    @property
    def imbalance(self) -> float:
        return max(self.scores) * self._p / max(sum(self.scores), 1)

    def fill(self, order: list[int], total: list[int], share: float) -> None:
        """Hold all documents, longest first; a piece may have this share of the mean scores."""
        most = share * sum(total) / self._p
        rest = iter(order)
        short: list[int] = []
        for number in rest:
            if total[number] <= most and self._lengths[number] <= max(self.room):
                short = [number, *rest]
                break
            self._spread(number, total[number], most)
        self._hold_whole(short)

    def _spread(self, number: int, scores: int, most: float) -> None:
        """Evenly over as few ranks as keep the piece small, those of the least scores."""
        length, num_ranks = self._lengths[number], 2
        while num_ranks < self._p and scores > most * num_ranks:
            num_ranks *= 2
        while num_ranks < self._p:
            need = -(-length // num_ranks)
            able = [rank for rank in range(self._p) if self.room[rank] >= need]
            if len(able) >= num_ranks:
                able.sort(key=lambda rank: (self.scores[rank], -self.room[rank], rank))
                break
            num_ranks *= 2
        else:
            able = [rank for rank in range(self._p) if self.room[rank]]
            num_ranks = len(able)
        self.hold(number, self._quotas(able[:num_ranks], length))

    def _quotas(self, ranks: list[int], length: int) -> list[tuple[int, int]]:
        """(rank, tokens), as even as the room of each allows."""
        quotas, rest = [], length
        for i, rank in enumerate(sorted(ranks, key=lambda rank: (self.room[rank], rank))):
            tokens = min(self.room[rank], rest // (len(ranks) - i))
            quotas.append((rank, tokens))
            rest -= tokens
        return [(rank, tokens) for rank, tokens in sorted(quotas) if tokens]

    def _hold_whole(self, numbers: list[int]) -> None:
        """Each on the rank of the least scores that has room, or cut where none has."""
        heap = [(scores, rank) for rank, scores in enumerate(self.scores)]
        heapq.heapify(heap)
        for number in numbers:
            length, passed = self._lengths[number], []
            while heap and self.room[heap[0][1]] < length:
                passed.append(heapq.heappop(heap))
            if heap:
                rank = heap[0][1]
                self.hold(number, [(rank, length)])
                heapq.heapreplace(heap, (self.scores[rank], rank))
            else:
                self._cut(number)
                passed = [(scores, rank) for rank, scores in enumerate(self.scores)]
            for entry in passed:
                if self.room[entry[1]]:
                    heapq.heappush(heap, entry)

    def _cut(self, number: int) -> None:
        """Over the ranks of most room, as few as hold it."""
        quotas, rest = [], self._lengths[number]
        for rank in sorted(range(self._p), key=lambda rank: (-self.room[rank], rank)):
            tokens = min(self.room[rank], rest)
            if tokens:
                quotas.append((rank, tokens))
            rest -= tokens
        self.hold(number, quotas)

    def hold(self, number: int, quotas: list[tuple[int, int]]) -> None:
        """Give every rank its tokens of a document: half from its start on, half from its end.

        So of those whose queries see ever more keys, and of the others in one piece.
        """
        start, length = 0, self._lengths[number]
        rising = quotas
        if not self._causal:
            rising = _shares(quotas, 0)
        elif self._window is not None and self._window < length:
            rising = _shares(quotas, self._window)
        firsts = [(rank, tokens - tokens // 2) for rank, tokens in rising]
        seconds = [(rank, tokens // 2) for rank, tokens in reversed(rising)]
        level = [
            (rank, whole - part) for (rank, whole), (_, part) in zip(quotas, rising, strict=True)
        ]
        for rank, tokens in firsts + seconds + level:
            if tokens:
                stop = start + tokens
                self._ranges[rank].append((number, start, stop))
                self.room[rank] -= tokens
                scores = scores_between(length, start, stop, self._causal, self._window)
                self.scores[rank] += scores
                start = stop
        assert start == length, "there is room for every document"

    def row(self) -> Row:
        begins = [0]
        for length in self._lengths:
            begins.append(begins[-1] + length)
        padding, shards = begins[-1], []
        for ranges, room in zip(self._ranges, self.room, strict=True):
            held = sorted((begins[n] + start, begins[n] + stop) for n, start, stop in ranges)
            if room:
                held.append((padding, padding + room))
                padding += room
            shards.append(tuple(held))
        return Row(tuple(self._lengths), tuple(shards))


def _shares(quotas: list[tuple[int, int]], tokens: int) -> list[tuple[int, int]]:
    """Of some tokens, as much for each rank as it has of all."""
    total, held, given = sum(whole for _, whole in quotas), 0, 0
    shares = []
    for rank, whole in quotas:
        held += whole
        upto = held * tokens // total
        shares.append((rank, upto - given))
        given = upto
    return shares
