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
    group, s: int, *, multiple: bool, dtype: torch.dtype, some: torch.Tensor | None = None
) -> int:
    """Peak of forward and backward beyond the input, its gradient, the losses, and numbers of b s.

    multiple: whether the gradient of the losses is a multiple of the mask. some: the tokens [b, s]
    that count, None: all, without looking.
    """
    x = torch.randn(s // P, B, H, dtype=dtype, requires_grad=True)
    weight = torch.randn(SHARD, H, dtype=dtype, requires_grad=True)
    labels, mask = torch.randint(SHARD * P, (B, s)), torch.ones(B, s)
    grad = torch.full((B, s), 0.5) if multiple else torch.rand(B, s)
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


def _by_row(s: int, is_counted) -> torch.Tensor:
    """[b, s] of which the same rows of every rank count."""
    rows = torch.tensor([bool(is_counted(i)) for i in range(s // P)])
    return rows.repeat(P).expand(B, -1)


SOME = {  # what counts, with rows of a tile of every rank
    "a twentieth": lambda s, t: torch.rand(B, s) < 0.05,
    "a third": lambda s, t: torch.rand(B, s) < 0.3,
    "nearly all": lambda s, t: torch.rand(B, s) < 0.9,
    "all": lambda s, t: torch.ones(B, s, dtype=torch.bool),
    "those of one rank": lambda s, t: (torch.arange(s) < s // P).expand(B, -1),
    "whole tiles between few": lambda s, t: _by_row(s, lambda i: i % (8 * t) < t or i % 16 == 0),
    "few, then all": lambda s, t: _by_row(s, lambda i: i > s // P // 2 or i % 32 == 0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SOME)
def test_where_some_tokens_count_the_head_needs_no_more_but_their_places(name, dtype, group):
    for s in LENGTHS:
        some = SOME[name](s, TILE // (P * B))
        whole, less = (
            _head_peak(group, s, multiple=True, dtype=dtype, some=counted)
            for counted in (None, some)
        )
        assert less <= whole + 16 * int(some.sum()) + 16 * TILE * 8


def test_where_one_tile_is_all_the_weights_gradient_is_made_when_its_logits_have_gone(group):
    """As Megatron's head makes it, by which short microbatches are predicted; and rounded once."""
    s, dtype = TILE // B, torch.bfloat16
    some = torch.ones(B, s, dtype=torch.bool)
    tile_bytes = TILE * (SHARD * (dtype.itemsize + 4) + 4 * H * dtype.itemsize)
    peak = _head_peak(group, s, multiple=True, dtype=dtype, some=some)
    assert peak <= tile_bytes + 16 * TILE * 8


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
