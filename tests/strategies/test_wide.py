"""A row over the ranks of several groups equals its documents one by one.

Each group has all weights, in shards; gradients of the groups add up, as replicas' do.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_paradyse.packing.row import Row, contiguous
from megatron_paradyse.packing.work import keys_moved
from megatron_paradyse.strategies import (
    blocks,
    get_strategy,
    routes,
    strategy_names,
    takes_wide,
)
from megatron_paradyse.strategies.accounting import packed_attention_sent
from megatron_paradyse.strategies.collectives import Communication, count_communication
from megatron_paradyse.strategies.contract import Wide
from megatron_paradyse.strategies.sizes import LayerSizes
from tests.strategies.cases import FLOAT32_TOLERANCE, AttentionCase, positions_of
from tests.strategies.deviations import combine, deviation
from tests.strategies.harness import run_ranks
from tests.strategies.layers import (
    rank_layer,
    run_and_differentiate,
    run_documents_one_by_one,
    run_reference,
    shard_of,
)
from tests.strategies.staging import staged
from tests.strategies.test_packed_rows import random_row

RANKS = 4
ROWS = {
    "one document": contiguous((24,), RANKS),
    "zigzag": Row((16,), tuple(((2 * r, 2 * r + 2), (14 - 2 * r, 16 - 2 * r)) for r in range(4))),
    "across groups": contiguous((3, 12, 4, 2), RANKS, alignment=24),
    "within groups": contiguous((5, 7, 9, 2), RANKS, alignment=24),
    "random": random_row(RANKS, 3),
    "random too": random_row(RANKS, 5),
}
VARIANTS = (
    {"g": 2, "rope": "half"},
    {"g": 4, "bias": True, "rope": "interleaved", "mask": "bidirectional"},
    {"g": 1, "qk_norm": "rmsnorm", "rope": "scaled", "offset": True},
    {"g": 2, "dropout": 0.3},
    {"g": 4, "window": 3},
    {"g": 2, "offset": True, "mask": "bidirectional"},
)


@dataclass(frozen=True)
class _Wide:
    """A case of which p ranks have the weights, RANKS / p groups of them the row."""

    case: AttentionCase

    @property
    def groups(self) -> int:
        return RANKS // self.case.p


def _cases():
    for p in (1, 2):
        for strategy in strategy_names():
            for i, (label, row) in enumerate(ROWS.items()):
                for variant in (VARIANTS[i], VARIANTS[(i + p) % len(VARIANTS)]):
                    case = AttentionCase(strategy, p, s=row.seq_length, b=1, row=row)
                    yield label, _Wide(replace(case, **variant))
                gated = replace(case, g=(1, 2, 4)[i % 3], bias=True, rope="half", gate=True)
                yield label, _Wide(replace(gated, mask=("causal", "bidirectional")[i % 2]))
            again = AttentionCase(f"{strategy}+recompute", p, s=24, b=1, row=ROWS["one document"])
            yield "again", _Wide(again)


CASES = {f"{wide.case.name}-{label}": wide for label, wide in _cases()}


@functools.cache
def _groups(p: int):
    """Of this process: the ranks that share the weights, and its peers in the other groups."""
    lines = [range(i, i + p) for i in range(0, RANKS, p)] + [range(i, RANKS, p) for i in range(p)]
    made = [dist.new_group(list(line)) for line in lines]
    group, peers = (of for line, of in zip(lines, made, strict=True) if dist.get_rank() in line)
    return group, peers


def _run(ranks, wide: _Wide):
    """Deviations from the oracle through a transport that poisons; bytes sent; steps taken."""
    case = wide.case
    group, peers = _groups(case.p)
    layer, forward = rank_layer(group, case, wide=Wide(ranks, peers)), Communication()
    mine = positions_of(case, RANKS, ranks.rank())

    def run(x, weights):
        with count_communication() as count:
            output = layer.run(x, weights)
        forward.sent_bytes.update(count.sent_bytes)
        return output

    with staged() as staging, count_communication() as both:
        output, grad_x, grads = run_and_differentiate(run, layer.x, layer.weights, layer.grad)
    for name in grads:
        grads[name] = grads[name].double()
        dist.all_reduce(grads[name], group=ranks if "norm" in name else peers)
    if case.dropout:
        truth = run_reference(case, torch.float64)
    else:
        truth = run_documents_one_by_one(case)
    of_shards = shard_of(case, truth[2], case.p, group.rank())
    errors = {
        "output": deviation(output, truth[0][mine]),
        "x": deviation(grad_x, truth[1][mine]),
    } | {name: deviation(grads[name], getattr(of_shards, name)) for name in grads}
    sent = forward.total_bytes, both.total_bytes - forward.total_bytes
    return errors, sent, staging.calls


@functools.cache
def _results():
    return run_ranks(RANKS, _run, CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_wide_row_equals_its_documents_one_by_one(name):
    errors = combine([errors for errors, *_ in _results()[name]])
    wrong = {t: e.relative for t, e in errors.items() if not e.relative <= FLOAT32_TOLERANCE}
    assert not wrong, wrong


@pytest.mark.parametrize("name", CASES)
def test_every_rank_takes_the_same_steps_in_the_same_order(name):
    by_rank = [calls for *_, calls in _results()[name]]
    kinds = [[(call[0], call[1]) for call in calls] for calls in by_rank]
    assert kinds[0] and all(kind == kinds[0] for kind in kinds)


EXACT = [
    name
    for name, wide in CASES.items()
    # METP's weights count as those of the rank that sends most
    if not (wide.case.strategy.startswith("metp") and wide.case.g % wide.case.p)
]


@pytest.mark.parametrize("name", EXACT)
def test_bytes_sent_are_those_of_the_formula(name):
    """Of weights among p ranks, of keys among all: no more than their queries see."""
    wide = CASES[name]
    case = wide.case
    sizes = LayerSizes(
        s=case.s // wide.groups, b=1, h=case.h, n=case.n, g=case.g, d=case.d, f=1, p=case.p,
        element_bytes=4, causal=case.mask == "causal", bias=case.bias, offset=case.offset,
        gate=case.gate,
    )  # fmt: skip
    mask = {"causal": case.mask == "causal", "window": case.window}
    moved = keys_moved(case.row, **mask)
    across = keys_moved(replace(case.row, groups=wide.groups).by_groups, **mask)
    expected = [
        packed_attention_sent(
            case.strategy,
            sizes,
            keys_sent=sum(moved[rank]),
            keys_received=sum(line[rank] for line in moved),
            across_groups=(
                sum(across[rank // case.p]),
                sum(line[rank // case.p] for line in across),
            ),
        )
        for rank in range(RANKS)
    ]
    sent = [sent for _, sent, _ in _results()[name]]
    assert sent == expected


def test_which_strategies_run_wide_rows_is_known_without_loading_them():
    names = strategy_names(packed=True)
    wide = {name for name in names if get_strategy(name).takes_wide}
    assert wide == set(strategy_names()) == {name for name in names if takes_wide(name)}
    assert takes_wide("metp+offload") and not takes_wide("local_z+recompute")


class _Stays(routes._ReturningGradient):
    """Gradients of keys from elsewhere are forgotten."""

    def add(self, grad):
        if self._sum is None:
            self._sum = grad


def _of_the_next_group(microbatch, index):
    return blocks.group_spans(microbatch, (index + 1) % microbatch.wide.peers.size())


PACKAGE = "megatron_paradyse.strategies"
BROKEN = {
    "gradients stay": ("megatron_cz", {f"{PACKAGE}.routes._ReturningGradient": _Stays}),
    "gradients of heads stay": ("megatron_ts", {f"{PACKAGE}.routes._ReturningGradient": _Stays}),
    "other positions": (
        "ulysses_z",
        {f"{PACKAGE}.head_attention.group_spans": _of_the_next_group},
    ),
}


def _run_broken(ranks, name: str):
    strategy, patches = BROKEN[name]
    wide = CASES[f"{strategy}-p2-causal-n4g2-b=1-rope=half-one document"]
    with ExitStack() as stack:
        for target, wrong in patches.items():
            stack.enter_context(patch(target, wrong))
        return _run(ranks, wide)


@functools.cache
def _broken_results():
    return run_ranks(RANKS, _run_broken, {name: name for name in BROKEN})


@pytest.mark.parametrize("name", BROKEN)
def test_the_check_notices_what_is_broken_between_groups(name):
    errors = combine([errors for errors, *_ in _broken_results()[name]])
    assert max(error.relative for error in errors.values()) > 100 * FLOAT32_TOLERANCE
