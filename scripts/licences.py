"""Writes docs/licences.md: the licence of everything that requirements/dev.txt pins, by metadata.

.venv/bin/python scripts/licences.py
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)", re.M)
HEAD = """# Licences

megatron_paradyse itself: Apache-2.0 ([LICENSE](../LICENSE)). Below is what `requirements/dev.txt`
pins, with the licence that the metadata of each installed package states (2026-11-21,
`scripts/licences.py`). Packages of NVIDIA's CUDA libraries come with PyTorch's wheel for Linux and
are NVIDIA's property; none of them is part of this repository.

| package | version | licence |
| --- | --- | --- |
"""


def licence(name: str) -> str:
    """As the metadata say: an expression, else the classifiers, else the first line of the text."""
    try:
        values = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return "not installed on the machine that wrote this"
    if values.get("License-Expression"):
        return values["License-Expression"]
    classifiers = [
        text.rsplit(" :: ", 1)[-1]
        for text in values.get_all("Classifier") or []
        if text.startswith("License ::") and not text.endswith("OSI Approved")
    ]
    if classifiers:
        return ", ".join(classifiers)
    first = (values.get("License") or "not stated").strip().splitlines()
    return first[0][:80] if first else "not stated"


def page() -> str:
    """The whole file."""
    text = (ROOT / "requirements" / "dev.txt").read_text(encoding="utf-8")
    rows = [f"| {name} | {version} | {licence(name)} |" for name, version in PINNED.findall(text)]
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "licences.md").write_text(page(), encoding="utf-8")
