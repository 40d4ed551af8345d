"""A packed row equals its documents one by one, wherever their tokens lie."""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron_paradyse.errors import UserError
from megatron_paradyse.packing.row import Row, contiguous
from megatron_paradyse.packing.traffic import microbatch_of
from megatron_paradyse.packing.work import keys_moved, keys_received
from megatron_paradyse.strategies import base_name, get_strategy, strategy_names, takes
from megatron_paradyse.strategies.accounting import packed_attention_sent
from megatron_paradyse.strategies.collectives import Communication, count_communication
from megatron_paradyse.strategies.contract import Microbatch
from megatron_paradyse.strategies.sizes import LayerSizes
from tests.packing.rows import SPREAD
from tests.strategies.cases import FLOAT32_TOLERANCE, AttentionCase, can_run
from tests.strategies.deviations import combine
from tests.strategies.harness import run_ranks
from tests.strategies.layers import rank_layer, run_case
from tests.strategies.staging import staged

NAMES = strategy_names(packed=True)
ROWS = {
    1: {"edges": contiguous((5, 1, 7), 1), "shuffled": Row((4, 3, 1), (((6, 8), (2, 6), (0, 2)),))},
    2: {
        "mid-shard": contiguous((9, 1, 8, 2), 2, alignment=24),
        "in shards": contiguous((8, 4, 7, 1), 2, alignment=24),
        "one document": contiguous((20,), 2),
        "zigzag": Row((20, 3, 1), (((0, 5), (15, 20), (20, 22)), ((5, 15), (22, 24)))),
    },
    3: {
        "mid-shard": contiguous((9, 1, 8, 2), 3, alignment=24),
        "in shards": contiguous((8, 5, 3, 2), 3, alignment=24),
    },
    4: {
        "mid-shard": contiguous((9, 1, 8, 2), 4, alignment=24),
        "in shards": contiguous((6, 4, 2, 5, 1, 3, 1), 4, alignment=24),
        "spread": SPREAD,
    },
}
VARIANTS = (
    {"g": 2, "rope": "half"},
    {"g": 4, "bias": True, "rope": "interleaved"},
    {"g": 1, "qk_norm": "rmsnorm", "rope": "partial", "offset": True},
    {"g": 2, "dropout": 0.3},
    {"g": 4, "window": 3},
)
GATED = (
    {"g": 2, "gate": True, "rope": "half", "bias": True},
    {"g": 1, "gate": True, "qk_norm": "rmsnorm", "offset": True},
    {"g": 4, "gate": True, "dropout": 0.3},
)


def random_row(p: int, seed: int) -> Row:
    """Documents of any length in pieces that lie anywhere."""
    rng = random.Random(f"{p} {seed}")
    s = p * rng.randint(2, 12)
    cuts = sorted(rng.sample(range(1, s), rng.randint(0, min(6, s - 1))))
    lengths = [stop - start for start, stop in itertools.pairwise([0, *cuts, s])]
    if rng.random() < 0.5 and len(lengths) > 1:
        lengths.pop()  # its tokens are padding
    ranges = list(itertools.pairwise([0, *sorted(rng.sample(range(1, s), s // 3)), s]))
    rng.shuffle(ranges)
    shards: list[list[tuple[int, int]]] = [[]]
    for start, stop in ranges:
        while start < stop:
            free = s // p - sum(b - a for a, b in shards[-1])
            if not free:
                shards.append([])
                continue
            shards[-1].append((start, min(stop, start + free)))
            start = shards[-1][-1][1]
    return Row(tuple(lengths), tuple(map(tuple, shards)))


def _cases():
    for strategy, p in itertools.product(NAMES, ROWS):
        for i, (mask, (label, row)) in enumerate(
            itertools.product(("causal", "bidirectional"), ROWS[p].items())
        ):
            n = 6 if p == 3 else 4
            variants = [VARIANTS[(i + p) % len(VARIANTS)], VARIANTS[(i + p + 2) % len(VARIANTS)]]
            variants.append(GATED[i % len(GATED)])
            for variant in variants:
                if "window" in variant and mask != "causal":
                    continue
                variant = variant | {"g": n if variant["g"] == 4 else variant["g"]}
                yield label, AttentionCase(strategy, p, mask, n=n, row=row, **variant)
        if p in (2, 4):
            for seed in range(6):
                mask, row = ("causal", "bidirectional")[seed % 2], random_row(p, seed)
                case = AttentionCase(strategy, p, mask, g=2, rope="half", row=row)
                yield f"random {seed}", case
        label, row = next(iter(ROWS[p].items()))
        again = AttentionCase(f"{strategy}+recompute", p, n=6 if p == 3 else 4, row=row)
        yield label, replace(again, g=again.n)


def _runs(case: AttentionCase) -> bool:
    return can_run(case) and takes(case.strategy, microbatch_of(case.row), case.p)


CASES = {
    f"{case.name}-{label}": replace(case, s=case.row.seq_length, b=1)
    for label, case in _cases()
    if _runs(case)
}


def _sizes(case: AttentionCase) -> LayerSizes:
    return LayerSizes(
        s=case.s, b=1, h=case.h, n=case.n, g=case.g, d=case.d, f=1, p=case.p, element_bytes=4,
        causal=case.mask == "causal", bias=case.bias, offset=case.offset,
        gate=case.gate,
    )  # fmt: skip


def _run(group, case: AttentionCase):
    """Deviations from the oracle through a transport that poisons, bytes and messages, calls."""
    layer, forward = rank_layer(group, case), Communication()
    attention = layer.run

    def run(x, weights):
        with count_communication() as count:
            output = attention(x, weights)
        forward.sent_bytes.update(count.sent_bytes)
        return output

    with staged() as staging, count_communication() as both:
        errors = run_case(group, case, layer=replace(layer, run=run))
    sent = forward.total_bytes, both.total_bytes - forward.total_bytes
    return errors, sent, both.calls["send"], staging.calls


@functools.cache
def _results(p: int):
    return run_ranks(p, _run, {name: case for name, case in CASES.items() if case.p == p})


@pytest.mark.parametrize("name", CASES)
def test_a_row_equals_its_documents_one_by_one(name):
    """In float64 on one process; with attention dropout, the row itself there."""
    errors = combine([errors for errors, *_ in _results(CASES[name].p)[name]])
    wrong = {t: e.relative for t, e in errors.items() if not e.relative <= FLOAT32_TOLERANCE}
    assert not wrong, wrong


EXACT = [
    name
    for name, case in CASES.items()
    # METP's weights count as those of the rank that sends most
    if case.p > 1
    if not (case.strategy.startswith("metp") and case.g % case.p)
]


@pytest.mark.parametrize("name", EXACT)
def test_bytes_sent_are_those_of_the_formula(name):
    case = CASES[name]
    sent = [sent for _, sent, *_ in _results(case.p)[name]]
    moved = keys_moved(case.row, causal=case.mask == "causal", window=case.window)
    formula = [
        packed_attention_sent(
            case.strategy,
            _sizes(case),
            keys_sent=sum(moved[rank]),
            keys_received=sum(line[rank] for line in moved),
        )
        for rank in range(case.p)
    ]
    assert sent == formula


SENDS = {"megatron_cz": 1, "colossal_z": 2, "metp": None}  # of a pair: k and v at once, one by one


@pytest.mark.parametrize("name", EXACT)
def test_only_ranks_that_share_a_document_exchange(name):
    """Keys once per direction, in the backward again, and their gradients back; METP per block."""
    case = CASES[name]
    strategy = base_name(case.strategy)
    per_pair = SENDS.get(strategy, 0) or (case.p if strategy == "metp" else 0)
    forwards = 2 if case.strategy != strategy else 1  # +recompute
    moved = keys_moved(case.row, causal=case.mask == "causal", window=case.window)
    for rank, (*_, exchanges, _) in enumerate(_results(case.p)[name]):
        to = sum(tokens > 0 for tokens in moved[rank])
        received = sum(line[rank] > 0 for line in moved)
        assert exchanges == per_pair * ((1 + forwards) * to + received)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.p > 1])
def test_every_rank_takes_the_same_steps_in_the_same_order(name):
    """Those that send and receive nothing too, so that no order of messages can deadlock."""
    by_rank = [calls for *_, calls in _results(CASES[name].p)[name]]
    kinds = [[(call[0], call[1]) for call in calls] for calls in by_rank]
    assert kinds[0] and all(kind == kinds[0] for kind in kinds)


@pytest.mark.parametrize("row", [row for p in ROWS for row in ROWS[p].values()])
@pytest.mark.parametrize(
    ("causal", "window"), [(False, None), (True, None), *((True, w) for w in (1, 2, 3, 9))]
)
def test_keys_that_move_are_those_that_queries_elsewhere_see(row, causal, window):
    """Counted one by one."""
    rank_of = {i: r for r, shard in enumerate(row.shards) for a, b in shard for i in range(a, b)}
    pairs = set()
    for start, stop in row.documents:
        for query, key in itertools.product(range(start, stop), repeat=2):
            seen = query - key < (window or row.seq_length) and (key <= query or not causal)
            if seen and rank_of[key] != rank_of[query]:
                pairs.add((key, rank_of[query]))
    moved = [[0] * row.p for _ in range(row.p)]
    for key, receiver in pairs:
        moved[rank_of[key]][receiver] += 1
    assert keys_moved(row, causal=causal, window=window) == moved
    received = [sum(line[rank] for line in moved) for rank in range(row.p)]
    assert keys_received(row, causal=causal, window=window) == received


@pytest.mark.parametrize("p", ROWS)
def test_local_z_takes_rows_whose_documents_stay_and_nothing_else(p):
    for label, row in ROWS[p].items():
        stays = sum(map(sum, keys_moved(row))) == 0
        assert takes("local_z+recompute", microbatch_of(row), p) is stays, label
        assert takes("metp", microbatch_of(row), p)
    assert takes("local_z", Microbatch(24, 2), p) is (p == 1)
    assert takes("local_z", Microbatch(24, 1, (((0, 6), (6, 12), (12, 14)),)), p) is (
        p in (1, 2, 4)
    )
    assert not takes("local_z", Microbatch(24, 2, (((0, 6),), ((5, 13),))), 2)


def test_a_single_document_has_no_choice_of_local_z():
    assert "local_z" not in strategy_names()
    assert set(strategy_names(packed=True)) - set(strategy_names()) == {"local_z"}


def test_local_z_refuses_what_it_does_not_take():
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    case = AttentionCase("local_z", 2)
    with pytest.raises(UserError, match="local_z needs every document on one of the p=2 ranks"):
        get_strategy("local_z").attention(None, None, case.shape, Microbatch(24, 1), group)
