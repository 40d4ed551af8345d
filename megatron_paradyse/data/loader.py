"""Microbatches of whole documents for Megatron's training loop.

Each data-parallel replica draws its own samples of a global batch, as Megatron's sampler deals
them; the first rank of each tensor-parallel group reads them and broadcasts (train/batch.py).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from megatron_paradyse.data.balance import Seconds, deal
from megatron_paradyse.data.documents import SampleStream


def aligned(length: int, alignment: int) -> int:
    """The smallest multiple of alignment that is at least length."""
    return -(-length // alignment) * alignment


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
class Balance:
    """Deals each global batch so that the replicas' predicted times are even (data/balance.py)."""

    global_batch_size: int
    seconds: Seconds


class _PositionSampler(torch.utils.data.Sampler):
    """Batches of stream positions, from `consumed` on, without end."""

    def __init__(
        self, stream: SampleStream, sharding: Sharding, consumed: int, balance: Balance | None
    ):
        self._stream, self._sharding = stream, sharding
        self._consumed, self._balance = consumed, balance

    def __iter__(self) -> Iterator[list[int]]:
        first = self._consumed
        while self._balance is not None:
            yield from self._dealt(first, self._balance)
            first += self._balance.global_batch_size
        while True:
            yield list(self._sharding.positions(first))
            first += self._sharding.round_size

    def _dealt(self, first: int, balance: Balance) -> Iterator[list[int]]:
        """This replica's microbatches of the global batch that starts at a position."""
        lengths = [self._stream.length(first + i) for i in range(balance.global_batch_size)]
        dealt = deal(
            lengths,
            micro_batch_size=self._sharding.micro_batch_size,
            num_replicas=self._sharding.num_replicas,
            seconds=balance.seconds,
        )
        for microbatch in dealt[self._sharding.replica]:
            yield [first + i for i in microbatch]


class _StreamDataset(torch.utils.data.Dataset):
    def __init__(self, stream: SampleStream):
        self._stream = stream

    def __getitem__(self, position: int) -> np.ndarray:
        return self._stream.tokens(position)


def microbatches(
    stream: SampleStream,
    *,
    sharding: Sharding,
    consumed: int,
    alignment: int,
    num_workers: int,
    balance: Balance | None = None,
) -> Iterator[dict[str, torch.Tensor]]:
    """This replica's microbatches from global sample `consumed` on; see collate for their form."""
    loader = torch.utils.data.DataLoader(
        _StreamDataset(stream),
        batch_sampler=_PositionSampler(stream, sharding, consumed, balance),
        collate_fn=functools.partial(collate, alignment=alignment),
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=num_workers > 0,
    )
    return iter(loader)
