"""Every strategy stays on its CUDA device, forward and backward, and gives all gradients."""

from __future__ import annotations

import subprocess
import sys


def test_strategies_stay_on_a_cuda_device():
    command = [sys.executable, "-m", "tests.strategies.on_fake_cuda"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
