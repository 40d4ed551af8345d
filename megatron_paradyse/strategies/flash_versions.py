"""Versions of the FlashAttention package that kernels.py calls."""

from __future__ import annotations

import re


def why_not_used(version: str) -> str:
    """In one line; "" where it is called: signatures changed in 2.7 and stayed in all later 2.x."""
    if re.match(r"2\.([7-9]|\d\d)\b", version):
        return ""
    return f"FlashAttention {version} is installed, 2.7 or a later 2.x would be used"
