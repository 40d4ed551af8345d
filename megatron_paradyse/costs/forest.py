"""Random forests of one or two variables, collapsed to step tables.

A forest of s alone is a step function of s. With the profiled batch sizes as a second variable it
is one step function per batch size. So a fitted forest is stored and answered as sorted edges and
values: microseconds, and no xgboost to answer.

The published forest is XGBRFRegressor with 50 trees, depth 10 and seed 42. That class is
deprecated and needs scikit-learn. What it does is one round of boosting with 50 parallel trees, a
learning rate of 1 and 80% of the rows per tree: that is asked of xgboost here. Splits are exact, in
the middle between two lengths, and y is scaled to a mean of 1, because xgboost ignores gains below
1e-6.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_paradyse.costs.laws import Array
from megatron_paradyse.errors import UserError

FOREST = {
    "num_parallel_tree": 50,
    "max_depth": 10,
    "seed": 42,
    "learning_rate": 1.0,
    "subsample": 0.8,
    "reg_lambda": 1e-5,
    "tree_method": "exact",
    "nthread": 1,
}


@dataclass(frozen=True)
class StepTable:
    """rows[i][k] at batch_sizes[i] (or nearest to it) and edges[k-1] <= s < edges[k]."""

    edges: tuple[float, ...]
    batch_sizes: tuple[int, ...]
    rows: tuple[tuple[float, ...], ...]

    def __call__(self, seq_length: float, batch_size: int) -> float:
        row = self.rows[nearest(self.batch_sizes, batch_size)]
        return row[bisect_right(self.edges, seq_length)]

    def cut_at(self, lengths: Iterable[float]) -> StepTable:
        """The same steps, another of which begins at each of these lengths."""
        edges = sorted({*self.edges, *lengths})
        steps = [0, *(bisect_right(self.edges, edge) for edge in edges)]
        rows = tuple(tuple(row[step] for step in steps) for row in self.rows)
        return StepTable(tuple(edges), self.batch_sizes, rows)


def nearest(batch_sizes: tuple[int, ...], batch_size: int) -> int:
    """The index of the profiled batch size that is nearest; the smaller of two."""
    return min(range(len(batch_sizes)), key=lambda i: abs(batch_sizes[i] - batch_size))


def forest_steps(s: Array, b: Array, y: Array) -> StepTable:
    """The published forest, fitted to y at the points (s, b). UserError without xgboost."""
    try:
        import xgboost
    except ImportError as error:
        raise UserError(f"a fit needs xgboost ({error}): pip install xgboost") from error

    batch_sizes = np.unique(b)
    features = np.stack((s, b), axis=1) if len(batch_sizes) > 1 else s[:, None]
    scale = float(np.abs(y).mean()) or 1.0
    data = xgboost.DMatrix(features, label=y / scale)
    with xgboost.config_context(verbosity=0):
        booster = xgboost.train(FOREST, data, num_boost_round=1)
    trees = [json.loads(tree) for tree in booster.get_dump(dump_format="json")]
    found: set[float] = set()
    for tree in trees:
        _collect_thresholds(tree, found)
    edges = np.array(sorted(found))
    # An edge belongs to the step that it begins.
    starts = np.concatenate(([min(1.0, float(s.min()))], edges))
    rows = []
    for batch_size in batch_sizes:
        columns = (starts, np.full_like(starts, batch_size))[: features.shape[1]]
        rows.append(booster.inplace_predict(np.stack(columns, axis=1)).astype(float) * scale)
    return StepTable(
        tuple(edges.tolist()),
        tuple(int(batch_size) for batch_size in batch_sizes),
        tuple(tuple(row.tolist()) for row in rows),
    )


def nearest_steps(s: Array, b: Array, y: Array) -> StepTable:
    """At any s the y of the length that is nearest, of those measured at that batch size."""
    lengths, batch_sizes = np.unique(s), np.unique(b)
    rows = []
    for batch_size in batch_sizes:
        measured, values = s[b == batch_size], y[b == batch_size]
        rows.append(tuple(float(values[np.argmin(np.abs(measured - at))]) for at in lengths))
    edges = (lengths[:-1] + lengths[1:]) / 2
    return StepTable(tuple(edges.tolist()), tuple(int(size) for size in batch_sizes), tuple(rows))


def _collect_thresholds(node: dict[str, Any], found: set[float]) -> None:
    if "children" not in node:
        return
    if node["split"] == "f0":
        # xgboost compares in float32; its decimal text must mean the same number.
        found.add(float(np.float32(node["split_condition"])))
    for child in node["children"]:
        _collect_thresholds(child, found)
