"""Packages for GPUs that are installed and do not run here: Megatron is not to find them.

It takes TransformerEngine's and apex's optimizers and norms where it can import them. Their kernels
run on GPUs only; and apex can be imported without its compiled parts, which its norms and
optimizers ask for when they are used.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

ON_GPUS_ONLY = ("transformer_engine", "apex")
COMPILED_OF_APEX = ("amp_C", "fused_layer_norm_cuda")


def hide_all() -> None:
    """Where nothing runs on a GPU, before Megatron is imported. What is imported already stays."""
    for name in ON_GPUS_ONLY:
        _hide(name)


def hide_broken_apex() -> str:
    """On a GPU, before Megatron is imported: what is wrong with the apex hidden, "" if none is."""
    if "apex" in sys.modules or importlib.util.find_spec("apex") is None:
        return ""
    try:
        for part in COMPILED_OF_APEX:
            importlib.import_module(part)
    except Exception as error:  # whatever a broken extension raises
        _hide("apex")
        return " ".join(f"{type(error).__name__}: {error}".split())[:150]
    return ""


def _hide(name: str) -> None:
    sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # its import is an ImportError
