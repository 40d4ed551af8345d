"""What this machine is, asked of the operating system alone."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu_name() -> str:
    """The processor's name, as people know it where the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
