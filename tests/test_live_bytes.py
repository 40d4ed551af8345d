"""What the meters of memory count."""

from __future__ import annotations

import gc

import pytest
import torch

from megatron_paradyse.live_bytes import AllocatedBytes, LiveBytes, make_meter


def test_every_storage_counts_once_while_it_lives():
    with LiveBytes() as meter:
        first = torch.empty(1000, dtype=torch.uint8)
        view = first[:10].view(2, 5)
        assert (meter.live_bytes, meter.peak_bytes) == (1000, 1000)
        second = torch.empty(500, dtype=torch.uint8)
        del second
        assert (meter.live_bytes, meter.peak_bytes) == (1000, 1500)
        del first
        assert meter.live_bytes == 1000, "a view holds it"
        meter.reset_peak()
        assert meter.peak_bytes == 1000
        del view
        gc.collect()
    assert (meter.live_bytes, meter.peak_bytes) == (0, 1000)


def test_a_storage_where_another_was_counts_again():
    with LiveBytes() as meter:
        for _ in range(20):
            held = torch.empty(500, dtype=torch.uint8)
            assert meter.live_bytes == 500
            del held


def test_operations_of_several_results_and_of_none_count_their_tensors():
    x = torch.arange(8.0)
    with LiveBytes([x]) as meter:
        found = torch.topk(x, k=2, dim=-1)
        assert meter.live_bytes == 2 * (4 + 8)
        parts = x.split(4)
        assert x[3].item() == 3.0  # no tensor
    assert meter.live_bytes == 24 and len(parts) == len(found) == 2


def test_what_was_there_counts_from_its_first_view_on_unless_it_is_known():
    known, other = torch.zeros(4), torch.zeros(8)
    with LiveBytes([known]) as meter:
        views = known[1:], other[1:]
        assert meter.live_bytes == 32
        other.add_(1.0)
    assert meter.live_bytes == 32 and len(views) == 2


def test_an_emulated_memory_is_full_beyond_its_limit():
    with make_meter(limit_bytes=100):
        held = torch.empty(100, dtype=torch.uint8)
        message = "memory of 100 bytes is full: 101 bytes are alive, 1 of them just asked for"
        with pytest.raises(torch.OutOfMemoryError, match=message):
            torch.empty(1, dtype=torch.uint8)
        del held
        torch.empty(100, dtype=torch.uint8)


def test_a_gpus_meter_asks_its_allocator(monkeypatch):
    stats = {"allocated_bytes.all.current": 7, "allocated_bytes.all.peak": 9}
    reset = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: reset.append(True))
    meter = make_meter(limit_bytes=1)
    assert isinstance(meter, AllocatedBytes)
    with meter as same:
        assert same is meter and (meter.live_bytes, meter.peak_bytes) == (7, 9)
    meter.reset_peak()
    assert reset == [True]
    stats.clear()  # before the first allocation
    assert (meter.live_bytes, meter.peak_bytes) == (0, 0)
