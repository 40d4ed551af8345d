"""One step's packed microbatches on every rank of a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from megatron.core import mpu
from megatron.training import get_args
from megatron.training.utils import is_first_or_last_pipeline_stage

from megatron_paradyse.data.packed import PackedMicrobatch, Share
from megatron_paradyse.data.targets import NO_LABEL
from megatron_paradyse.microbatch_params import RowParams
from megatron_paradyse.packing.row import Row
from megatron_paradyse.strategies.host import to_device
from megatron_paradyse.train import teams
from megatron_paradyse.train.batch import (
    BATCH_NAMES,
    check_vocabulary,
    count_lengths,
    device_of_rank,
    less_eod,
)
from megatron_paradyse.train.model_kind import BERT


class PackedStep:
    """A replica's microbatches of one global batch; all ranks of the group make it together."""

    def __init__(self, shares: Iterator[Share] | None):
        """shares: on the group's first rank; every rank learns the rows of the next one."""
        share = next(shares) if mpu.get_tensor_model_parallel_rank() == 0 else None  # type: ignore[arg-type]
        self._tokens = None if share is None else share.tokens
        if self._tokens is not None:
            check_vocabulary(self._tokens)
        self._microbatches = _broadcast_microbatches(share)
        self._next = self._first_token = 0

    def __len__(self) -> int:
        return len(self._microbatches)

    def read(self, vp_stage: int | None = None) -> dict:
        """The next microbatch in Megatron's form.

        tokens, labels, position_ids (int64) and loss_mask (float32), each [1, s], rank after rank
        of the row, all None on a pipeline stage that needs none of them; packed_seq_params with the
        row, None of a document alone; attention_mask as document_batch has it. Moves 8 s bytes over
        the group.
        """
        microbatch = self._microbatches[self._next]
        self._next += 1
        device = device_of_rank()
        lengths = to_device(np.array(microbatch.lengths), device)
        count_lengths(lengths[:0] if microbatch.place else lengths, vp_stage)  # once for all places
        params = None
        if microbatch.row is not None:
            wide = teams.wide() if microbatch.row.groups > 1 else None
            params = RowParams(row=microbatch.row, wide=wide)
        batch = {**dict.fromkeys(BATCH_NAMES), "packed_seq_params": params}
        batch["attention_mask"] = _attention_mask(microbatch, device)
        if not is_first_or_last_pipeline_stage(vp_stage):
            return batch
        both = self._broadcast_tokens(microbatch.seq_length, device).long()
        inputs, labels = both[:1], both[1:]
        last = get_args().max_position_embeddings - 1
        return {
            **batch,
            "tokens": inputs,
            "labels": labels.clamp(min=0),
            "position_ids": _positions(microbatch, device).clamp(max=last)[None],
            "loss_mask": less_eod((labels != NO_LABEL).float(), inputs),
        }

    def _broadcast_tokens(self, s: int, device: torch.device) -> torch.Tensor:
        """int32 [2, s]."""
        both = torch.empty(2, s, dtype=torch.int32, device=device)
        if self._tokens is not None:
            start, self._first_token = self._first_token, self._first_token + s
            for row, pinned in zip(both, self._tokens, strict=True):  # each in one piece: no copy
                row.copy_(pinned[start : start + s], non_blocking=True)
        _broadcast(both)
        return both


def _attention_mask(microbatch: PackedMicrobatch, device: torch.device) -> torch.Tensor | None:
    """[1, s] of a BERT's document alone that is padded; None otherwise: a row knows its own."""
    s, length = microbatch.seq_length, microbatch.lengths[0]
    if get_args().paradyse_model != BERT or microbatch.row is not None or length == s:
        return None
    return torch.arange(s, device=device)[None] < length


def _positions(microbatch: PackedMicrobatch, device: torch.device) -> torch.Tensor:
    if microbatch.row is None:
        return torch.arange(microbatch.seq_length, device=device)
    own = microbatch.row.rows_of(microbatch.place)
    return to_device(microbatch.row.places(by_rows=True)[own], device)


def _broadcast_microbatches(share: Share | None) -> tuple[PackedMicrobatch, ...]:
    """The lengths and rows of the first rank's share, on all ranks."""
    numbers = [] if share is None else as_numbers(share.microbatches)
    size = torch.tensor([len(numbers)], device=device_of_rank())
    _broadcast(size)
    payload = torch.zeros(int(size), dtype=torch.int64, device=device_of_rank())
    if share is not None:
        payload.copy_(torch.tensor(numbers))
    _broadcast(payload)
    return share.microbatches if share is not None else from_numbers(payload.tolist())


def as_numbers(microbatches: Sequence[PackedMicrobatch]) -> list[int]:
    """For each: s, its place, documents and their lengths, groups, ranks, for each its ranges."""
    numbers: list[int] = []
    for made in microbatches:
        numbers += [made.seq_length, made.place, len(made.lengths), *made.lengths]
        shards = () if made.row is None else made.row.shards
        numbers += [1 if made.row is None else made.row.groups, len(shards)]
        for shard in shards:
            numbers.append(len(shard))
            numbers += [end for held in shard for end in held]
    return numbers


def from_numbers(numbers: Sequence[int]) -> tuple[PackedMicrobatch, ...]:
    """What as_numbers wrote."""
    rest, made = iter(numbers), []
    for s in rest:
        place = next(rest)
        lengths = tuple(next(rest) for _ in range(next(rest)))
        groups = next(rest)
        shards = tuple(
            tuple((next(rest), next(rest)) for _ in range(next(rest))) for _ in range(next(rest))
        )
        row = Row(lengths, shards, groups) if shards else None
        made.append(PackedMicrobatch(lengths, row, s, place))
    return tuple(made)


def _broadcast(tensor: torch.Tensor) -> None:
    """From the first rank of the tensor-parallel group."""
    if mpu.get_tensor_model_parallel_world_size() > 1:
        source = mpu.get_tensor_model_parallel_src_rank()
        torch.distributed.broadcast(tensor, source, group=mpu.get_tensor_model_parallel_group())
