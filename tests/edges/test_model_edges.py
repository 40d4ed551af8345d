"""What attach_edges does to Megatron's modules."""

from __future__ import annotations

import pytest
import torch
from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding

from megatron_paradyse.edges.tiles import automatic_tile
from megatron_paradyse.model_edges import attach_edges

HUNDRED_LENGTHS = [64 * i for i in (7, 100, 3, *range(1, 98))]


def _rotary(**options) -> RotaryEmbedding:
    return RotaryEmbedding(16, 1.0, use_cpu_initialization=True, **options)


def _yarn(**options) -> YarnRotaryEmbedding:
    return YarnRotaryEmbedding(16, use_cpu_initialization=True, **options)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (_rotary, {}),
        (_rotary, {"rotary_interleaved": True}),
        (_rotary, {"rope_scaling": True}),
        (_yarn, {"scaling_factor": 8.0, "original_max_position_embeddings": 512}),
    ],
)
def test_angles_of_every_length_equal_megatrons_and_share_one_table(make, options, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    module = torch.nn.ModuleList([make(**options)])
    attach_edges([module], head_tile="off")
    tables = set()
    for length in HUNDRED_LENGTHS:
        found, expected = module[0](length), make(**options)(length)
        if make is _yarn:
            (found, factor), (expected, of_megatron) = found, expected
            assert factor == of_megatron != 1.0
        assert torch.equal(found, expected)
        tables.add(found.untyped_storage().data_ptr())
    assert len(tables) == 2  # of the first length, then of the longest


def test_the_automatic_tile_keeps_to_its_bytes_and_is_never_tiny():
    gpt = automatic_tile(h=12288, vocab_shard=6400, element_bytes=2)
    assert gpt * (6400 * 6 + 12288 * 8) <= 256 * 2**20 < (gpt + 1) * (6400 * 6 + 12288 * 8)
    assert automatic_tile(h=4096, vocab_shard=2**17, element_bytes=2) == 1024
