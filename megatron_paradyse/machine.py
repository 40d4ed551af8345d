"""What this machine is, asked of the operating system alone."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUP = Path("/proc/self/cgroup")


def system_memory_bytes() -> int:
    """All that the system has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_bytes() -> int | None:
    """Memory that programs may still take, by the system and by the groups that this one is in.

    None where the system does not tell.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None
    return min([free * 1024, *_free_in_groups()])


def _free_in_groups() -> Iterator[int]:
    """What is left of the limit of this process's group and of every one around it.

    Files that the system has cached and can drop count as free.
    """
    try:
        lines = OWN_GROUP.read_text().splitlines()
    except OSError:
        lines = []
    own = PurePosixPath(next((line[4:] for line in lines if line.startswith("0::/")), ""))
    for place in (own, *own.parents):
        group = GROUPS / place
        try:
            limit, used = (
                int((group / name).read_text()) for name in ("memory.max", "memory.current")
            )
        except (OSError, ValueError):
            continue  # no group, not seen from here, or without a limit, which says "max"
        yield max(0, limit - used + _inactive_file(group))


def _inactive_file(group: Path) -> int:
    """Bytes of cached files that nothing has read for long; 0 where the system does not tell."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
        return int(dict(line.split() for line in lines)["inactive_file"])
    except (OSError, ValueError, KeyError):
        return 0


def cpu_name() -> str:
    """The processor's name, as people know it where the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
