"""The dropout hash drops the right share, evenly, and without structure."""

from __future__ import annotations

import pytest
import torch

from megatron_paradyse.strategies.dropout import keep_mask, keep_mask_of_ranges

CPU = torch.device("cpu")


def _mask(dropout: float, seed: int = 7, size: int = 256) -> torch.Tensor:
    return keep_mask_of_ranges(
        seed,
        sequences=range(2),
        heads=range(4),
        queries=range(size),
        keys=range(size),
        dropout=dropout,
        device=CPU,
    )


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.9])
def test_share_of_kept_entries_is_binomial(dropout):
    """Along every axis: standardised counts have mean 0 and variance 1, none beyond 6 sigma."""
    keep = _mask(dropout).double()
    for axis in range(4):
        others = [other for other in range(4) if other != axis]
        count = keep.sum(others)
        trials = keep.numel() / keep.shape[axis]
        z = (count - trials * (1 - dropout)) / (trials * dropout * (1 - dropout)) ** 0.5
        assert z.abs().max() < 6, (axis, z)
        if keep.shape[axis] > 100:
            assert 0.7 < z.var() < 1.4, (axis, z.var())


def test_neighbours_and_seeds_are_uncorrelated():
    keep = _mask(0.5).double() - 0.5
    bound = 5 * 0.25 / keep.numel() ** 0.5  # five sigma
    pairs = [
        (keep[..., 1:], keep[..., :-1]),
        (keep[..., 1:, :], keep[..., :-1, :]),
        (keep[..., 1:, 1:], keep[..., :-1, :-1]),
        (keep[:, 1:], keep[:, :-1]),
        (keep[1:], keep[:-1]),
        (keep, keep.transpose(-1, -2)),
        (keep, _mask(0.5, seed=8).double() - 0.5),
        (keep, _mask(0.5, seed=7 + (1 << 32)).double() - 0.5),
    ]
    for first, second in pairs:
        assert (first * second).mean().abs() < 2 * bound


@pytest.mark.parametrize("seed", [0, 1, 1 << 32])
def test_no_diagonal_is_dropped_as_a_whole(seed):
    """Of no sequence and head, however queries and keys are shifted against each other."""
    keep = _mask(0.1, seed=seed)
    for shift in range(-8, 9):
        shares = keep.diagonal(shift, -2, -1).double().mean(-1)
        assert shares.min() > 0.7, (shift, shares)  # 0.9 expected: eleven sigma


def test_any_cut_of_the_score_matrix_gives_the_same_mask():
    indices = {"sequences": [1], "heads": [3, 2], "queries": [5, 200, 17], "keys": [0, 255]}
    part = keep_mask(7, dropout=0.3, **{k: torch.tensor(v) for k, v in indices.items()})
    whole = _mask(0.3)
    for i, head in enumerate(indices["heads"]):
        for j, query in enumerate(indices["queries"]):
            assert torch.equal(part[0, i, j], whole[1, head, query, indices["keys"]])


def test_long_positions_and_large_seeds_stay_in_range():
    keep = keep_mask_of_ranges(
        2**63 - 1,
        sequences=range(1),
        heads=range(1),
        queries=range(10**7, 10**7 + 64),
        keys=range(10**7, 10**7 + 64),
        dropout=0.5,
        device=CPU,
    )
    assert 0.4 < keep.double().mean() < 0.6
