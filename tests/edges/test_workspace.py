"""Bytes of the edges in tiles, on the fake process group: collectives move and hold nothing."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_paradyse.edges.cross_entropy import tiled_cross_entropy
from megatron_paradyse.edges.embedding import tiled_embedding, tiled_positions
from megatron_paradyse.live_bytes import LiveBytes

P, H, SHARD, TILE, B = 4, 48, 320, 64, 2
LENGTHS = (256, 2048)


@pytest.fixture
def group():
    dist.init_process_group("fake", store=FakeStore(), rank=P - 1, world_size=P)
    try:
        yield dist.new_group(list(range(P)))
    finally:
        dist.destroy_process_group()


def _head_peak(
    group, s: int, *, multiple: bool, dtype: torch.dtype, counted: float | None = None
) -> int:
    """Peak of forward and backward beyond the input, its gradient, the losses, and numbers of b s.

    multiple: whether the gradient of the losses is a multiple of the mask. counted: the share of
    tokens that count, None: all, without looking.
    """
    x = torch.randn(s // P, B, H, dtype=dtype, requires_grad=True)
    weight = torch.randn(SHARD, H, dtype=dtype, requires_grad=True)
    labels, mask = torch.randint(SHARD * P, (B, s)), torch.ones(B, s)
    grad = torch.full((B, s), 0.5) if multiple else torch.rand(B, s)
    some = None if counted is None else torch.rand(B, s) < counted
    meter = LiveBytes([x, weight, labels, mask, grad])
    with meter:
        losses = tiled_cross_entropy(
            x, weight, labels, group, tile=TILE, token_weights=mask, counted=some
        )
        losses.backward(grad)
    return meter.peak_bytes - x.nbytes - losses.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_heads_workspace_does_not_grow_with_the_sequence(dtype, group):
    """Nor is it larger than the tile's buffers and the weight's gradient, wide and as it leaves."""
    wide = 0 if dtype == torch.float32 else 4
    tile_bytes = TILE * (SHARD * (dtype.itemsize + wide) + 4 * H * dtype.itemsize)
    weight_bytes = SHARD * H * (4 + 2 * dtype.itemsize)  # a tile's product, too, where it is wider
    numbers = 16 * TILE * 8
    short, long = (_head_peak(group, s, multiple=True, dtype=dtype) for s in LENGTHS)
    assert short == long <= tile_bytes + weight_bytes + numbers


def test_running_tiles_again_adds_a_few_numbers_a_token_at_most(group):
    for s in LENGTHS:
        once, again = (
            _head_peak(group, s, multiple=multiple, dtype=torch.float32)
            for multiple in (True, False)
        )
        assert again - once <= 16 * B * s


@pytest.mark.parametrize("share", [0.05, 0.3, 0.9])
def test_where_some_tokens_count_the_head_needs_no_more_but_their_places(share, group):
    for s in LENGTHS:
        whole, some = (
            _head_peak(group, s, multiple=True, dtype=torch.bfloat16, counted=counted)
            for counted in (None, share)
        )
        numbers = 16 * B * s * share + 16 * TILE * 8
        assert some <= whole + numbers


def _embedding_peak(group, s: int, look_up) -> int:
    """Peak of forward and backward beyond the output and its gradient."""
    weight = torch.randn(SHARD, H, requires_grad=True)
    tokens, grad = torch.randint(SHARD, (B, s)), torch.randn(s // P, B, H)
    meter = LiveBytes([weight, tokens, grad])
    with meter:
        look_up(tokens, weight, group, tile=TILE).backward(grad)
    return meter.peak_bytes - grad.nbytes


@pytest.mark.parametrize("look_up", [tiled_embedding, tiled_positions])
def test_an_embeddings_workspace_does_not_grow_with_the_sequence(look_up, group):
    """But for the rank's own indices, 8 bytes each."""
    short, long = (_embedding_peak(group, s, look_up) for s in LENGTHS)
    assert long - short <= 8 * B * (LENGTHS[1] - LENGTHS[0]) // P
