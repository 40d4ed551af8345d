"""What another program prints."""

from __future__ import annotations

import shutil
import subprocess

SECONDS = 10


def output_of(*command: str) -> str:
    """Its standard output, whatever its bytes are; "" where it is not there, fails or hangs."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        process = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=SECONDS,
            check=True,
        )
    except (subprocess.SubprocessError, OSError):
        return ""
    return process.stdout.strip()
