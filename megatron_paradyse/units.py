"""Quantities as people write them: 128K tokens, a scale of 1/32."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from megatron_paradyse.errors import UserError

KIBI = 1024
MAX_SEQ_LENGTH = 1 << 40  # tokens
MAX_BATCH_SIZE = 1 << 20
# As JSON Schema reads them too: no flags, no named groups.
COUNT_PATTERN = r"(\d{1,15}(?:\.\d{1,9})?)\s*([KMGkmg]?)[iI]?"
BYTES_PATTERN = r"(\d{1,15}(?:\.\d{1,9})?)\s*(?:([KMGT])(iB|B)|B)?"
_RATIO = re.compile(r"\d{1,15}(?:\.\d{0,15})?(?:[eE][+-]?\d{1,2})?(?:/\d{1,15})?")
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3}
_BYTE_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_count(text: str) -> int:
    """Read `4096`, `4K` or `1.5M` as a whole number; K, M and G are powers of 1024.

    Raises UserError when the text is something else or the number is not whole.
    """
    match = re.fullmatch(COUNT_PATTERN, text.strip())
    if match is None:
        raise UserError(f"a count is written like 4096, 128K or 1.5M (K = 1024), got {text[:40]!r}")
    value = Fraction(match[1]) * KIBI ** _POWERS[match[2].upper()]
    if value.denominator != 1:
        raise UserError(f"a count must be whole, got {text[:40]!r} = {float(value):g}")
    return int(value)


def parse_bytes(text: str) -> int:
    """Read `76GiB`, `512MiB` or `80GB` as bytes; iB counts in powers of 1024, B in powers of 1000.

    Raises UserError for anything else: 76G without a unit is one of two sizes.
    """
    match = re.fullmatch(BYTES_PATTERN, text.strip())
    if match is None:
        raise UserError(f"a size is written like 76GiB, 512MiB or 80GB, got {text[:40]!r}")
    base = KIBI if match[3] == "iB" else 1000
    return int(Fraction(match[1]) * base ** _BYTE_POWERS[match[2] or ""])


def parse_ratio(text: str) -> float:
    """Read `1/32`, `0.25` or `2` as a positive, finite factor; UserError otherwise."""
    if _RATIO.fullmatch(text.strip()):
        numerator, _, denominator = text.strip().partition("/")
        if not denominator or int(denominator) > 0:
            value = float(numerator) / int(denominator or 1)
            if value > 0 and math.isfinite(value):
                return value
    raise UserError(f"a factor is written like 1/32, 0.25 or 2 and above 0, got {text[:40]!r}")


def printable(text: str) -> str:
    """With control characters, and bytes of a file's name that are no text, escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def counted(count: int, noun: str, plural: str = "") -> str:
    """1 document, 2 documents; plural: where it is not the noun with an s."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def format_count(count: float) -> str:
    """Write a count of tokens short: 4096 as 4K, 640 as 640, 1500 as 1.46K (K = 1024)."""
    for symbol, power in (("G", 3), ("M", 2), ("K", 1)):
        if count >= KIBI**power:
            return (
                f"{count / KIBI**power:.3g}{symbol}"
                if count < 999.5 * KIBI**power
                else (f"{count / KIBI**power:.0f}{symbol}")
            )
    return f"{count:.3g}" if count < 999.5 else f"{count:.0f}"


def short_number(value: float) -> str:
    """1,234.5, and below 100 three digits: 12.3, 0.473."""
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}"


def bytes_text(count: float) -> str:
    """71.25 GiB, 119.0 MiB below one GiB, and 12 bytes where that would be 0.0 MiB."""
    if abs(count) >= KIBI**3:
        return f"{count / KIBI**3:,.2f} GiB"
    if 0 < abs(count) < KIBI**2 / 20:
        return counted(round(count), "byte")
    return f"{count / KIBI**2:,.1f} MiB"
