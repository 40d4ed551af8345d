"""Legacy checkpoints give the model all its weights, or are refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.training import print_rank_0

from megatron_paradyse.doors import opened
from megatron_paradyse.errors import UserError

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
    missing, left = ([key for key in keys if not key.endswith(_EXTRA)] for keys in (missing, left))
    if missing:
        others = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise UserError(
            f"the checkpoint in {folder} cannot be loaded: it lacks {missing[0]}{others}, which "
            "this model has: give the flags that it was trained with, --transformer-impl among "
            "them, or another --load"
        )
    if left:
        others = f" and {len(left) - 1} more" if left[1:] else ""
        print_rank_0(
            f"> paradyse: the checkpoint in {folder} has {left[0]}{others}, which this model does "
            "not have: passed over"
        )
