"""Shares of packed global batches: which tokens lie where, and where a restart goes on."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_paradyse.data.loader import BatchSizes, Sharding, microbatches
from megatron_paradyse.data.packed import (
    PackedShares,
    collate_row,
    next_tokens,
    packed_shares,
)
from megatron_paradyse.data.targets import NO_LABEL
from megatron_paradyse.packing.pack import Grid, Microbatch, Packing, flops_costs, pack
from megatron_paradyse.packing.placement import place
from megatron_paradyse.packing.wide import pack_wide

GLOBAL_BATCH = 12
GRID = Grid(p=2, hidden_size=64, num_replicas=2, alignment=4)
NARROW = flops_costs(GRID)
# Documents of 30 tokens or more lie over both replicas.
WIDE = {
    "pack": pack_wide,
    "grid": replace(GRID, spread=2),
    "costs": replace(NARROW, fits=lambda tokens: tokens < 30),
}


class Stream:
    """Position k of the stream is a sample of its own lengths and tokens."""

    def length(self, position: int) -> int:
        return 1 + position * 7 % 40

    def tokens(self, position: int) -> np.ndarray:
        return 1000 * position + np.arange(self.length(position) + 1)


def made(replica: int, *, pack=pack, grid=GRID, costs=NARROW, **how) -> PackedShares:
    return PackedShares(
        Stream(),
        functools.partial(pack, tokens=64, grid=grid, costs=costs),
        sizes=BatchSizes.constant(GLOBAL_BATCH),
        replica=replica,
        alignment=4,
        **how,
    )


def shares(replica: int, *, consumed: int = 0, num_workers: int = 0):
    sizes = BatchSizes.constant(GLOBAL_BATCH)
    of = {"consumed": consumed, "sizes": sizes, "num_workers": num_workers}
    return iter(packed_shares(made(replica), **of))


def test_a_row_is_laid_out_rank_after_rank_with_labels_inside_documents():
    samples = [np.array([10, 11, 12, 13, 14, 15, 16]), np.array([20, 21, 22])]
    row = place([6, 2], 2, causal=True, alignment=4)
    inputs, labels = collate_row([next_tokens(one, 0) for one in samples], row, row.seq_length)
    held = [list(itertools.chain(*(range(a, b) for a, b in shard))) for shard in row.shards]
    flat_inputs = [10, 11, 12, 13, 14, 15, 20, 21]
    flat_labels = [11, 12, 13, 14, 15, 16, 21, 22]
    assert inputs.tolist() == [flat_inputs[i] for shard in held for i in shard]
    assert labels.tolist() == [flat_labels[i] for shard in held for i in shard]
    places = [0, 1, 2, 3, 4, 5, 0, 1]
    assert row.places(by_rows=True).tolist() == [places[i] for shard in held for i in shard]


def test_padding_has_no_label():
    both = collate_row([next_tokens(np.array([5, 6, 7]), 0)], None, 4)
    assert both.tolist() == [[5, 6, 0, 0], [6, 7, NO_LABEL, NO_LABEL]]


@pytest.mark.parametrize("how", [{}, WIDE], ids=["narrow", "wide"])
@pytest.mark.parametrize("first", [0, GLOBAL_BATCH])
def test_replicas_together_train_on_the_documents_of_the_global_batch(first, how):
    """Of a wide row each has a part."""
    pairs = []
    for replica in (0, 1):
        share = made(replica, **how)[first]
        groups = {made.row.groups for made in share.microbatches if made.row is not None}
        assert groups == ({1, 2} if how else {1})
        assert sum(made.seq_length for made in share.microbatches) == share.tokens.shape[1]
        inputs, labels = share.tokens.numpy()
        pairs += zip(inputs[labels != NO_LABEL], labels[labels != NO_LABEL], strict=True)
    expected = []
    for position in range(first, first + GLOBAL_BATCH):
        tokens = Stream().tokens(position)
        expected += itertools.pairwise(tokens)
    assert sorted(pairs) == sorted(expected)


def test_a_stage_in_the_middle_of_a_pipeline_knows_the_rows_and_reads_no_token():
    told, read = (made(0, reads_tokens=reads)[0] for reads in (False, True))
    assert told.microbatches == read.microbatches and told.tokens is None


def test_a_document_alone_that_is_aligned_is_not_padded():
    alone = made(
        0, pack=lambda lengths, **_: Packing(((Microbatch((5,), None, 0.0),),) * 2, 64, 0.0)
    )
    assert alone._stream.length(5) == 36
    assert alone[0].microbatches[0].seq_length == 36


def of_microbatches(**how):
    sharding = Sharding(micro_batch_size=1, replica=0, num_replicas=1)
    return microbatches(Stream(), sharding=sharding, alignment=4, num_workers=0, **how)


def of_shares(**how):
    sizes = BatchSizes.constant(GLOBAL_BATCH)
    return packed_shares(made(0), consumed=0, sizes=sizes, num_workers=0, **how)


@pytest.mark.parametrize("loader", [of_microbatches, of_shares])
def test_a_loader_begins_its_workers_and_draws_no_random_number_of_the_trainings(loader):
    """A restart makes another one, and would draw other dropout from then on."""
    begun: list[int] = []
    state = torch.get_rng_state()
    loaded = loader(begin_worker=begun.append)
    next(iter(loaded))
    assert state.equal(torch.get_rng_state())
    assert loaded.worker_init_fn == begun.append


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_restart_goes_on_at_the_next_global_batch(num_workers):
    whole = list(itertools.islice(shares(0, num_workers=num_workers), 4))
    rest = list(itertools.islice(shares(0, consumed=2 * GLOBAL_BATCH), 2))
    for ran, resumed in zip(whole[2:], rest, strict=True):
        assert ran.microbatches == resumed.microbatches
        assert ran.tokens.equal(resumed.tokens)
