"""What this machine is, asked of the operating system alone."""

from __future__ import annotations

import platform
from pathlib import Path

GROUP = Path("/sys/fs/cgroup")


def free_bytes() -> int | None:
    """Memory that programs may still take, by the system and by the group that this one is in.

    None where the system does not tell.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None
    try:
        limit, used = (int((GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no group, or one without a limit, which says "max"
        return free * 1024
    return min(free * 1024, max(0, limit - used))


def cpu_name() -> str:
    """The processor's name, as people know it where the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
