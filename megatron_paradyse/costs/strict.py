"""Reads JSON that nobody vouches for: sizes, types, keys and numbers are checked."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from typing import Any, NoReturn

from megatron_paradyse.errors import UserError

MAX_TEXT = 500
MAX_INTEGER = 1 << 62


class ContentError(ValueError):
    """What is wrong and at which key; whoever knows the file and the remedy adds them."""


def load_json(path: str, *, max_bytes: int, remedy: str) -> tuple[Any, bytes]:
    """The value and the bytes of a JSON file of at most max_bytes; UserError for anything else.

    A byte order mark before it, as some editors leave one, is no part of it.
    """
    if not os.path.lexists(path):
        raise UserError(f"{path or repr(path)} does not exist: check the path, or {remedy}")
    if not os.path.isfile(path):
        raise UserError(f"{path} is not a regular file: check the path, or {remedy}")
    with open(path, "rb") as stream:
        content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise UserError(f"{path}: larger than {max_bytes >> 20} MiB, so not a cost file: {remedy}")
    try:
        value = json.loads(
            content.decode("utf-8-sig"), object_pairs_hook=_object, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        problem = " ".join(str(error).split())
        raise UserError(f"{path}: not JSON, or cut off ({problem:.120}): {remedy}") from error
    return value, content


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("an object has one key twice")
    return values


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def check_keys(
    value: Any, where: str, keys: tuple[str, ...], *, optional: tuple[str, ...] = ()
) -> dict[str, Any]:
    """An object with exactly these keys, and perhaps the optional ones."""
    if not isinstance(value, dict):
        raise ContentError(f"{where} must be an object, got {_kind(value)}")
    missing = [key for key in keys if key not in value]
    unknown = [key for key in value if key not in (*keys, *optional)]
    if missing or unknown:
        faults = [f"lacks {key!r}" for key in missing]
        faults += [f"has unknown {key!r:.60}" for key in unknown]
        raise ContentError(f"{where} {', '.join(faults[:5])}")
    return value


def check_array(value: Any, where: str, *, max_items: int, length: int | None = None) -> list[Any]:
    if not isinstance(value, list):
        raise ContentError(f"{where} must be an array, got {_kind(value)}")
    if len(value) > max_items or (length is not None and len(value) != length):
        allowed = f"{length}" if length is not None else f"at most {max_items}"
        raise ContentError(f"{where} must have {allowed} items, got {len(value)}")
    return value


def check_number(value: Any, where: str, *, low: float, high: float) -> float:
    # bool is an int to Python; and an int may be too large for a float.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ContentError(f"{where} must be a number, got {_kind(value)}")
    if not low <= value <= high or not math.isfinite(value):
        raise ContentError(f"{where} must lie in [{low:g}, {high:g}], got {_kind(value)}")
    return float(value)


def check_integer(value: Any, where: str, *, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ContentError(f"{where} must be a whole number, got {_kind(value)}")
    if not low <= value <= high:
        raise ContentError(f"{where} must lie in [{low}, {high}], got {_kind(value)}")
    return value


def check_text(value: Any, where: str, *, max_length: int = MAX_TEXT) -> str:
    if not isinstance(value, str):
        raise ContentError(f"{where} must be a text, got {_kind(value)}")
    if len(value) > max_length or not value.isprintable():
        raise ContentError(f"{where} must be at most {max_length} printable characters")
    return value


def check_numbers(
    value: Any, where: str, *, low: float, high: float, max_items: int, length: int | None = None
) -> tuple[float, ...]:
    items = check_array(value, where, max_items=max_items, length=length)
    return tuple([check_number(item, where, low=low, high=high) for item in items])


def check_object(value: Any, where: str, *, max_items: int) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) > max_items:
        raise ContentError(f"{where} must be an object of at most {max_items:,} keys")
    return value


def check_fields(
    cls: type, value: Any, where: str, *, optional: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The values of the fields of a dataclass; those that are int, bool or str are checked.

    optional: fields that may be missing, and are then None in the dataclass.
    """
    kinds = {field.name: str(field.type) for field in dataclasses.fields(cls)}
    needed = tuple(name for name in kinds if name not in optional)
    values = check_keys(value, where, needed, optional=optional)
    for name in values:
        kind = kinds[name].removesuffix(" | None") if name in optional else kinds[name]
        place = f"{where}.{name}"
        if kind == "int":
            check_integer(values[name], place, low=0, high=MAX_INTEGER)
        elif kind == "str":
            check_text(values[name], place)
        elif kind == "bool" and not isinstance(values[name], bool):
            raise ContentError(f"{place} must be true or false, got {_kind(values[name])}")
    return values


def _kind(value: Any) -> str:
    """The value if it is short, or what it is."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an array"
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        return "a huge number"
    return f"{value!r:.60}"
