"""Refuses a Megatron that this package does not know, before anything of it is imported."""

from __future__ import annotations

import importlib.util
import re
from importlib import metadata
from pathlib import Path

from megatron_paradyse.errors import UserError

SUPPORTED = "0.19"
PACKAGE, TAG = f"megatron-core>={SUPPORTED},<0.20", "core_v0.19.2"
REMEDY = f"pip install '{PACKAGE}', or check out {TAG} of Megatron-LM"


def check_megatron() -> None:
    """UserError where megatron.core is missing or of another version than 0.19.x."""
    found = megatron_version()
    if found is None:
        raise UserError(f"megatron.core is not installed: {REMEDY}")
    if not found.startswith(f"{SUPPORTED}."):
        raise UserError(
            f"megatron.core {found} is installed, megatron_paradyse runs on {SUPPORTED}.x: {REMEDY}"
        )


def megatron_version() -> str | None:
    """Of the megatron.core that an import would find, read without importing it."""
    found = find_megatron()
    return None if found is None else found[0]


def find_megatron() -> tuple[str, Path] | None:
    """That version, and the folder that holds the package megatron."""
    spec = importlib.util.find_spec("megatron")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder, "core", "package_info.py")
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            parts = [
                re.search(rf"^{name} *= *(\d+)", text, re.M) for name in ("MAJOR", "MINOR", "PATCH")
            ]
            return ".".join(part[1] if part else "?" for part in parts), Path(folder).parent
    return None


def is_wheel(folder: Path) -> bool:
    """Whether what lies there was installed as the package megatron-core; else it is a checkout."""
    try:
        return Path(str(metadata.distribution("megatron-core").locate_file(""))) == folder
    except metadata.PackageNotFoundError:
        return False
