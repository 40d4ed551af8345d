"""Triton's interpreter, which runs kernels on the CPU: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def interpreted(module: str, call: str) -> str:
    """stdout of a call in a module of tests.strategies."""
    run = subprocess.run(
        [sys.executable, "-c", f"from tests.strategies import {module}; {module}.{call}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout
