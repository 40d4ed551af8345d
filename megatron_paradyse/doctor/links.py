"""How GPUs reach each other: links within this machine, and what it has for the others."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_paradyse.doctor import LACK, OK, SKIP, Check
from megatron_paradyse.doctor.tool import output_of
from megatron_paradyse.units import counted

# In nvidia-smi's words, from quick to slow: NV18 is 18 NVLinks; the others are PCIe, with no or one
# bridge, with several, through the host bridge, between those of a NUMA node, between NUMA nodes.
PCIE = ("PIX", "PXB", "PHB", "NODE", "SYS")
DEVICES = Path("/sys/class/infiniband")
VISIBLE = "CUDA_VISIBLE_DEVICES"
NOT_KNOWN = "not known which GPUs NVLink joins"
ACROSS = (
    "on all nodes, torchrun --nnodes N ... -m megatron_paradyse profile network --output "
    "network.json measures it"
)


def links(num_gpus: int, torch: dict[str, Any]) -> list[Check]:
    """The checks, for the GPUs that torch sees; torch: what probe.py answers."""
    if num_gpus == 0:
        return []
    between = _between_nodes()
    if num_gpus == 1:
        return [between]
    peers = _peers(torch.get("pairs_apart") or [])
    devices = _devices(num_gpus)
    if devices is None:
        found = f"{VISIBLE} names GPUs otherwise than by number"
        return [Check("links", SKIP, found, NOT_KNOWN, _measure(num_gpus)), *peers, between]
    kinds = read_matrix(output_of("nvidia-smi", "topo", "-m"), devices)
    return [_within(kinds, num_gpus), *peers, between]


def _devices(num_gpus: int) -> list[int] | None:
    """nvidia-smi's numbers of the GPUs that torch sees, in torch's order; None: not known."""
    named = os.environ.get(VISIBLE)
    if named is None:
        return list(range(num_gpus))
    numbers = [name.strip() for name in named.split(",")][:num_gpus]
    return [int(number) for number in numbers] if all(map(str.isdecimal, numbers)) else None


def read_matrix(text: str, devices: Sequence[int]) -> dict[tuple[int, int], str]:
    """Kinds of link by pair of GPUs, from `nvidia-smi topo -m`; {} if it is not understood.

    devices: nvidia-smi's numbers of GPUs 0, 1, ... of the pairs.
    """
    rows: dict[int, list[str]] = {}
    for line in text.splitlines():
        cells = re.sub(r"\x1b\[[0-9;]*m", "", line).split()
        match = re.fullmatch(r"GPU(\d+)", cells[0]) if cells else None
        if match is not None and cells[1 + int(match[1]) :][:1] == ["X"]:  # not the header
            rows[int(match[1])] = cells[1:]
    if not all(device in rows and max(devices) < len(rows[device]) for device in devices):
        return {}
    kinds = {
        (i, j): rows[devices[i]][devices[j]]
        for i, j in itertools.combinations(range(len(devices)), 2)
    }
    known = all(kind in PCIE or re.fullmatch(r"NV\d+", kind) for kind in kinds.values())
    return kinds if known else {}


def _within(kinds: dict[tuple[int, int], str], num_gpus: int) -> Check:
    name = "links"
    if not kinds:
        return Check(name, LACK, "nvidia-smi topo -m says nothing", NOT_KNOWN, _measure(num_gpus))
    counts = Counter(kinds.values())
    ordered = sorted(counts, key=_slowness)
    if len(counts) == 1:
        found = f"{ordered[0]} between all pairs"
    else:
        found = ", ".join(f"{kind}: {counted(counts[kind], 'pair')}" for kind in ordered)
    slow = [pair for pair, kind in kinds.items() if kind in PCIE[2:]]
    if not slow:
        return Check(name, OK, found)
    together = largest_group(kinds, num_gpus)
    pair = "GPU{}-GPU{}".format(*slow[0])
    if together > 1:
        remedy = f"--tensor-model-parallel-size {together} keeps each group on quick links"
    else:
        remedy = f"{_measure(num_gpus)}: measured costs know it"
    joined = f"the host joins {counted(len(slow), 'pair')}, such as {pair}"
    cost = f"{joined}: a group over them waits for that"
    return Check(name, LACK, found, cost, remedy)


def _slowness(kind: str) -> tuple[int, int]:
    return (PCIE.index(kind), 0) if kind in PCIE else (-1, -int(kind[2:]))


def _measure(num_gpus: int) -> str:
    return f"megatron-paradyse profile network --nproc {num_gpus} --output network.json measures it"


def largest_group(kinds: dict[tuple[int, int], str], num_gpus: int) -> int:
    """The largest size of equal groups of neighbours (as ranks are dealt) on quick links alone."""
    for size in range(num_gpus, 0, -1):
        groups = [range(first, first + size) for first in range(0, num_gpus, size)]
        if num_gpus % size == 0 and all(
            kinds[pair] not in PCIE[2:] for g in groups for pair in itertools.combinations(g, 2)
        ):
            return size
    return 1


def _peers(apart: list[list[int]]) -> list[Check]:
    if not apart:
        return []
    pair = "GPU{}-GPU{}".format(*apart[0])
    found = f"{counted(len(apart), 'pair')}, such as {pair}, cannot read each other's memory"
    cost = "NCCL copies through the host's memory between them"
    return [Check("peer access", LACK, found, cost, "nvidia-smi topo -p2p r says why")]


def _between_nodes(devices: Path = DEVICES) -> Check:
    """What this machine has for it; whether another machine answers is not asked."""
    ports = [
        f"{port.parent.parent.name} {_word(port, 'link_layer')} {_word(port, 'rate')}"
        for port in sorted(devices.glob("*/ports/*"))
        if "ACTIVE" in _word(port, "state")
    ]
    found = "; ".join(ports) or f"no active port in {devices}"
    name, found = "links between nodes", f"{found}; not checked: this looks at one machine"
    cost = "NCCL uses these" if ports else "NCCL uses sockets, unless a plugin of its own is there"
    return Check(name, SKIP, found, cost, ACROSS)


def _word(port: Path, name: str) -> str:
    try:
        return (port / name).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return "?"
