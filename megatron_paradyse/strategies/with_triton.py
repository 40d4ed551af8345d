"""Whether kernels in Triton run here: it builds what launches them with a C compiler, once."""

from __future__ import annotations

import functools
import importlib.util
import logging

logger = logging.getLogger(__name__)


@functools.cache
def has_triton() -> bool:
    """Asked of CUDA devices. Says once where it is installed and does not run."""
    reason = why_not()
    if reason and is_installed():
        logger.warning("Triton does not run (%s): slower kernels of PyTorch are used", reason)
    return not reason


def is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def why_not() -> str:
    """In one line; "" where it runs."""
    if not is_installed():
        return "it is not installed"
    try:
        from triton.runtime import driver

        driver.active.get_current_target()
    except Exception as error:  # whatever a build, or a driver, raises
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return ""
