"""A peer, estimated: Megatron's hybrid context parallelism on the same documents.

Its own scheduler (BalancedCPScheduler) assigns the documents of each global batch to 1, 2, 4 or 8
of the 8 ranks; nothing of it runs. A price of that schedule, everywhere to the peer's advantage:

seconds   a document on c ranks takes what this package's ring (megatron_cz) is simulated to take
          for p = c over a network without latency and limit: no gather of weights, which hybrid CP
          holds whole, and a ring that is hidden entirely. A global batch takes the sum over its
          groups of the slowest rank's, and no seconds for barriers, gradients or the optimizer.
memory    parameters and their float32 gradients whole, 2 + 4 bytes, and 12 of optimizer state over
          the 8 ranks (a distributed optimizer); activations and workspace as simulated for p = c,
          head in tiles; the ring's gathered copy of a layer's weights is counted besides. What a
          rank may hold is that, or a half, a quarter, an eighth: the fastest schedule counts.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_paradyse.costs.cost_file import read_cost_file, write_cost_file
from megatron_paradyse.costs.description import ELEMENT_BYTES, Description
from megatron_paradyse.costs.fitting import fit_table
from megatron_paradyse.planner.from_file import ALIGNMENT, planned_length
from megatron_paradyse.planner.pipeline import parameters
from megatron_paradyse.planner.problem import Outcome
from megatron_paradyse.preview.forecast import alone, edge_seconds
from megatron_paradyse.preview.longest import longest
from megatron_paradyse.preview.setup import Setup, make_setup
from megatron_paradyse.simulator.network import COLLECTIVES, AlphaBeta, Network, write_network
from megatron_paradyse.strategies import RECOMPUTE
from reproduction import costs
from reproduction.documents import document_lengths, in_order
from reproduction.frameworks import MOST_TOKENS, Runner, ours, until_out_of_memory
from reproduction.names import SHUFFLED, SIMULATED
from reproduction.tables import of_panels, origin, update_table

COLUMNS = (
    *("model", "distribution", "peer", "global_batch", "documents", "documents_that_fit"),
    *("max_tokens", "static_bytes", "peer_seconds", "busy_share", "paradyse_seconds"),
)
SIZES = (1, 2, 4, 8)
RING = "megatron_cz"
TOKENS = (512, 4 << 10, 16 << 10, 64 << 10, 256 << 10)  # of a rank, at which costs are simulated
GLOBAL_BATCH = 100  # documents
WHOLE_BYTES, SHARED_BYTES = 2 + 4, 12  # of a parameter: on every rank, and over all of them
FREE_BYTES_PER_SECOND = 1e15


def run(arguments: argparse.Namespace) -> None:
    """Write peer-simulated.csv."""
    all_costs = costs.simulated_costs(arguments.models)
    simulate(all_costs.values())
    rows = [
        row
        for one in all_costs.values()
        for distribution in arguments.distributions
        for row in _rows(one, distribution)
    ]
    update_table(
        arguments.output / "peer-simulated.csv",
        COLUMNS,
        rows,
        made=origin(SIMULATED, f"{costs.HARDWARE}; an estimate"),
        replaces=of_panels(arguments.models, arguments.distributions),
    )


def simulate(all_costs: Iterable[costs.ModelCosts]) -> None:
    """The costs that peers of these models take, those that are missing, two at once."""
    with ThreadPoolExecutor(costs.AT_ONCE) as pool:
        wanted = [(c, size) for c in all_costs if state_fits(c) for size in SIZES]
        list(pool.map(lambda pair: _cost_file(*pair), wanted))


def _rows(of_model: costs.ModelCosts, distribution: str) -> list[dict]:
    lengths = [int(t) for t in in_order(document_lengths(distribution), SHUFFLED)]
    ran = until_out_of_memory(Runner(of_model, ours()).run(sorted(set(lengths))))
    seconds = {one.tokens: one.seconds for one in ran}
    static_bytes = static_bytes_of(read_cost_file(of_model.path()).table.description)
    rows = []
    for strategy in (RING, RING + RECOMPUTE):
        peer = Peer(of_model, strategy)
        fitting = [t for t in lengths if t <= peer.max_tokens and t in seconds]
        taken, busy = peer.schedule_seconds(fitting) if fitting else (None, None)
        rows.append(
            {
                "model": of_model.model,
                "distribution": distribution,
                "peer": "hybrid CP" + strategy.removeprefix(RING),
                "global_batch": GLOBAL_BATCH,
                "documents": len(lengths),
                "documents_that_fit": len(fitting),
                "max_tokens": peer.max_tokens,
                "static_bytes": int(static_bytes),
                "peer_seconds": taken,
                "busy_share": busy,
                "paradyse_seconds": sum(seconds[t] or 0.0 for t in fitting) if fitting else None,
            }
        )
    return rows


class Peer:
    """Hybrid CP of one model, every rank with one kind of attention and MLP.

    ranks: a power of two, 8 at least; a document on more than 8 ranks is assumed to take as much
    less than on 8. tokens_per_rank: what a rank can hold of a document, the least over the sizes of
    groups.
    """

    def __init__(self, of_model: costs.ModelCosts, strategy: str, ranks: int = SIZES[-1]):
        self.strategy, self.ranks = strategy, ranks
        self.setups: dict[int, Setup] = {}
        self.tokens_per_rank = 0
        if state_fits(of_model):
            for size in SIZES:
                path = str(_cost_file(of_model, size))
                flags = {"policy": "optimal"} | self._budget(path)
                self.setups[size] = make_setup(path, flags)
            self.tokens_per_rank = min(self._most(size) // size for size in SIZES)
        self.max_tokens = ranks * self.tokens_per_rank
        self._seconds: dict[tuple[int, int], float] = {}

    def _budget(self, path: str) -> dict[str, str]:
        """Of a rank, more by what it holds less of the optimizer than on 8 ranks."""
        setup = make_setup(path, {"policy": "optimal"})
        saved = static_bytes_of(setup.description) - static_bytes_of(setup.description, self.ranks)
        return {"memory_budget": f"{int(setup.stage.budget_bytes + saved)}B"} if saved else {}

    def schedule_seconds(self, lengths: Sequence[int]) -> tuple[float, float]:
        """Of all global batches, and the share of it in which ranks are busy.

        The fastest of what a rank may be set to hold at most.
        """
        longest_tokens = max(lengths)
        limits = [self.tokens_per_rank // 2**i for i in range(self.ranks.bit_length())]
        limits = [limit for limit in limits if self.ranks * limit >= longest_tokens]
        return min(self.scheduled_seconds(lengths, limit) for limit in limits)

    def scheduled_seconds(
        self, lengths: Sequence[int], tokens_per_rank: int, global_batch: int = GLOBAL_BATCH
    ) -> tuple[float, float]:
        """The same with ranks that are set to hold so many tokens of a document."""
        total = busy = 0.0
        for start in range(0, len(lengths), global_batch):
            batch = dict(enumerate(lengths[start : start + global_batch]))
            for group in schedule(batch.items(), tokens_per_rank, self.ranks):
                seconds = [
                    sum(self._document_seconds(batch[document], size) for document, size in rank)
                    for rank in group
                ]
                total, busy = total + max(seconds), busy + sum(seconds) / self.ranks
        return total, busy / total

    def _document_seconds(self, tokens: int, size: int) -> float:
        if size > SIZES[-1]:
            return self._document_seconds(tokens, SIZES[-1]) * SIZES[-1] / size
        key = (planned_length(tokens), size)
        if key not in self._seconds:
            setup = self.setups[size]
            outcome = self._alone(setup, key[0])
            self._seconds[key] = outcome.seconds + edge_seconds(setup, key[0], 1)
        return self._seconds[key]

    def _alone(self, setup: Setup, tokens: int) -> Outcome:
        problem = setup.policy.problem(setup.layers, 1, tokens, False)
        return alone(problem, [self.strategy])[self.strategy]

    def _most(self, size: int) -> int:
        return longest(
            lambda tokens: self._alone(self.setups[size], tokens).fits, ALIGNMENT, most=MOST_TOKENS
        )


def schedule(
    documents: Iterable[tuple[int, int]], tokens_per_rank: int, ranks: int = SIZES[-1]
) -> list[list[list[tuple[int, int]]]]:
    """Groups, in each for every rank the documents it works on, and on how many ranks each runs.

    documents: (id, tokens). Megatron's own scheduler; nothing is sent or run.
    """
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    class Group:
        def size(self) -> int:
            return ranks

    scheduler = BalancedCPScheduler(tokens_per_rank, Group())
    with contextlib.redirect_stdout(sys.stderr):
        _, groups = scheduler.get_groups_and_subsamples(list(documents), None)
    found = []
    for group in groups:
        sizes: dict[int, int] = {}
        for rank in group:
            for document in rank:
                sizes[document] = sizes.get(document, 0) + 1
        found.append([[(document, sizes[document]) for document in rank] for rank in group])
    return found


def _cost_file(of_model: costs.ModelCosts, size: int) -> Path:
    """Fitted costs of the ring on so many ranks, with hybrid CP's static bytes."""
    path = of_model.folder / f"{of_model.model}-peer-{size}.json"
    if path.is_file():
        return path
    raw = path.with_name(f"{path.stem}-raw.json")
    simulated = TOKENS[::2] if of_model.coarse else TOKENS
    flags = ["--lengths", ",".join(str(size * tokens) for tokens in simulated)]
    flags += ["--strategies", f"{RING},{RING}{RECOMPUTE}"]
    if size > 1:
        network = path.with_name(f"{path.stem}-network.json")
        free = {name: AlphaBeta(0.0, FREE_BYTES_PER_SECOND) for name in COLLECTIVES}
        write_network(str(network), Network("free", size, "assumed: free", free))
        flags += ["--interconnect", str(network)]
    costs.run_simulator(raw, of_model.model, flags, ranks=size)
    table = read_cost_file(raw).table
    # The planner takes the gather buffer of the longest profiled length out of static bytes.
    shape = table.description.model
    buffer = max(table.lengths()) * shape.hidden_size * ELEMENT_BYTES[costs.DTYPE]
    static_bytes = static_bytes_of(table.description) + (buffer if size > 1 else 0)
    constants = dataclasses.replace(table.constants, static_bytes=static_bytes)
    table = dataclasses.replace(table, constants=constants)
    write_cost_file(path, table, fit_table(table))
    return path


def state_fits(of_model: costs.ModelCosts) -> bool:
    """Whether a rank can hold the whole model at all."""
    setup = make_setup(str(of_model.path()), {"policy": "optimal"})
    return static_bytes_of(setup.description) < setup.stage.budget_bytes


def static_bytes_of(description: Description, ranks: int = SIZES[-1]) -> float:
    """Of one rank, which holds the whole model: matrices only, a tied vocabulary once."""
    count = parameters(description, description.model.num_layers)
    return count * (WHOLE_BYTES + SHARED_BYTES / ranks)
