"""Strategies of other packages, as their entry points give them, held to the contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from importlib.metadata import EntryPoint
from typing import Any

import torch
from torch import Tensor

from megatron_paradyse.errors import UserError
from megatron_paradyse.strategies import ENTRY_POINT_GROUP
from megatron_paradyse.strategies.contract import AttentionWeights, MlpWeights, Strategy

REQUIRED, OPTIONAL = ("attention", "mlp", "check"), ("takes", "tiled_mlp")


def load_strategy(name: str, point: EntryPoint) -> Strategy:
    """The strategy of that name, whose functions raise UserError where they break the contract.

    UserError for an entry point that cannot be imported or gives something else.
    """
    where = f"entry point {name!r} of the group {ENTRY_POINT_GROUP}"
    try:
        strategy = point.load()
    except Exception as error:  # of whatever the package does as it is imported
        raise UserError(
            f"{where}: cannot be imported, {type(error).__name__}: {error}: repair its package, or "
            "uninstall it"
        ) from error
    if not isinstance(strategy, Strategy):
        kind = strategy if isinstance(strategy, type) else type(strategy)
        raise UserError(
            f"{where}: not an object of the class Strategy, but {kind.__name__}: name one"
        )
    if strategy.name != name:
        raise UserError(
            f"{where}: the strategy calls itself {strategy.name!r}: give both the same name"
        )
    for part in (*REQUIRED, *OPTIONAL):
        value = getattr(strategy, part)
        if not callable(value) and (value is not None or part in REQUIRED):
            raise UserError(f"{where}: {part} is {value!r:.40}, not a function: give one")
    tiled = strategy.tiled_mlp
    return replace(
        strategy,
        check=_answering(name, "check", strategy.check),
        takes=None if strategy.takes is None else _answering(name, "takes", strategy.takes),
        attention=_checked(name, "attention", strategy.attention),
        mlp=_checked(name, "mlp", strategy.mlp),
        tiled_mlp=None if tiled is None else _checked(name, "tiled_mlp", tiled),
    )


def _answering(name: str, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """UserError in the place of any other error: of its own code, before anything runs."""

    @wraps(function)
    def answering(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"strategy {name}: {part} ends with {type(error).__name__}: {error}: repair its "
                "package, or use another strategy"
            ) from error

    return answering


def _checked(name: str, part: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """UserError where it returns anything but [s/p, b, h] in the dtype of the weights."""

    @wraps(function)
    def checked(x: Tensor, weights: AttentionWeights | MlpWeights, *args, **kwargs) -> Tensor:
        out = function(x, weights, *args, **kwargs)
        last = weights.proj if isinstance(weights, AttentionWeights) else weights.fc2
        due = (torch.Size((*x.shape[:2], last.shape[0])), last.dtype)
        if isinstance(out, Tensor) and (out.shape, out.dtype) == due:
            return out
        given = f"a {type(out).__name__}"
        if isinstance(out, Tensor):
            given = f"{list(out.shape)} in {out.dtype}"
        raise UserError(
            f"strategy {name}: {part} returns {given}, where [s/p, b, h] = {list(due[0])} in "
            f"{due[1]} is due: repair its package, or use another strategy"
        )

    return checked
