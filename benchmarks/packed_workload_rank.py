"""One rank of benchmarks/packed_workload.py."""

from __future__ import annotations

import functools
import gc
import json
import os
import statistics
import time

import numpy as np

from benchmarks.iterations import end_rank, say, seconds_of, start_rank, strategies_of
from benchmarks.packed_workload_ratios import PACKED, UNPACKED, ratios
from megatron_paradyse.costs.cost_file import read_cost_file
from megatron_paradyse.costs.row_costs import RowCosts
from megatron_paradyse.costs.table import ATTENTION
from megatron_paradyse.packing.load import load_of
from megatron_paradyse.packing.row import Row
from megatron_paradyse.policy import FixedPolicy
from megatron_paradyse.settings import Settings
from megatron_paradyse.units import parse_bytes

# A strategy of which one operation alone is predicted to need more than this many budgets is not
# tried: the machine's memory, not the emulated one, would end it.
FAR_BEYOND = 2.0
LOCAL = "local_z"  # runs rows of which no document is on two ranks


def main() -> None:
    task = json.loads(os.environ["PACKED_WORKLOAD"])
    start_rank()
    end_rank(task["output"], Workload(task).run())


class Documents:
    """Random tokens of given lengths, as data/documents.py's stream."""

    def __init__(self, lengths: list[int], vocab_size: int):
        self._lengths, self._vocab_size = lengths, vocab_size

    def length(self, position: int) -> int:
        return self._lengths[position]

    def tokens(self, position: int) -> np.ndarray:
        random = np.random.default_rng(position)
        return random.integers(self._vocab_size, size=self._lengths[position] + 1)


class Workload:
    """One model, its global batches packed and not, and every policy that trains it."""

    def __init__(self, task: dict):
        from megatron.core.utils import unwrap_model
        from megatron.training import get_args

        from megatron_paradyse.live_bytes import make_meter
        from megatron_paradyse.packing.pack import Grid
        from megatron_paradyse.packing.placement import alignment
        from megatron_paradyse.profiler import model as profiled

        self.task, args = task, get_args()
        self._costs_file = read_cost_file(task["costs"])
        self.budget = parse_bytes(task["budget"])
        self._meter = make_meter()
        with self._meter:
            before = self._meter.live_bytes
            self._model = profiled.build_model(args.num_layers)
            profiled.step_without_microbatches(self._model)
            gc.collect()
            self._before = before
        self._chunks = [unwrap_model(chunk) for chunk in self._model.chunks]
        p = args.tensor_model_parallel_size
        self.grid = Grid(p=p, hidden_size=args.hidden_size, alignment=alignment(p))
        self._vocab_size = args.vocab_size

    def run(self) -> dict:
        solve = [self._solve_seconds(lengths) for lengths in self.task["solved"]]
        costs = self._costs()
        names = self.task["fixed"] or strategies_of(self._costs_file.require_model())
        self.policies = {name: FixedPolicy(name) for name in names}
        self.policies |= {UNPACKED: self._optimal(), PACKED: self._optimal()}
        batches = self.task["lengths"]
        packings = [self._pack(lengths, None, costs) for lengths in batches]
        alone = [self._pack(lengths, 1, costs) for lengths in batches]
        shares = {
            PACKED: [self._share(*pair) for pair in zip(batches, packings, strict=True)],
            UNPACKED: [self._share(*pair) for pair in zip(batches, alone, strict=True)],
        }
        peaks = {name: self._peak(name, shares) for name in self.policies}
        running = [name for name, peak in peaks.items() if peak is not None and peak <= self.budget]
        say(f"running {running}; peaks {peaks}")
        seconds = self._train(running, shares)
        return {
            **ratios(seconds, peaks),
            "solve_seconds_per_global_batch": statistics.median(wall for wall, _ in solve),
            "solve_seconds": [wall for wall, _ in solve],
            "solve_cpu_seconds": [cpu for _, cpu in solve],
            "documents": sum(map(len, batches)),
            "tokens": sum(map(sum, batches)),
            "microbatches": [len(packing.replicas[0]) for packing in packings],
            "budget_tokens": [packing.tokens for packing in packings],
            "rows": [self._rows(*pair) for pair in zip(batches, packings, strict=True)],
        }

    # -- packing

    def _costs(self):
        """As a training's, which has asked for nothing yet."""
        from megatron_paradyse.packing.pack import Costs
        from megatron_paradyse.packing.placement import place

        policies = self._cost_policies()

        def alone(tokens: int) -> float:
            seconds = policies.row_seconds(place([tokens], self.grid.p, causal=True))
            return policies.microbatch_seconds(1, tokens) if seconds is None else seconds

        return Costs(policies.row_seconds, alone)

    def _pack(self, lengths: list[int], tokens: int | None, costs):
        from megatron_paradyse.packing.pack import pack

        return pack(lengths, tokens, self.grid, costs)

    def _solve_seconds(self, lengths: list[int]) -> tuple[float, float]:
        """Of a global batch's packing, by costs that nobody has asked before: by the clock, CPU."""
        import torch

        costs = self._costs()
        torch.distributed.barrier()
        spent = (0.0, 0.0)
        if (
            torch.distributed.get_rank() == 0
        ):  # alone: a training's ranks pack on cores of their own
            start = time.perf_counter(), time.process_time()
            packing = self._pack(lengths, None, costs)
            spent = time.perf_counter() - start[0], time.process_time() - start[1]
            say(f"{len(lengths)} documents packed by {packing.tokens} tokens: {spent}")
        torch.distributed.barrier()
        return spent

    def _share(self, lengths: list[int], packing):
        from megatron_paradyse.data.loader import BatchSizes
        from megatron_paradyse.data.packed import PackedShares

        shares = PackedShares(
            Documents(lengths, self._vocab_size),
            lambda _: packing,
            sizes=BatchSizes.constant(len(lengths)),
            replica=0,
            alignment=self.grid.alignment,
        )
        return shares[0]

    def _rows(self, lengths: list[int], packing) -> list[dict]:
        """What the packed microbatches of a global batch are, and how they are planned."""
        rows = []
        layers = tuple(range(1, len(self._chunks[0].decoder.layers) + 1))
        for made in packing.replicas[0]:
            held = [lengths[number] for number in made.documents]
            s = made.row.seq_length if made.row else -(-held[0] // self.grid.alignment)
            s = s if made.row else s * self.grid.alignment
            more = {} if made.row is None else {"row": made.row}
            plan = self.policies[PACKED].plan(1, s, layers, **more)
            rows.append({"documents": len(held), "tokens": sum(held), "s": s, "plan": plan.runs()})
        return rows

    # -- policies

    def _cost_policies(self):
        from megatron.training import get_args

        from megatron_paradyse.train.choosing import CostPolicies

        chosen = Settings(
            cost_model=self.task["costs"],
            memory_budget=self.task["budget"],
            accept_costs=True,
            correction=False,
        )
        return CostPolicies(chosen, get_args())

    def _optimal(self):
        return self._cost_policies().policy_of(self._chunks[0].decoder, self._chunks)

    # -- iterations

    def _step(self, name: str, share) -> None:
        # of the hooks of every layer
        self._model.policy.plan = self.policies[name].plan  # type: ignore[method-assign]
        from megatron_paradyse.profiler.iterations import train_share

        train_share(self._model, share)

    def _seconds(self, name: str, share) -> float:
        """One iteration on a global batch, planning included; the slowest rank's."""
        return seconds_of(functools.partial(self._step, name, share))

    def _peak(self, name: str, shares: dict) -> float | None:
        """Bytes alive at most, the largest rank's; None where it cannot run the microbatches."""
        from megatron.core.parallel_state import get_global_memory_buffer

        from megatron_paradyse.packing.work import keys_received
        from megatron_paradyse.profiler.model import largest_over_ranks

        rows = [made.row for share in shares[PACKED] for made in share.microbatches]
        stays = all(row is not None and not any(keys_received(row)) for row in rows)
        if name.startswith(LOCAL) and not stays:
            return None
        fixed = isinstance(self.policies[name], FixedPolicy)
        predicted = max(map(functools.partial(self._attention_bytes, name), rows)) if fixed else 0.0
        if predicted > FAR_BEYOND * self.budget:
            return predicted
        peaks = []
        for share in shares.get(name, shares[PACKED]):
            with self._meter:
                get_global_memory_buffer().buffer.clear()
                gc.collect()
                self._meter.reset_peak()
                self._step(name, share)
                peaks.append(largest_over_ranks([self._meter.peak_bytes - self._before])[0])
        return max(peaks)

    def _attention_bytes(self, name: str, row: Row | None) -> float:
        """Predicted for one layer's attention alone."""
        if row is None:
            return 0.0
        load = load_of(row, causal=True)
        found = RowCosts(self._costs_file.require_model(), load)(name, ATTENTION, load.seq_length)
        return found.kept_bytes + max(found.forward_bytes, found.backward_bytes)

    def _train(self, names: list[str], shares: dict) -> dict[str, list[list[float]]]:
        """name -> global batch -> seconds of each round."""
        seconds: dict = {name: [[] for _ in shares[PACKED]] for name in names}
        for turn in range(self.task["rounds"]):
            for number in range(len(shares[PACKED])):
                for name in names:
                    share = shares.get(name, shares[PACKED])[number]
                    seconds[name][number].append(self._seconds(name, share))
            say(f"round {turn + 1} of {self.task['rounds']}")
        return seconds


if __name__ == "__main__":
    main()
