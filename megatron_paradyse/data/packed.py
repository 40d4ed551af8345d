"""The packed microbatches of a replica: one item of the data loader is its share of a global batch.

The workers of the loader pack: while a step runs, they make the shares of the next ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_paradyse.data.loader import BatchSizes, Samples, WorkerStart
from megatron_paradyse.data.targets import NO_LABEL, ids_of
from megatron_paradyse.packing.pack import Packing
from megatron_paradyse.packing.row import Row, aligned

Packer = Callable[[Sequence[int]], Packing]  # of the lengths of a global batch
# Inputs and labels [n] of a sample of n + 1 tokens, in the global batch that begins at a position.
Objective = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]


def next_tokens(sample: np.ndarray, first: int) -> tuple[np.ndarray, np.ndarray]:
    """Of a GPT: the same in every global batch. NO_LABEL where the next token is not learnt."""
    return ids_of(sample[:-1]), np.maximum(sample[1:], NO_LABEL)


@dataclass(frozen=True)
class PackedMicrobatch:
    """lengths: tokens of its documents. row None: one document, padded at its end to s tokens.

    seq_length: s; of a wide row that of the replica, which is the place-th of those that share it.
    """

    lengths: tuple[int, ...]
    row: Row | None
    seq_length: int
    place: int = 0


@dataclass(frozen=True)
class Share:
    """What a replica trains on in a global batch.

    tokens: int32 [2, sum of s], inputs and labels of the microbatches one after the other, each
    in the order of the rows of its ranks; None where no pipeline stage here reads them.
    """

    microbatches: tuple[PackedMicrobatch, ...]
    tokens: torch.Tensor | None

    def pin_memory(self) -> Share:
        return Share(self.microbatches, None if self.tokens is None else self.tokens.pin_memory())


class PackedShares(torch.utils.data.Dataset):
    """Indexed by the stream position at which a global batch starts."""

    def __init__(
        self,
        stream: Samples,
        pack: Packer,
        *,
        sizes: BatchSizes,
        replica: int,
        alignment: int,
        reads_tokens: bool = True,
        objective: Objective = next_tokens,
    ):
        """alignment: of a document alone. reads_tokens: whether shares hold any."""
        self._stream, self._pack, self._objective = stream, pack, objective
        self._sizes, self._replica = sizes, replica
        self._alignment, self._reads_tokens = alignment, reads_tokens

    def __getitem__(self, first: int) -> Share:
        lengths = [self._stream.length(first + i) for i in range(self._sizes.at(first))]
        microbatches, parts = [], []
        for made in self._pack(lengths).replicas[self._replica]:
            of_row = tuple(lengths[number] for number in made.documents)
            s = aligned(sum(of_row), self._alignment)
            place = 0
            if made.row is not None:
                s, place = made.row.group_length, self._replica % made.row.groups
            microbatches.append(PackedMicrobatch(of_row, made.row, s, place))
            if self._reads_tokens:
                samples = (self._stream.tokens(first + number) for number in made.documents)
                learnt = [self._objective(sample, first) for sample in samples]
                if made.row is None:
                    parts.append(collate_row(learnt, None, s))
                else:
                    whole = collate_row(learnt, made.row, made.row.seq_length)
                    parts.append(whole[:, made.row.rows_of(place)])
        tokens = torch.from_numpy(np.concatenate(parts, axis=1)) if parts else None
        return Share(tuple(microbatches), tokens)


def collate_row(
    documents: Sequence[tuple[np.ndarray, np.ndarray]], row: Row | None, seq_length: int
) -> np.ndarray:
    """Inputs and labels, int32 [2, s], of those of each document."""
    both = np.zeros((2, seq_length), dtype=np.int32)
    both[1] = NO_LABEL
    stop = 0
    for inputs, labels in documents:
        start, stop = stop, stop + len(inputs)
        both[0, start:stop], both[1, start:stop] = inputs, labels
    return both if row is None else both[:, positions_held(row)]


def positions_held(row: Row) -> np.ndarray:
    """The s positions in the order in which the ranks hold them, rank after rank."""
    ranges = itertools.chain.from_iterable(row.shards)
    return np.concatenate([np.arange(start, stop) for start, stop in ranges])


class _GlobalBatches(torch.utils.data.Sampler):
    def __init__(self, consumed: int, sizes: BatchSizes, stop: int | None):
        self._consumed, self._sizes, self._stop = consumed, sizes, stop

    def __iter__(self) -> Iterator[int]:
        return self._sizes.starts(self._consumed, self._stop)


def packed_shares(
    shares: PackedShares,
    *,
    consumed: int,
    stop: int | None = None,
    sizes: BatchSizes,
    num_workers: int,
    begin_worker: WorkerStart = None,
) -> torch.utils.data.DataLoader:
    """The shares of stream positions from consumed to stop, None: without end.

    Each worker is one global batch ahead.
    """
    return torch.utils.data.DataLoader(
        shares,
        sampler=_GlobalBatches(consumed, sizes, stop),
        batch_size=None,
        num_workers=num_workers,
        prefetch_factor=1 if num_workers else None,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=num_workers > 0,
        worker_init_fn=begin_worker,
        generator=torch.Generator(),  # as that of documents one by one
    )
