"""The pairs (attention, MLP) that a layer may run, as arrays: one unit of a plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_paradyse.errors import UserError
from megatron_paradyse.plan import LayerChoice
from megatron_paradyse.planner.problem import Choice, LayerOptions, Problem, layer_choice


@dataclass(frozen=True, eq=False)
class Table:
    """Seconds, kept bytes, and workspace above the end of the layer, of every allowed pair.

    Bytes are whole numbers in float64, exact below 2^53.
    """

    options: LayerOptions
    pairs: np.ndarray  # [n] index of attention * number of MLP choices + index of MLP
    seconds: np.ndarray  # [n]
    kept: np.ndarray  # [n]
    workspace: np.ndarray  # [n]

    def choice(self, row: int) -> LayerChoice:
        attention, mlp = divmod(int(self.pairs[row]), len(self.options.mlp))
        return layer_choice(self.options.attention[attention].name, self.options.mlp[mlp].name)


@dataclass(frozen=True, eq=False)
class Run:
    """Consecutive layers that are alike."""

    num_layers: int
    table: Table


def make_runs(problem: Problem) -> list[Run]:
    """The layers in their order, consecutive alike layers together."""
    tables: dict[int, Table] = {}
    runs: list[tuple[LayerOptions, int]] = []
    for number in sorted(problem.layers):
        options = problem.layers[number]
        if runs and runs[-1][0] is options:
            runs[-1] = (options, runs[-1][1] + 1)
        else:
            runs.append((options, 1))
    for options, _ in runs:
        if id(options) not in tables:
            tables[id(options)] = make_table(options, problem)
    return [Run(count, tables[id(options)]) for options, count in runs]


def make_table(options: LayerOptions, problem: Problem) -> Table:
    """Every pair that the granularity allows."""
    a_seconds, a_kept, a_workspace = _columns(options.attention, problem.forward_only)
    m_seconds, m_kept, m_workspace = _columns(options.mlp, problem.forward_only)
    seconds = (a_seconds[:, None] + m_seconds).ravel()
    kept = (a_kept[:, None] + m_kept).ravel()
    workspace = np.maximum(a_workspace[:, None] - m_kept, m_workspace).ravel()
    own, needless = _pairs(options)
    needless = needless if len(needless) < len(seconds) else set()
    if own:
        rows = list(own)
        seconds[rows], kept[rows], workspace[rows] = _columns(
            tuple(own.values()), problem.forward_only
        )
    if problem.granularity != "operation":
        allowed = np.array(_alike(options), dtype=np.intp)
    elif needless:
        allowed = np.delete(np.arange(len(seconds)), list(needless))
    else:
        return Table(options, np.arange(len(seconds)), seconds, kept, workspace)
    return Table(options, allowed, seconds[allowed], kept[allowed], workspace[allowed])


def _pairs(options: LayerOptions) -> tuple[dict[int, Choice], set[int]]:
    """Rows whose pair has costs of its own, with these; rows that are not tried."""
    first = {c.name: i * len(options.mlp) for i, c in enumerate(options.attention)}
    second = {c.name: i for i, c in enumerate(options.mlp)}

    def row(pair: tuple[str, str]) -> int | None:
        there = pair[0] in first and pair[1] in second
        return first[pair[0]] + second[pair[1]] if there else None

    own = {row(pair): choice for pair, choice in options.pairs.items()}
    needless = {row(pair) for pair in options.untried}
    for pair, other in options.same.items():
        if other in options.pairs:
            own[row(pair)] = options.pairs[other]
        if row(other) is not None:
            needless.add(row(pair))
    return (
        {found: choice for found, choice in own.items() if found is not None},
        {found for found in needless if found is not None},
    )


def _columns(choices: tuple[Choice, ...], forward_only: bool) -> np.ndarray:
    """[3, n]: seconds, kept, workspace."""
    if forward_only:
        return np.array([(c.seconds, 0, c.forward_bytes) for c in choices], dtype=np.float64).T
    return np.array(
        [(c.seconds, c.kept_bytes, max(c.forward_bytes, c.backward_bytes)) for c in choices],
        dtype=np.float64,
    ).T


def _alike(options: LayerOptions) -> list[int]:
    """Pairs of one strategy; a half with a single choice runs it beside whatever the other runs."""
    attentions = [choice.name for choice in options.attention]
    mlps = [choice.name for choice in options.mlp]
    fixed = len(attentions) == 1 or len(mlps) == 1
    rows = [
        i * len(mlps) + j
        for i, attention in enumerate(attentions)
        for j, mlp in enumerate(mlps)
        if fixed or attention == mlp
    ]
    if not rows:
        raise UserError(
            f"layer granularity needs a strategy that attention and MLP share, got {attentions} "
            f"and {mlps}: allow one in both, or use granularity operation"
        )
    return rows
