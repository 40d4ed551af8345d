"""What attach_edges does to Megatron's modules."""

from __future__ import annotations

import torch
from megatron.core.models.common.embeddings import RotaryEmbedding

from megatron_paradyse.edges.tiles import automatic_tile
from megatron_paradyse.model_edges import OneTableRotaryEmbedding, attach_edges

HUNDRED_LENGTHS = [64 * i for i in (7, 100, 3, *range(1, 98))]


def _rotary(**options) -> RotaryEmbedding:
    return RotaryEmbedding(16, 1.0, use_cpu_initialization=True, **options)


def test_angles_of_every_length_equal_megatrons_and_share_one_table(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    for options in ({}, {"rotary_interleaved": True}, {"rope_scaling": True}):
        module = torch.nn.ModuleList([_rotary(**options)])
        attach_edges([module], head_tile="off")
        assert type(module[0]) is OneTableRotaryEmbedding
        tables = set()
        for length in HUNDRED_LENGTHS:
            angles = module[0](length)
            assert torch.equal(angles, _rotary(**options)(length))
            tables.add(angles.untyped_storage().data_ptr())
        assert len(tables) == 2  # of the first length, then of the longest


def test_the_automatic_tile_keeps_to_its_bytes_and_is_never_tiny():
    gpt = automatic_tile(h=12288, vocab_shard=6400, element_bytes=2)
    assert gpt * (6400 * 6 + 12288 * 8) <= 256 * 2**20 < (gpt + 1) * (6400 * 6 + 12288 * 8)
    assert automatic_tile(h=4096, vocab_shard=2**17, element_bytes=2) == 1024
