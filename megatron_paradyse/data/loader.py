"""Microbatches of whole documents for Megatron's training loop.

Each data-parallel replica draws its own samples of a global batch, as Megatron's sampler deals
them; the first rank of each tensor-parallel group reads them and broadcasts (train/batch.py).
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from megatron_paradyse.data.balance import Seconds, deal
from megatron_paradyse.packing.row import aligned

WorkerStart = Callable[[int], None] | None  # called in a worker of the loader with its number


class Samples(Protocol):
    """By position, as a stream of documents.py: how many inputs count, and length + 1 tokens.

    Tokens are complements where they are not learnt.
    """

    def length(self, position: int) -> int: ...

    def tokens(self, position: int) -> np.ndarray: ...


def collate(samples: list[np.ndarray], alignment: int) -> dict[str, torch.Tensor]:
    """Pad samples of lengths + 1 tokens to one aligned length.

    Returns tokens [b, s + 1] (padding 0, ~token where one is not learnt) and lengths [b] (inputs
    that are no padding), both int64.
    """
    lengths = [len(sample) - 1 for sample in samples]
    padded = aligned(max(lengths), alignment)
    tokens = np.zeros((len(samples), padded + 1), dtype=np.int64)
    for row, sample in zip(tokens, samples, strict=True):
        row[: len(sample)] = sample
    return {"tokens": torch.from_numpy(tokens), "lengths": torch.tensor(lengths)}


@dataclass(frozen=True)
class Sharding:
    """How a global batch falls apart over replicas and microbatches."""

    micro_batch_size: int
    replica: int  # this rank's data-parallel rank
    num_replicas: int

    def positions(self, first: int) -> range:
        """Stream positions of this replica's share of the round that starts at `first`."""
        start = first + self.replica * self.micro_batch_size
        return range(start, start + self.micro_batch_size)

    @property
    def round_size(self) -> int:
        """Samples that all replicas together take for one microbatch each."""
        return self.micro_batch_size * self.num_replicas


@dataclass(frozen=True)
class BatchSizes:
    """Samples of a global batch, by the stream position at which it starts.

    steps: (position, size) from position 0 on, positions ascending: a batch has the size of the
    last step that is not beyond its start, as in Megatron's --step-batch-size-schedule.
    """

    steps: tuple[tuple[int, int], ...]

    @classmethod
    def constant(cls, size: int) -> BatchSizes:
        return cls(((0, size),))

    @property
    def sizes(self) -> list[int]:
        return [size for _, size in self.steps]

    def at(self, first: int) -> int:
        return self.steps[bisect.bisect_right(self.steps, first, key=lambda step: step[0]) - 1][1]

    def starts(self, consumed: int, stop: int | None = None) -> Iterator[int]:
        """Of global batches, the first at consumed; without end if stop is None."""
        while stop is None or consumed < stop:
            yield consumed
            consumed += self.at(consumed)

    def count(self, consumed: int, first: int) -> int:
        """Global batches from the one that starts at consumed to before the one at first."""
        batches = 0
        for (_, size), (end, _) in itertools.pairwise((*self.steps, (first, 0))):
            if consumed < min(end, first):
                of_size = -(-(min(end, first) - consumed) // size)
                batches, consumed = batches + of_size, consumed + of_size * size
        return batches


@dataclass(frozen=True)
class Balance:
    """Deals each global batch so that the replicas' predicted times are even (data/balance.py)."""

    sizes: BatchSizes
    seconds: Seconds


class _PositionSampler(torch.utils.data.Sampler):
    """Batches of stream positions, from `consumed` on."""

    def __init__(
        self,
        stream: Samples,
        sharding: Sharding,
        consumed: int,
        stop: int | None,
        balance: Balance | None,
    ):
        self._stream, self._sharding = stream, sharding
        self._consumed, self._stop, self._balance = consumed, stop, balance

    def __iter__(self) -> Iterator[list[int]]:
        if self._balance is not None:
            for first in self._balance.sizes.starts(self._consumed, self._stop):
                yield from self._dealt(first, self._balance)
            return
        rounds = BatchSizes.constant(self._sharding.round_size)
        for first in rounds.starts(self._consumed, self._stop):
            yield list(self._sharding.positions(first))

    def _dealt(self, first: int, balance: Balance) -> Iterator[list[int]]:
        """This replica's microbatches of the global batch that starts at a position."""
        lengths = [self._stream.length(first + i) for i in range(balance.sizes.at(first))]
        dealt = deal(
            lengths,
            micro_batch_size=self._sharding.micro_batch_size,
            num_replicas=self._sharding.num_replicas,
            seconds=balance.seconds,
        )
        for microbatch in dealt[self._sharding.replica]:
            yield [first + i for i in microbatch]


class _StreamDataset(torch.utils.data.Dataset):
    def __init__(self, stream: Samples):
        self._stream = stream

    def __getitem__(self, position: int) -> np.ndarray:
        return self._stream.tokens(position)


def microbatches(
    stream: Samples,
    *,
    sharding: Sharding,
    consumed: int = 0,
    stop: int | None = None,
    alignment: int,
    num_workers: int,
    balance: Balance | None = None,
    begin_worker: WorkerStart = None,
) -> torch.utils.data.DataLoader:
    """This replica's microbatches of the global samples from consumed to stop, None: without end.

    See collate for their form.
    """
    return torch.utils.data.DataLoader(
        _StreamDataset(stream),
        batch_sampler=_PositionSampler(stream, sharding, consumed, stop, balance),
        collate_fn=functools.partial(collate, alignment=alignment),
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=num_workers > 0,
        worker_init_fn=begin_worker,
        generator=torch.Generator(),  # else it draws from the training's, after a restart anew
    )
