"""Bytes of packed rows within a sliding window, from one document's, against what ranks hold.

With the kernels of a GPU, as simulations have them: of half types it is FlashAttention, which takes
documents side by side in one call where they are no longer than the window.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_paradyse.costs.row_bytes import joined, walked_row_bytes
from megatron_paradyse.costs.table import OperationCosts
from megatron_paradyse.packing.load import load_of
from megatron_paradyse.packing.placement import place
from megatron_paradyse.packing.row import contiguous
from megatron_paradyse.packing.traffic import microbatch_of
from megatron_paradyse.simulator.flash_kernel import flash_kernel
from megatron_paradyse.strategies import takes
from megatron_paradyse.strategies.sizes import LayerSizes
from tests.costs.counted_rows import BYTES, measured
from tests.strategies.cases import AttentionCase

P, S = 4, 512
SIZES = {"n": 8, "g": 4, "d": 32, "h": 64}
ROWS = [  # and whether they lie one after the other
    ((64,) * 8, True),
    ((300, 90, 7, 100), False),
    ((200, 33, 34, 7, 30, 128, 64), True),
    ((200, 33, 34, 7, 30, 128, 64), False),
    ((300, 17, 120), False),
    ((30, 126, 126, 100, 30, 34, 66), True),  # a forward's peak: results that become float32
]
NAMES = ("ulysses_z", "megatron_cz", "colossal_z", "metp", "local_z")


def within(name, lengths, window, dtype, *, lies):
    """What is told to what ranks hold: kept, and peaks; None: the strategy takes no such row.

    lies: whether documents lie one after the other.
    """
    if lies:
        row = contiguous(lengths, P, alignment=S)
    else:
        row = place(lengths, P, causal=True, alignment=S, window=window)
    if not takes(name, microbatch_of(row), P):
        return None
    like = "megatron_cz" if name == "local_z" else name
    case = AttentionCase(
        name, P, "causal", **SIZES, s=S, b=1, dtype=dtype, rope="half", window=window
    )
    with flash_kernel():
        alone = measured.__wrapped__(dataclasses.replace(case, strategy=like))
        truth = measured.__wrapped__(dataclasses.replace(case, row=row))
    load, in_one_call = load_of(row, causal=True, window=window), dtype == torch.bfloat16
    if in_one_call:
        load = joined(name, load, windowed=True)
    sizes = LayerSizes(
        s=S, b=1, **SIZES, f=1, p=P, element_bytes=dtype.itemsize, rope_channels=SIZES["d"]
    )
    found = walked_row_bytes(
        name,
        like,
        OperationCosts(0.0, 0.0, *(alone[name] for name in BYTES)),
        sizes,
        load.seen(windowed=True),
        in_one_call=in_one_call,
        window=window,
    )
    assert found is not None
    kept, told = truth["kept_bytes"], found.kept_bytes
    peaks = [(told + getattr(found, name)) / (kept + truth[name]) for name in BYTES[1:]]
    return told / kept, *peaks


@pytest.mark.parametrize(
    ("window", "dtype"),
    [
        *((window, torch.bfloat16) for window in (2, 33, 100, 400)),
        *((window, torch.float32) for window in (33, 400)),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", NAMES)
def test_no_rank_holds_more_of_a_row_than_its_walk_within_the_window_says(name, window, dtype):
    """400: of which rings take all keys, in halves of chunks. Peaks above are of small rows."""
    most = []
    for lengths, lies in ROWS:
        found = within(name, lengths, window, dtype, lies=lies)
        if found is not None:
            kept, *peaks = found
            assert kept == pytest.approx(1, abs=1e-6), (lengths, lies)
            assert min(peaks) > 0.999, (lengths, lies, peaks)
            most.append(max(peaks))
    assert most and max(most) < 1.4
