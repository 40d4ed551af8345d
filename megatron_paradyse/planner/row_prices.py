"""Seconds of a packed row at once: for packers, which ask for thousands of rows.

Solving for each would take a millisecond. So plans are made once per length, for the most that a
row of it can hold and for less; a row takes the fastest of those that were made for at least as
much as it holds, by costs of the row itself. Never less than the best plan takes, and little more:
where none of these fits, or only one that is far slower than others for which rows of the length
may have no room, it is planned as training plans it.

A flash kernel that takes all documents in one call holds bytes for each of them, of which short
ones may be any number: there plans are made once per length and power of two of documents.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_paradyse.costs.layers import ALIKE
from megatron_paradyse.costs.model import CostModel
from megatron_paradyse.costs.row_costs import RowTerms, like, row_terms
from megatron_paradyse.costs.table import OperationCosts
from megatron_paradyse.errors import UserError
from megatron_paradyse.packing.load import Load, fullest_buffers, rounded_up, unpacked
from megatron_paradyse.packing.row import Row, aligned
from megatron_paradyse.plan import Plan
from megatron_paradyse.planner.pipeline import UNLIMITED
from megatron_paradyse.planner.policies import CostPolicy
from megatron_paradyse.strategies import RECOMPUTE, base_name, offloads, recomputes

# What plans are made for, over one document of s tokens: scores, and whether documents cross ranks.
MADE_FOR = ((1.0, True), (1 / 8, True), (1 / 8, False), (1 / 64, False))
PLANS_PER_DOUBLING = 16  # lengths for which plans are made
CAPACITY = 4096  # lengths that are remembered, and rows with plans of their own
FAR = 1.5  # times what layers take that need more room; recomputing costs less

Key = tuple[int, int, int, int, int]  # s, p of a group, groups, documents of a row and of a rank
Half = tuple[str, str]  # strategy, and the operation whose costs it has
Pairs = tuple[tuple[Half, Half, int], ...]  # attention, MLP, layers


@dataclass(frozen=True)
class _Made:
    """The runs of like layers of a plan, and the most keys that a row may need to run it.

    single: it may hold one document only, whose angles are in no other table. room: whether there
    is room for such a row; else it tells how fast rows that hold less may be.
    """

    pairs: Pairs
    keys_received: int
    single: bool
    room: bool

    def holds(self, load: Load) -> bool:
        fits = self.room and load.keys_received <= self.keys_received
        return fits and not (self.single and load.documents > 1)


class RowPrices:
    """Asks a policy without smoothing; edge_seconds: of s, what runs besides the layers."""

    def __init__(
        self,
        policy: CostPolicy,
        model: CostModel,
        layers: Sequence[int],
        *,
        alignment: int,
        edge_seconds: Callable[[int], float],
    ):
        assert model.packed is not None
        self._policy, self._model, self._layers = policy, model, tuple(layers)
        self._alignment, self._edge_seconds = alignment, edge_seconds
        self._packed = model.packed
        self._plans: dict[Key, tuple[_Made, ...]] = {}
        self._lengths: dict[Key, _Length] = {}
        self._own: dict[Load, _Length] = {}

    def seconds(self, row: Row) -> float | None:
        """Forward and backward of the row; None where no plan fits."""
        return self.seconds_of(self.load_of(row))

    def load_of(self, row: Row) -> Load:
        """A row of one document tells of that document alone, unpacked."""
        load = self._packed.load_of(row)
        alone = len(row.lengths) == 1 and row.groups == 1
        return unpacked(load, self._packed.window) if alone else load

    def seconds_of(self, load: Load) -> float | None:
        """As seconds, of a row that is known by its load."""
        s = aligned(load.seq_length, self._alignment)
        key = (s, load.p, load.groups, *self._documents(load))
        found, fastest = _remembered(self._lengths, key, self._length).seconds(load)
        if found is not None and found <= FAR * fastest:
            return found
        packed = self._packed
        like = rounded_up(
            load, alignment=self._alignment, causal=packed.causal, window=packed.window
        )
        own, _ = _remembered(self._own, like, self._planned).seconds(load)
        return min((one for one in (found, own) if one is not None), default=None)

    def _documents(self, load: Load) -> tuple[int, int]:
        """For how many plans are made at least, on all ranks and on one: as bytes are of each."""
        if not self._packed.joined:
            return 1, 1
        pieces = load.buffers.pieces if load.buffers else 0  # plans are made for two of a document
        fullest = max(load.fullest_documents, -(-pieces // 2))
        return _power_up(load.documents), _power_up(fullest)

    def _length(self, key: Key) -> _Length:
        s, p, *_ = key
        return self._costs_of(self._plans_for(key), s, p)

    def _planned(self, load: Load) -> _Length:
        """The plan of all rows of such a load."""
        made = self._made(load)
        return self._costs_of(() if made is None else (made,), load.seq_length, load.p)

    def _costs_of(self, plans: tuple[_Made, ...], s: int, p: int) -> _Length:
        load = self._packed.load_of_one(s, p)
        mlp = {}
        for name, operation in {half for made in plans for _, half, _ in made.pairs}:
            made_from = like(self._model, _on_device(name), operation)[0]
            mlp[name, operation] = self._model.operation(made_from, operation, s)
        terms = {}
        for name, operation in {half for made in plans for half, _, _ in made.pairs}:
            terms[name, operation] = row_terms(self._model, _on_device(name), load, operation)
        return _Length(plans, terms, mlp, self._model.offloaded, self._edge_seconds(s))

    def _plans_for(self, key: Key) -> tuple[_Made, ...]:
        """Made for the next of a few lengths above s: what fits there fits here."""
        s, p, groups, documents, fullest = key
        step = math.ceil(math.log2(s) * PLANS_PER_DOUBLING - 1e-9)
        longer = aligned(round(2 ** (step / PLANS_PER_DOUBLING)), self._alignment)
        above: Key = (max(longer, s), p, groups, documents, fullest)
        if above not in self._plans:
            self._plans[above] = self._pool(above)
        return self._plans[above]

    def _pool(self, key: Key) -> tuple[_Made, ...]:
        s, p, groups, documents, fullest = key
        one = self._packed.load_of_one(s, p)
        single = replace(_holding(one, 1.0, True, groups), documents=1)
        found = [self._made(single, single=True)]
        if groups > 1:  # over a slow link what sends less is by far faster
            found.append(self._made(single, single=True, room=False))
        for share, crosses in MADE_FOR:
            if crosses or groups == 1:
                load = _holding(one, share, crosses, groups, documents, fullest)
                found.append(self._made(load))
        return tuple(dict.fromkeys(made for made in found if made is not None))

    def _made(self, load: Load, *, single: bool = False, room: bool = True) -> _Made | None:
        """The plan of rows that hold so much; None if nothing fits. room: within the budget."""
        try:
            problem = self._policy.problem(self._layers, 1, load.seq_length, False, load)
            if not room:
                problem = replace(problem, budget_bytes=UNLIMITED)
            outcome = self._policy.planner.plan(problem)
        except UserError:  # no strategy that is allowed can run such rows
            return None
        if not outcome.fits:
            return None
        return _Made(self._pairs(outcome.plan), load.keys_received, single, room)

    def _pairs(self, plan: Plan) -> Pairs:
        of = self._policy.operations or (lambda number: ALIKE)
        counted: Counter[tuple[Half, Half]] = Counter()
        for number, choice in plan.layers.items():
            attention, mlp = of(number)
            counted[(choice.attention, attention), (choice.mlp, mlp)] += 1
        return tuple((*pair, count) for pair, count in sorted(counted.items()))


@dataclass(frozen=True)
class _Length:
    plans: tuple[_Made, ...]
    terms: dict[Half, RowTerms]  # of attention; of +offload those of +recompute
    mlp: dict[Half, OperationCosts]
    offloaded: Callable[[OperationCosts], OperationCosts]
    edge_seconds: float

    def seconds(self, load: Load) -> tuple[float | None, float]:
        """By the fastest plan that holds it; by the fastest layers of all plans, room or not."""
        able = [made for made in self.plans if load.keys_received <= made.keys_received]
        attention = {half: terms.seconds(load) for half, terms in self.terms.items()}
        pairs = {(a, m): self._pair(attention[a], a, m) for made in able for a, m, _ in made.pairs}
        fastest: dict[tuple[str, str], float] = {}  # by the operations of a layer
        for ((_, of_attention), (_, of_mlp)), seconds in pairs.items():
            kind = of_attention, of_mlp
            fastest[kind] = min(seconds, fastest.get(kind, seconds))
        counts = able[0].pairs if able else ()
        least = sum(count * fastest[a[1], m[1]] for a, m, count in counts)
        found = [
            sum(count * pairs[a, m] for a, m, count in made.pairs)
            for made in able
            if made.holds(load)
        ]
        edge = self.edge_seconds
        return (edge + min(found) if found else None), edge + least

    def _pair(self, attention: tuple[float, float], of_attention: Half, of_mlp: Half) -> float:
        """Of a layer; a copy to the host counts with the layer's or the half's forward."""
        mlp = self.mlp[of_mlp]
        (a, _), (m, _) = of_attention, of_mlp
        if not (offloads(a) or offloads(m)):
            return sum(attention) + mlp.time_seconds
        first = replace(
            self.terms[of_attention].one,
            forward_seconds=attention[0],
            backward_seconds=attention[1],
        )
        if recomputes(a) and recomputes(m):
            both = replace(
                first,
                forward_seconds=first.forward_seconds + mlp.forward_seconds,
                backward_seconds=first.backward_seconds + mlp.backward_seconds,
            )
            return (self.offloaded(both) if offloads(a) else both).time_seconds
        halves = ((first, a), (mlp, m))
        return sum((self.offloaded(h) if offloads(n) else h).time_seconds for h, n in halves)


def _holding(
    one: Load, share: float, crosses: bool, groups: int, documents: int = 1, fullest: int = 1
) -> Load:
    """Of a row that has this share of one document's scores; within a window at most all of its.

    one: of a document of s tokens on one group; of several groups it is one of so many times s.
    documents, fullest: how many there are at least, on all ranks and on the one that has most.
    """
    ranks = one.p * groups
    keys_received = one.seq_length * groups - one.seq_length // one.p if crosses else 0
    load = replace(
        one,
        scores=math.ceil(one.scores * groups * share),
        fullest_scores=math.ceil(one.fullest_scores * groups * share),
        keys_received=keys_received,
        documents=max(math.ceil(1 / share) + 1, documents),
        fullest_documents=max(math.ceil(1 / share / ranks), fullest),
        peers=ranks - 1 if crosses else 0,
        in_order=False,
        groups=groups,
        group_keys=one.seq_length * (groups - 1),
        buffers=fullest_buffers(one.seq_length, one.p, keys_received),
        within=None,
    )
    if one.within is None:
        return load
    scores = min(load.scores, one.within.scores)
    fullest = min(load.fullest_scores, one.within.fullest_scores)
    return replace(load, within=replace(load, scores=scores, fullest_scores=fullest))


def _remembered[K](known: dict[K, _Length], key: K, make: Callable[[K], _Length]) -> _Length:
    """What is made of the key, once; of CAPACITY keys, the first goes first."""
    found = known.get(key)
    if found is None:
        if len(known) >= CAPACITY:
            del known[next(iter(known))]
        found = known[key] = make(key)
    return found


def _power_up(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _on_device(name: str) -> str:
    """The strategy; of +offload the +recompute whose costs its own are made from."""
    return base_name(name) + RECOMPUTE if offloads(name) else name
