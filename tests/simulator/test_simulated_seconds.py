"""What simulated seconds and bytes must obey, whatever the efficiencies are."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_paradyse.costs.fitting import fit_table
from megatron_paradyse.costs.table import BYTE_QUANTITIES, TIME_QUANTITIES
from megatron_paradyse.planner.policies import CostSource, OptimalPolicy, StageMemory
from megatron_paradyse.simulator import short_loops
from megatron_paradyse.simulator.clock import Clock
from megatron_paradyse.simulator.network import find_network
from megatron_paradyse.strategies.sizes import TILE_ROWS
from tests.simulator.small_models import GPT, simulated

RINGS = ("megatron_cz", "colossal_z", "metp")
IN_TILES = ("metp+recompute", "ulysses_z+recompute", "megatron_ts+recompute")


def test_what_overlaps_is_counted_once_and_what_is_waited_for_is_not_hidden():
    clock = Clock(host_seconds_per_kernel=0.0, host_seconds_per_collective=0.0)
    hidden, long = clock.begin(2.0), clock.begin(10.0)
    clock.kernel(5.0)
    clock.wait(hidden)
    assert clock.reading() == 5.0
    clock.wait(long)
    assert clock.reading() == 12.0  # one after the other: they share the links
    done = clock.begin(1.0)
    assert done == 13.0  # it reads what the kernels before it wrote
    clock.restart()
    slow = Clock(host_seconds_per_kernel=1.0, host_seconds_per_collective=0.0)
    for _ in range(3):
        slow.kernel(0.1)
    assert slow.reading() == pytest.approx(3.1)  # as fast as the host issues them


def test_a_ring_takes_its_hops_and_its_bytes():
    network = find_network("nvlink3", 8)
    assert network.seconds("all_gather", 225e9) == pytest.approx(1.0, rel=1e-4)
    assert network.seconds("exchange", 0) < network.seconds("all_gather", 0)
    assert find_network("nvlink3", 1).seconds("all_gather", 1e9) == 0.0


def rate(network, collective: str) -> float:
    return network.collectives[collective].bytes_per_second


def test_between_nodes_rings_go_through_all_ports_and_a_message_through_one():
    """A port of InfiniBand HDR reaches 0.85 x 25 GB/s, NVLink 0.75 x 300 GB/s."""
    port, inside = 0.85 * 25e9, 0.75 * 300e9
    far = find_network("nvlink3", 16)
    assert far.name == "nvlink3+infiniband-hdr"
    for collective in ("all_gather", "reduce_scatter", "broadcast", "reduce", "all_reduce"):
        assert rate(far, collective) == pytest.approx(8 * port)
    assert rate(far, "exchange") == pytest.approx(port)
    assert rate(far, "all_to_all") == pytest.approx(port * 15 / 8)  # 8 of 15 peers are far
    assert far.seconds("all_gather", 0) == pytest.approx(8e-6 + 14 * 2e-6 + 5e-6)
    assert far.seconds("all_reduce", 0) == pytest.approx(8e-6 + 2 * (14 * 2e-6 + 5e-6))
    cards = find_network("pcie4+infiniband-ndr", 9)  # of 8 peers 7 are in the node, one is not
    assert rate(cards, "all_to_all") == pytest.approx(0.65 * 32e9 * 8 / 7)
    assert rate(find_network("nvlink3", 12), "all_gather") == pytest.approx(4 * port)
    assert rate(find_network("nvlink3+infiniband-ndr", 16), "all_gather") == pytest.approx(inside)
    assert rate(find_network("infiniband-hdr", 16), "all_gather") == pytest.approx(port)


def test_groups_beside_that_of_tensor_parallelism_lie_where_their_ranks_do():
    """Those over which experts lie; 8 ranks fill a node."""
    port, inside = 0.85 * 50e9, 0.75 * 450e9
    network = find_network("nvlink4", 8)
    assert network.of_ranks(range(8)) is network
    assert network.of_ranks([8, 9]).collectives == find_network("nvlink4", 2).collectives
    assert network.of_ranks(range(16)).collectives == find_network("nvlink4", 16).collectives
    apart = network.of_ranks([7, 15, 23])  # one of each node
    assert {rate(apart, name) for name in ("all_gather", "all_to_all", "exchange")} == {port}
    assert apart.seconds("all_gather", 0) == pytest.approx(8e-6 + 2 * 5e-6)
    pairs = network.of_ranks([6, 7, 14, 15])  # of 3 peers 2 are far
    assert rate(pairs, "all_gather") == pytest.approx(2 * port)
    assert rate(pairs, "all_to_all") == pytest.approx(port * 3 / 2)
    assert rate(pairs.of_ranks([0, 1]), "all_gather") == inside
    measured = dataclasses.replace(network, links=None)
    assert measured.of_ranks([7, 15, 23]) is measured


@pytest.mark.parametrize("name", ["pcie4+infiniband-ndr", "pcie4+infiniband-hdr", "nvlink4"])
def test_an_exchange_takes_no_less_among_more_ranks(name):
    """Most neighbours are in a node, and all wait for the last message."""
    seconds = [find_network(name, p).seconds("exchange", 1 << 30) for p in (2, 8, 9, 16)]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize(
    ("strategies", "p", "tile_rows", "more"),
    [
        (RINGS, 8, TILE_ROWS, ()),
        (RINGS, 8, TILE_ROWS, ("--window-size", "80,0")),  # wide: rings of all keys, few seen
        (IN_TILES, 2, 2, ()),  # the 20 rows of a rank in 10 tiles, a block's 4 heads one by one
    ],
    ids=["rings", "windows", "tiles"],
)
def test_long_loops_give_what_walking_them_whole_gives(strategies, p, tile_rows, more, tmp_path):
    """Bytes exactly; seconds but for what the ends of a loop overlap with."""
    flags = [*GPT, *more, "--paradyse-head-tile", 2 * p]
    common = {"p": p, "lengths": (20 * p,), "strategies": strategies, "tile_rows": tile_rows}
    short = simulated(tmp_path / "short", flags, **common)
    whole = simulated(tmp_path / "whole", flags, whole_loops=True, **common)
    assert short_loops.WHOLE < 8
    for a, b in zip(short.measurements, whole.measurements, strict=True):
        for name in BYTE_QUANTITIES:
            assert getattr(a, name) == getattr(b, name), (a, b)
        for name in TIME_QUANTITIES:
            assert getattr(a, name) == pytest.approx(getattr(b, name), rel=0.02), (name, a, b)


def test_simulated_tables_are_labelled_and_fit_into_cost_models(tmp_path):
    """Longer is never cheaper; fused kernels hold less; recompute keeps the input alone."""
    strategies = ("megatron_ts", "ulysses_z+recompute")
    more = {"lengths": (64, 512, 4096), "strategies": strategies, "dtype": "bfloat16"}
    eager = simulated(tmp_path / "eager", GPT, 2, **more)
    fused = simulated(tmp_path / "fused", GPT, 2, **more, fused=True)
    assert eager.description.source == "simulated" and eager.description.hardware.kind == "cuda"
    assert fused.constants.host_bytes_per_second == 0.4 * 32e9
    found = fused.constants
    of_parameters = found.static_bytes - found.waiting_bytes - 4096 * 64 * 2  # and the buffer
    assert found.optimizer_seconds == pytest.approx(of_parameters / 18 * 38 / (0.8 * 2039e9))
    model = fit_table(fused, "hybrid")
    keyed = {(m.strategy, m.operation, m.seq_length): m for m in fused.measurements}
    for (strategy, operation, s), m in keyed.items():
        predicted = model.operation(strategy, operation, s)
        assert predicted.kept_bytes == pytest.approx(m.kept_bytes, rel=0.01)
        if s > 64:
            shorter = keyed[strategy, operation, s // 8].time_seconds
            assert m.time_seconds >= shorter * (1 - 1e-9)
        if strategy.endswith("+recompute"):
            assert m.kept_bytes == s // 2 * 64 * 2
    _plan_with(model)
    for a, b in zip(eager.measurements, fused.measurements, strict=True):
        assert a.kept_bytes == b.kept_bytes and a.forward_bytes >= b.forward_bytes
        if a.operation != "attention":  # FlashAttention's backward needs more: see below
            assert a.backward_bytes >= b.backward_bytes
    slow = "megatron_ts", "mlp", 4096
    held = [
        next(m for m in table.measurements if (m.strategy, m.operation, m.seq_length) == slow)
        for table in (eager, fused)
    ]
    assert held[0].backward_bytes > held[1].backward_bytes


def test_a_broken_strategy_of_another_package_is_left_out_with_why(tmp_path):
    """What the others cost stays what it is without it."""
    broken = "tests.simulator.broken_strategies"
    others = {name: f"{broken}:{name.upper()}" for name in ("late", "never", "unsure")}
    more = {"lengths": (128,), "packed": True}
    table = simulated(
        tmp_path / "with", GPT, 2, **more, others=others, strategies=(*others, "metp")
    )
    alone = simulated(tmp_path / "without", GPT, 2, **more, strategies=("metp",))
    of_parameters = alone.constants.static_bytes - alone.constants.waiting_bytes - 128 * 64 * 4
    numbers = alone.constants.optimizer_seconds / 38 * 0.8 * 2039e9
    assert of_parameters / numbers == pytest.approx(16)  # float32; with the gather buffer
    said = {(m.strategy, m.operation): m.status for m in table.measurements if not m.is_ok}
    unsure = (
        "unsupported: strategy unsure: check ends with KeyError: 'of all': repair its package, or "
    )
    assert said.pop(("never", "mlp")) == "unsupported: KeyError: 'of all'"
    assert set(said) == {("unsure", "attention"), ("unsure", "mlp")}
    assert all(status.startswith(unsure) for status in said.values())
    rows = {(m.strategy, m.status) for m in table.rows}
    ok = {("metp", "ok"), ("never", "ok"), ("local_z", "ok")}
    assert rows == ok | {("late", "unsupported: KeyError: 'of rows'")}
    kept = [m for m in table.measurements if m.strategy in ("model", "metp")]
    assert kept == list(alone.measurements)
    assert [m for m in table.rows if m.strategy not in others] == list(alone.rows)


def _plan_with(model) -> None:
    """With room enough the planner takes what the model says is fastest."""

    def costs(operation, strategy, s, b):
        found = model.operation(strategy, operation, s, b)
        return found.time_seconds, found.kept_bytes, found.forward_bytes, found.backward_bytes

    names = ("megatron_ts", "ulysses_z+recompute")
    policy = OptimalPolicy(names, CostSource(costs), StageMemory(10**12))
    fastest = min(names, key=lambda n: model.operation(n, "mlp", 4096).time_seconds)
    assert policy.plan(1, 4096, (1, 2, 3, 4))[2].mlp == fastest
