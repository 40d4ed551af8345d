"""Corrects costs while training runs: the same factors on every rank of the job."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from megatron.core import mpu
from megatron.training import print_rank_0

from megatron_paradyse.costs.correction import Correction, Observation, corrected
from megatron_paradyse.costs.model import CostModel
from megatron_paradyse.costs.row_costs import RowCosts
from megatron_paradyse.hook import Planned
from megatron_paradyse.packing.row import Row
from megatron_paradyse.planner.from_costs import CostsOf
from megatron_paradyse.planner.policies import OperationsOf
from megatron_paradyse.planner.sources import RowSource
from megatron_paradyse.strategies import base_name
from megatron_paradyse.train.telemetry import Microbatch

WARM_UP = 2  # iterations after a start that tell of kernels and buffers being made
EVERY = 4  # iterations
WORTH_TRIALS = 200  # iterations that are left, which trials of a few may make faster


class OnlineCorrection:
    """Collects what microbatches took; every few iterations all ranks agree on new factors.

    Collectives: over the whole job, so every rank must call after_iteration alike.
    """

    def __init__(
        self,
        strategies: Sequence[str],
        model: CostModel,
        *,
        operations: OperationsOf,
        rows: RowSource | None,
        aligned: Callable[[int], int],
        static_bytes: Callable[[], int],
        beside: Callable[[Planned], float],
        margin: float,
        renew: Callable[[], None],
        together: torch.distributed.ProcessGroup | None = None,
        experts_shared: bool = False,
    ):
        """operations: those of a layer; rows: what packed rows are planned as; aligned: the length
        that a length is; static_bytes: what a predicted peak holds beside the microbatch; beside:
        predicted seconds of what was measured with the layers. renew is called when other factors
        are in force. together: of replicas that wait for each other in the layers; experts_shared:
        and compute each other's tokens there.
        """
        self.correction = Correction(strategies)
        self._model, self._operations = model, operations
        self._rows, self._aligned, self._static_bytes = rows, aligned, static_bytes
        self._beside, self._margin, self._renew = beside, margin, renew
        self._together, self._experts_shared = together, experts_shared
        self._observations: list[Observation] = []
        self._places: list[int] = []  # of each, among all microbatches that were seen
        self._sizes: list[tuple[float, int]] = []  # of all: predicted seconds, tokens
        self._ran: set[str] = set()
        self._iterations = 0

    def after_iteration(self, microbatches: Sequence[Microbatch], *, left: int) -> bool:
        """Whether other factors are in force from the next microbatch on.

        left: iterations that follow this one.
        """
        self._iterations += 1
        compared = [place for place, m in enumerate(microbatches) if _compares(m)]
        observed = [self._observe(microbatches[place]) for place in compared]
        if self._iterations <= WARM_UP:
            return False
        self._observations += observed
        self._places += [len(self._sizes) + place for place in compared]
        self._sizes += [_size(m.planned) for m in microbatches]
        if self._iterations % EVERY:
            return False
        if self._together is not None:
            self._observations = self._of_the_longest(self._together)
        changed = self.correction.apply(self._agree(explore=left >= WORTH_TRIALS))
        if changed:
            ran = list(dict.fromkeys(n for o in self._observations for n in o.predicted_seconds))
            for line in (*self.correction.drifted(ran), *self.correction.trials()):
                print_rank_0(f"> paradyse: {line}")
            self._renew()
        self._observations, self._places, self._sizes = [], [], []
        return changed

    def _observe(self, microbatch: Microbatch) -> Observation:
        """Its prediction is divided among strategies as the costs of their operations are.

        The seconds of a wide row are of the way between replicas too, and of waiting for them;
        those in which a strategy runs first on this rank, of kernels and buffers being made.
        """
        planned = microbatch.planned
        assert planned.seconds and microbatch.seconds, "see _compares"
        names = {name for name, _ in planned.plan.halves(self._operations)}
        begins = not names <= self._ran
        self._ran |= names
        parts: defaultdict[str, float] = defaultdict(float)
        s, costs_of = self._aligned(planned.seq_length), self._costs_of(planned.row)
        for name, operation in planned.plan.halves(self._operations):
            costs = costs_of(name, operation, s, planned.batch_size)
            parts[base_name(name)] += costs.time_seconds
        whole = planned.seconds / sum(parts.values())
        measured: float | None = max(0.0, microbatch.seconds - self._beside(planned))
        if begins or (planned.row is not None and planned.row.groups > 1):
            measured = None
        return Observation(
            {name: seconds * whole for name, seconds in parts.items()},
            measured,
            self._peak_ratio(microbatch),
        )

    def _costs_of(self, row: Row | None) -> CostsOf:
        """With the factors in force."""
        costs_of: CostsOf = self._model.operation
        if row is not None and self._rows is not None:
            costs_of = RowCosts(self._model, self._rows.load(row))
        return corrected(costs_of, self.correction)

    def _peak_ratio(self, microbatch: Microbatch) -> float | None:
        measured, predicted = microbatch.peak_bytes, microbatch.planned.peak_bytes
        if measured is None or predicted is None or measured <= predicted * (1 + self._margin):
            return None
        static = self._static_bytes()
        return (measured - static) / max(predicted - static, 1)

    def _of_the_longest(self, group: torch.distributed.ProcessGroup) -> list[Observation]:
        """What tells of its own microbatch alone, where replicas run one each at a time.

        Seconds of one that was predicted to take less than another replica's are those of waiting
        for it; where another has more tokens, their bytes are on this rank too, if its experts
        compute them.
        """
        device = torch.cuda.current_device()
        largest = torch.tensor(self._sizes, dtype=torch.float64, device=device)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
        found, of_all = [], largest.tolist()
        for observation, place in zip(self._observations, self._places, strict=True):
            (seconds, tokens), (longest, most) = self._sizes[place], of_all[place]
            if seconds < longest:
                observation = replace(observation, measured_seconds=None)
            if self._experts_shared and tokens < most:
                observation = replace(observation, peak_ratio=None)
            found.append(observation)
        return found

    def _agree(self, *, explore: bool) -> np.ndarray:
        """New factors: sums over all ranks, computed on the first and sent to the others."""
        device = torch.cuda.current_device()
        sums = torch.tensor(self.correction.sums(self._observations), device=device)
        peaks = torch.tensor(self.correction.peaks(self._observations), device=device)
        torch.distributed.all_reduce(sums)
        torch.distributed.all_reduce(peaks, torch.distributed.ReduceOp.MAX)
        # The ranks of a tensor-parallel group have seen the same microbatches.
        sums /= mpu.get_tensor_model_parallel_world_size()
        found = self.correction.update(sums.cpu().numpy(), peaks.cpu().numpy(), explore=explore)
        values = torch.tensor(found, device=device)
        torch.distributed.broadcast(values, src=0)
        return values.cpu().numpy()


def _size(planned: Planned) -> tuple[float, int]:
    """Predicted seconds, and tokens."""
    return planned.seconds or 0.0, planned.batch_size * planned.seq_length


def _compares(microbatch: Microbatch) -> bool:
    """Whether it was predicted and measured: far out a published model may predict no time."""
    return bool(microbatch.planned.seconds and microbatch.seconds)
