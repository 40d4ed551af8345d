"""What communication costs: for every collective a + bytes / B, from a table or from a measurement.

Bytes are those that strategies count as sent (collectives.py): (p-1)/p of the larger of a
collective's input and output, twice that of an all_reduce, the whole message of an exchange, a
broadcast or a reduce. So B is what NCCL's benchmarks call bus bandwidth.

A named interconnect's times follow from its link: the ring algorithm's p-1 hops, and the share of
the link's rate that large messages reach. "nvlink4+infiniband-ndr" is NVLink in a node and
InfiniBand, a port per GPU, between. Ranks fill nodes one after another. As many rings as a node has
ports share a collective's bytes; an exchange is one message of each rank, the last of which arrives
over the slower link; and of an all-to-all each rank sends what goes to other nodes through its own
port.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from megatron_paradyse.costs.strict import (
    ContentError,
    check_fields,
    check_integer,
    check_keys,
    check_number,
    check_text,
    load_json,
)
from megatron_paradyse.errors import UserError
from megatron_paradyse.whole_file import write_whole

COLLECTIVES = (
    *("all_gather", "reduce_scatter", "all_to_all", "exchange"),
    *("broadcast", "reduce", "all_reduce"),
)
MAX_FILE_BYTES = 1 << 20
REMEDY = "make it again with megatron-paradyse profile network"


@dataclass(frozen=True)
class AlphaBeta:
    """seconds(sent bytes) = latency_seconds + bytes / bytes_per_second, of one collective."""

    latency_seconds: float
    bytes_per_second: float

    def seconds(self, sent_bytes: float) -> float:
        return self.latency_seconds + sent_bytes / self.bytes_per_second


@dataclass(frozen=True)
class Link:
    """One device's way to the others, in one direction.

    efficiency: the share of the rate that large messages reach. hop_seconds: of a step of a ring.
    max_ranks: how many devices it joins.
    """

    bytes_per_second: float
    hop_seconds: float
    efficiency: float
    max_ranks: int
    source: str

    @property
    def rate(self) -> float:
        """Bytes per second of large messages."""
        return self.bytes_per_second * self.efficiency


@dataclass(frozen=True)
class Network:
    """The collectives of one group of p ranks; source: a table's entry, or "measured".

    links: of a table's, within a node and between nodes.
    """

    name: str
    p: int
    source: str
    collectives: Mapping[str, AlphaBeta]
    links: tuple[Link, Link] | None = None

    def seconds(self, collective: str, sent_bytes: float) -> float:
        """Of one collective; nothing for a group of one rank."""
        return self.collectives[collective].seconds(sent_bytes) if self.p > 1 else 0.0

    def of_ranks(self, ranks: Sequence[int]) -> Network:
        """Of another group, those ranks of the job; this one where its links are not known."""
        if self.links is None or list(ranks) == list(range(self.p)):
            return self
        return _network_of_links(self.name, self.links, _by_node(self.links[0], ranks))


NODE, ANY = 8, 1 << 20
START_SECONDS = 8e-6  # of beginning any communication
# Rates are the makers'; hops and efficiencies are what public NCCL benchmarks commonly show.
LINKS: dict[str, Link] = {
    "nvlink3": Link(300e9, 2e-6, 0.75, NODE, "NVIDIA A100 datasheet: 600 GB/s both ways"),
    "nvlink3-a800": Link(200e9, 2e-6, 0.75, NODE, "NVIDIA A800 datasheet: 400 GB/s both ways"),
    "nvlink4": Link(450e9, 2e-6, 0.75, NODE, "NVIDIA H100 datasheet: 900 GB/s both ways"),
    "nvlink4-h800": Link(200e9, 2e-6, 0.75, NODE, "NVIDIA H800 datasheet: 400 GB/s both ways"),
    "nvlink5": Link(900e9, 2e-6, 0.75, NODE, "NVIDIA HGX B200 datasheet: 1.8 TB/s both ways"),
    "pcie4": Link(32e9, 4e-6, 0.65, NODE, "PCI Express 4.0: 16 lanes of 16 GT/s"),
    "pcie5": Link(64e9, 4e-6, 0.65, NODE, "PCI Express 5.0: 16 lanes of 32 GT/s"),
    "infiniband-hdr": Link(25e9, 5e-6, 0.85, ANY, "NVIDIA ConnectX-6 datasheet: 200 Gb/s"),
    "infiniband-ndr": Link(50e9, 5e-6, 0.85, ANY, "NVIDIA ConnectX-7 datasheet: 400 Gb/s"),
    "ethernet-100g": Link(12.5e9, 15e-6, 0.75, ANY, "IEEE 802.3ba: 100 Gb/s"),
}
# What joins nodes, where only the link within a node is named.
BETWEEN_NODES = {
    "nvlink3": "infiniband-hdr",
    "nvlink3-a800": "infiniband-hdr",
    "nvlink4": "infiniband-ndr",
    "nvlink4-h800": "infiniband-ndr",
    "nvlink5": "infiniband-ndr",
    "pcie4": "ethernet-100g",
    "pcie5": "ethernet-100g",
}


def find_network(text: str, p: int) -> Network:
    """A named interconnect, two joined by +, or a file of `profile network`, for p ranks."""
    if text.endswith(".json"):
        return read_network(text, p)
    names = text.split("+")
    for name in names:
        if name not in LINKS:
            raise UserError(
                f"no interconnect named {name!r}: use one of {', '.join(LINKS)}, two joined by + "
                "(within a node, between nodes), or a file of megatron-paradyse profile network"
            )
    within, between = names[0], names[-1]
    if len(names) == 1:
        between = BETWEEN_NODES.get(within, within)
    if len(names) > 2 or p > LINKS[between].max_ranks:
        raise UserError(f"{text} does not join {p} ranks: name a link between nodes after +")
    one_node = p <= LINKS[within].max_ranks
    name = within if one_node or within == between else f"{within}+{between}"
    links = LINKS[within], LINKS[between]
    return _network_of_links(name, links, _by_node(links[0], range(p)))


def free_network(p: int) -> Network:
    """Where communication takes no time."""
    return Network("none", p, "no time", {c: AlphaBeta(0.0, float("inf")) for c in COLLECTIVES})


def _by_node(within: Link, ranks: Sequence[int]) -> tuple[int, ...]:
    """How many of the ranks each node has that has any."""
    return tuple(Counter(rank // within.max_ranks for rank in ranks).values())


@functools.lru_cache(maxsize=64)
def _network_of_links(name: str, links: tuple[Link, Link], by_node: tuple[int, ...]) -> Network:
    """by_node: the group's ranks, and so ports, of each node."""
    within, between = links
    p, nodes, fewest, most = sum(by_node), len(by_node), min(by_node), max(by_node)
    rings = to_all = within.rate
    if nodes > 1:
        rings = min(within.rate, fewest * between.rate)
        inside, outside = (most - 1) / (p - 1), (p - fewest) / (p - 1)
        to_all = min(within.rate / inside if inside else within.rate, between.rate / outside)
    used = (within,) if nodes == 1 else (within, between)
    around = (p - nodes) * within.hop_seconds + (nodes - 1) * between.hop_seconds
    ring = AlphaBeta(START_SECONDS + around, rings)
    others = {
        "all_to_all": AlphaBeta(START_SECONDS + around, to_all),
        "exchange": AlphaBeta(
            START_SECONDS + 2 * max(link.hop_seconds for link in used),
            min(link.rate for link in used),
        ),
        "all_reduce": AlphaBeta(START_SECONDS + 2 * around, rings),
    }
    collectives = {c: others.get(c, ring) for c in COLLECTIVES}
    return Network(name, p, used[-1].source, collectives, links)


def read_network(path: str, p: int) -> Network:
    """A file of write_network for p ranks; UserError with what is wrong."""
    values, _ = load_json(path, max_bytes=MAX_FILE_BYTES, remedy=REMEDY)
    try:
        values = check_keys(values, "the file", ("name", "p", "source", "collectives"))
        found = check_keys(values["collectives"], "collectives", COLLECTIVES)
        for name, value in found.items():
            fields = check_fields(AlphaBeta, value, name)
            check_number(fields["latency_seconds"], f"{name}.latency_seconds", low=0, high=1e3)
            check_number(fields["bytes_per_second"], f"{name}.bytes_per_second", low=1, high=1e15)
        network = Network(
            check_text(values["name"], "name"),
            check_integer(values["p"], "p", low=2, high=1 << 20),
            check_text(values["source"], "source"),
            {name: AlphaBeta(**value) for name, value in found.items()},
        )
    except ContentError as error:
        raise UserError(f"{path}: {error}: {REMEDY}") from error
    if network.p != p:
        raise UserError(f"{path} was measured on {network.p} ranks, not {p}: {REMEDY} on {p} ranks")
    return network


def write_network(path: str, network: Network) -> None:
    """Write it whole, so that no reader finds a part."""
    values = {name: value for name, value in asdict(network).items() if name != "links"}
    write_whole(path, json.dumps(values, indent=1) + "\n")
