"""Legacy checkpoints give the model all its weights, or are refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.training import print_rank_0

from megatron_paradyse.doors import opened
from megatron_paradyse.errors import UserError

OF_ITS_RUN = (
    "give the flags that it was trained with, --transformer-impl among them, or another --load"
)
_EXTRA = "_extra_state"  # of TransformerEngine's modules, which differs between its versions


@contextlib.contextmanager
def weights_all_read(folder: str | None) -> Iterator[None]:
    """While Megatron loads the checkpoint in this folder.

    What PyTorch refuses it loads again in part, and prints "load_return: None". UserError where
    weights of the model are not among those of the checkpoint; of others a line says that they
    are passed over.
    """
    load, refused = torch.nn.Module.load_state_dict, []

    def load_all(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            result = load(module, *args, **kwargs)
        except RuntimeError:
            refused.append(module)
            raise
        if any(module is one for one in refused):
            _check(folder, missing=result.missing_keys, left=result.unexpected_keys)
        return result

    with opened([(torch.nn.Module, "load_state_dict", load_all)]):
        yield


def _check(folder: str | None, *, missing: list[str], left: list[str]) -> None:
    if lacked := _named(missing):
        raise UserError(
            f"the checkpoint in {folder} cannot be loaded: it lacks {lacked}, which this model "
            f"has: {OF_ITS_RUN}"
        )
    if more := _named(left):
        print_rank_0(
            f"> paradyse: the checkpoint in {folder} has {more}, which this model does not have: "
            "passed over"
        )


def _named(keys: list[str]) -> str:
    """The first weight of these, and how many more; "" where none is a weight."""
    weights = [key for key in keys if not key.endswith(_EXTRA)]
    return weights[0] + (f" and {len(weights) - 1} more" if weights[1:] else "") if weights else ""
