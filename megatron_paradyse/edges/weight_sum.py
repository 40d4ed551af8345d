"""The gradient of the loss head's weight: the sum of a product of every tile."""

from __future__ import annotations

import torch
from torch import Tensor


class WeightSum:
    """Takes no memory before the first product, at which most of what its tile held has gone."""

    def __init__(self, weight: Tensor, dtype: torch.dtype):
        """dtype: of the sum. A product of a half type is rounded once per tile before."""
        self._weight, self._dtype = weight, dtype
        self._sum: Tensor | None = None

    def add_product(self, a: Tensor, b: Tensor) -> None:
        if self._sum is None:
            self._sum = (a @ b).to(self._dtype)
        elif a.dtype == self._dtype:
            self._sum.addmm_(a, b)
        else:
            self._sum += a @ b

    def scale(self, factor: float) -> None:
        if self._sum is not None:
            self._sum.mul_(factor)

    def take(self) -> Tensor:
        """The sum, which is let go here; zeros where no tile has been."""
        taken, self._sum = self._sum, None
        return torch.zeros_like(self._weight, dtype=self._dtype) if taken is None else taken
