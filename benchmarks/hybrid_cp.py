"""An estimate: packed ParaDySe against Megatron's hybrid context parallel scheduler.

Nothing runs: both are priced by the same simulated costs of LLaMA (the paper's, 7B) on A100 80 GB,
on the same documents. The peer's schedule is Megatron's own (BalancedCPScheduler), priced to its
advantage: see reproduction/peer.py. No packed row was simulated: what they save by exchanging less
is not taken off, and there is no local_z. ParaDySe has groups of 8 ranks, and as many replicas as
there are such groups. Neither pays for gradients and the optimizer. The ratio is the peer's seconds
over ParaDySe's: above 1 ParaDySe is the faster. spread_ratio: with long documents over 2, 4 or 8
replicas (--paradyse-spread), whichever is fastest or none; all keys that come to a rank then pass
through one port of BETWEEN_NODES, also those of the same node, hidden behind computing.

    .venv/bin/python benchmarks/hybrid_cp.py --json
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.common import finish, made_folder, options
from megatron_paradyse.data.distributions import draw_lengths
from megatron_paradyse.packing.pack import Costs, Grid, pack
from megatron_paradyse.packing.placement import place
from megatron_paradyse.packing.wide import pack_wide
from megatron_paradyse.planner.from_file import ALIGNMENT
from megatron_paradyse.planner.row_prices import RowPrices
from megatron_paradyse.preview.forecast import edge_seconds
from megatron_paradyse.preview.setup import Setup, make_setup
from megatron_paradyse.simulator.network import LINKS
from megatron_paradyse.strategies import RECOMPUTE
from reproduction import costs
from reproduction.peer import RING, Peer, simulate

MODEL = "llama"
P = 8  # ranks of a tensor-parallel group
RANKS = (8, 16, 32, 64)
SPREADS = (2, 4, 8)
BETWEEN_NODES = "infiniband-hdr"
DOCUMENTS_PER_GROUP, FEW = 128, 16  # of a global batch, for every 8 ranks
PUBLISHED_CAP = 2048  # tokens of a rank in the benchmark with the lognormal lengths
LOGNORMAL = {"low": 128, "high": 8192, "mean": 1024, "sigma": 1.5}


def main() -> None:
    parser = options(__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", type=made_folder, help="with simulated cost files kept from before"
    )
    arguments = parser.parse_args()
    if arguments.quick and arguments.folder is None:
        result = quick_estimate()
    else:
        result = estimate(RANKS[:1] if arguments.quick else RANKS, folder=arguments.folder)
    finish("hybrid_cp", result, {"model": MODEL, "p": P, "costs": costs.HARDWARE}, arguments)


def quick_estimate() -> dict:
    """Few ranks, few documents, few simulated lengths: nothing of it is kept."""
    with tempfile.TemporaryDirectory() as folder:
        of_model = costs.ModelCosts(MODEL, Path(folder), coarse=True)
        return estimate(RANKS[:1], of_model=of_model, documents=(DOCUMENTS_PER_GROUP // 4, FEW))


def workloads(count: int) -> dict[str, list[int]]:
    """Lengths of documents by workload."""
    random = np.random.default_rng(11)
    mu = math.log(LOGNORMAL["mean"]) - LOGNORMAL["sigma"] ** 2 / 2
    lognormal = random.lognormal(mu, LOGNORMAL["sigma"], count)
    drawn = {
        "githubcode": draw_lengths("githubcode", count, 1.0, random),
        "grch38": draw_lengths("grch38", count, 1.0, random),
        "lognormal": lognormal.clip(LOGNORMAL["low"], LOGNORMAL["high"]),
        "uniform-4k-64k": random.uniform(4096, 65536, count),
    }
    return {name: [int(tokens) for tokens in lengths] for name, lengths in drawn.items()}


def estimate(
    ranks: tuple[int, ...] = RANKS,
    *,
    folder: Path | None = None,
    of_model: costs.ModelCosts | None = None,
    documents: tuple[int, int] = (DOCUMENTS_PER_GROUP, FEW),
) -> dict:
    """The ratio by workload and ranks, and their geometric means; "few": of few documents.

    folder: of the simulated costs, unless of_model says which; documents: for every 8 ranks, many
    and few.
    """
    folder = folder or costs.ROOT / "build" / "reproduction" / costs.sources_digest()
    of_model = of_model or costs.ModelCosts(MODEL, folder)
    of_model.folder.mkdir(parents=True, exist_ok=True)
    simulate([of_model])
    setup = make_setup(str(of_model.path()), {"policy": "optimal", "offload": False})
    rows, found = [], {}
    for label, each in zip(("", "few_"), documents, strict=True):
        of_label = []
        for num_ranks in ranks:
            peers = [Peer(of_model, name, num_ranks) for name in (RING, RING + RECOMPUTE)]
            for name, lengths in workloads(each * num_ranks // P).items():
                row = compare(setup, peers, lengths, num_ranks)
                of_label.append({"workload": name, "ranks": num_ranks, **row})
                print(json.dumps(of_label[-1]), file=sys.stderr)
        for kind in ("ratio", "spread_ratio"):
            ratios = [row[kind] for row in of_label]
            found[f"hybrid_cp_estimate_{label}{kind}"] = statistics.geometric_mean(ratios)
            found[f"hybrid_cp_estimate_{label}{kind}_min"] = min(ratios)
            found[f"hybrid_cp_estimate_{label}{kind}_max"] = max(ratios)
        rows += of_label
    return {**found, "source": "an estimate: simulated costs, nothing ran", "estimates": rows}


def compare(setup: Setup, peers: list[Peer], lengths: list[int], num_ranks: int) -> dict:
    """One global batch of the documents that both can hold, ParaDySe without spreading any."""
    most = max(peer.max_tokens for peer in peers)
    grid = Grid(
        p=P,
        hidden_size=setup.description.model.hidden_size,
        num_replicas=num_ranks // P,
        alignment=2 * P,
    )
    price = costs_of(setup)
    fitting = [t for t in lengths if t <= most and price.row(one_document(t)) is not None]
    fitting = fitting[: len(fitting) // grid.num_replicas * grid.num_replicas]
    start = time.perf_counter()
    packing = pack(fitting, None, grid, price)
    solved = time.perf_counter() - start
    by_spread = {1: packing.seconds}
    for spread in (n for n in SPREADS if n <= grid.num_replicas):
        wide = pack_wide(fitting, None, dataclasses.replace(grid, spread=spread), price)
        by_spread[spread] = wide.seconds
    found = {
        f"{peer.strategy}, {limit} tokens a rank": peer.scheduled_seconds(
            fitting, limit, len(fitting)
        )[0]
        for peer in peers
        for limit in limits(peer, max(fitting))
    }
    best = min(found, key=lambda name: found[name])
    return {
        "documents": len(fitting),
        "left_out": len(lengths) - len(fitting),
        "tokens": sum(fitting),
        "longest_tokens": max(fitting),
        "paradyse_seconds": packing.seconds,
        "budget_tokens": packing.tokens,
        "microbatches": len(packing.replicas[0]),
        "solve_seconds": solved,
        "peer_seconds": found[best],
        "peer": best,
        "ratio": found[best] / packing.seconds,
        "paradyse_seconds_by_spread": by_spread,
        "spread_ratio": found[best] / min(by_spread.values()),
    }


def limits(peer: Peer, longest_tokens: int) -> list[int]:
    """What a rank may be set to hold: what it can, halves of it, and the published cap."""
    halves = {peer.tokens_per_rank // 2**i for i in range(peer.ranks.bit_length())}
    halves.add(min(PUBLISHED_CAP, peer.tokens_per_rank))
    return sorted(limit for limit in halves if limit * peer.ranks >= longest_tokens)


def costs_of(setup: Setup) -> Costs:
    """Of rows on a group of the setup, and wide ones, as training predicts them."""
    model = setup.policies.model
    assert model.packed is not None
    rate = LINKS[BETWEEN_NODES].rate
    packed = dataclasses.replace(model.packed, wide_bytes_per_second=rate)
    setup.policies.model = model.with_rows(packed)
    prices = RowPrices(
        setup.policies.policy(setup.stage, smooth=False),
        setup.policies.model,
        setup.layers,
        alignment=ALIGNMENT,
        edge_seconds=lambda s: edge_seconds(setup, s, 1),
    )

    def alone(tokens: int) -> float:
        seconds = prices.seconds(one_document(tokens))
        assert seconds is not None, "documents that do not fit are left out"
        return seconds

    return Costs(prices.seconds, alone)


@functools.cache
def one_document(tokens: int):
    return place([tokens], P, causal=True, alignment=2 * P)


if __name__ == "__main__":
    main()
