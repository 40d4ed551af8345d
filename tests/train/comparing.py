"""What several ranks compare: tensors by name, all of which must be alike."""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = 1e-5


def relative_error(found: Tensor, true: Tensor) -> float:
    return float((found.double() - true.double()).norm() / true.double().norm())


def compare(label: str, expected: dict[str, Tensor], got: dict[str, Tensor]) -> None:
    """Print the largest relative error, of whatever has it; AssertionError beyond TOLERANCE."""
    assert expected.keys() == got.keys(), (label, expected.keys() ^ got.keys())
    errors = {name: relative_error(got[name], x) for name, x in expected.items()}
    worst = max(errors, key=errors.__getitem__)
    if torch.distributed.get_rank() == 0:
        print(f"compared {label}: {errors[worst]:.1e} {worst}", flush=True)
    assert all(error <= TOLERANCE for error in errors.values()), (label, worst, errors[worst])
