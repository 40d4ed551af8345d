"""Tables of docs/ against what the code computes: workspace by walks, named devices and links."""

from __future__ import annotations

import re

from megatron_paradyse.simulator.hardware import DEVICES
from megatron_paradyse.simulator.network import ANY, LINKS
from megatron_paradyse.strategies import sizes as sizes_module
from megatron_paradyse.strategies.accounting import operation_costs
from megatron_paradyse.strategies.sizes import LayerSizes
from tests.documentation.tables import check, table, tables

NAMES = {
    "MegatronTS": "megatron_ts",
    "UlyssesZ": "ulysses_z",
    "MegatronCZ": "megatron_cz",
    "ColossalZ": "colossal_z",
    "METP": "metp",
    "ZeRO-3": "megatron_cz",  # the three that gather weights share an MLP
}
IN_BRACKETS = re.compile(r" \(([0-9.]+)\)")


def in_units_of_u(name: str, s: int, suffix: str) -> list[float]:
    strategy, operation = name.split()
    layer = LayerSizes(s=s, b=1, h=4096, n=32, g=32, d=128, f=16384, p=8)
    costs = operation_costs(NAMES[strategy] + suffix, operation.lower(), layer)
    sent = (costs.forward_sent_bytes, costs.backward_sent_bytes)
    held = (costs.kept_bytes, costs.forward_bytes, costs.backward_bytes)
    return [value / layer.x for value in (*sent, *held)]


def test_workspace_of_the_strategies(monkeypatch):
    long, short, again = tables("strategies.md", "| | sent forward | sent")
    for rows, s, suffix in ((long, 1 << 18, ""), (short, 4096, ""), (again, 1 << 18, "+recompute")):
        for name, *cells in rows:
            check([IN_BRACKETS.sub("", cell) for cell in cells], in_units_of_u(name, s, suffix))
    monkeypatch.setattr(sizes_module, "TILE_ROWS", 1 << 40)  # as the text says: whole
    for name, *cells in again:
        for cell, whole in zip(cells, in_units_of_u(name, 1 << 18, "+recompute"), strict=True):
            check(IN_BRACKETS.findall(cell), [whole] * ("(" in cell))


def test_devices_and_links_that_have_names():
    rows = table("simulator.md", "| name | TFLOP/s")
    assert {name for name, *_ in rows} == set(DEVICES)
    for name, *cells, shares, link in rows:
        device = DEVICES[name]
        rates = (device.half_flops / 1e12, device.float32_flops / 1e12)
        memory = (device.bandwidth_bytes_per_second / 1e9, device.memory_bytes / 2**30)
        check(cells, [*rates, *memory, device.num_multiprocessors, device.matmul_efficiency])
        attention = [device.attention_forward_efficiency, device.attention_backward_efficiency]
        check(shares.removesuffix(" (assumed)").split(", "), attention)
        assert link == device.interconnect
    told = set()
    for names, rates, share, hop, joins, _ in table("simulator.md", "| name | GB/s, one"):
        for name, rate in zip(names.split(", "), rates.split(", "), strict=True):
            told.add(name)
            link = LINKS[name]
            numbers = [link.bytes_per_second / 1e9, link.efficiency, 1e6 * link.hop_seconds]
            check([rate, share, hop.removesuffix(" µs")], numbers)
            assert joins == ("any" if link.max_ranks == ANY else str(link.max_ranks))
    assert told == set(LINKS)
