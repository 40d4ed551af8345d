"""Inputs near a seed: of its structure where it is JSON, of its lines and bytes everywhere."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

NASTY: list[Any] = [
    *(None, True, False, 0, -1, 1, 1 << 31, 1 << 62, 1 << 70, -(1 << 70), 10**400, 1e308, -1e-320),
    *(0.5, "", "x", "\x00", "\ud800", "../../etc/passwd", "<script>alert(1)</script>", "a" * 5000),
    *([], {}, [[]], [None] * 300, {"": {}}, {"__class__": "x"}, "nan", "1e999", "\u202e", "${x}"),
]
TEXTS = [
    *(b"{", b"}", b"[" * 500, b'{"a":' * 300, b"\xff\xfe", b"\x00", b"NaN", b"-Infinity", b"1e999"),
    *(b"&a [*a]", b"*a", b"!!python/object/apply:os.system [id]", b"<<: *a", b"? ", b"- ", b"\t"),
    *(b"99999999999999999999", b"..", b"\n", b"\r\n", b": ", b"#", b"%", b"'", b'"', b"|", b">"),
]


def mutated(seeds: list[bytes]) -> st.SearchStrategy[bytes]:
    """Inputs made from one of the seeds by one to four changes, or from nothing."""
    structured = [value for value in map(_json_of, seeds) if value is not None]
    ways = [st.sampled_from(seeds).flatmap(_bytes_changed), st.binary(max_size=300)]
    if structured:
        ways += [st.sampled_from(structured).flatmap(_value_changed)] * 2
    return st.one_of(ways)


def _json_of(seed: bytes) -> Any:
    """The value of a seed, or of its first line."""
    for text in (seed, seed.split(b"\n")[0]):
        try:
            value = json.loads(text)
        except ValueError:
            continue
        return value if isinstance(value, dict | list) else None
    return None


@st.composite
def _value_changed(draw: st.DrawFn, value: Any) -> bytes:
    changed = json.loads(json.dumps(value))
    for _ in range(draw(st.integers(1, 4))):
        _change(draw, changed)
    return json.dumps(changed, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")


def _change(draw: st.DrawFn, value: Any) -> None:
    """Replace, leave out or add something at some depth."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = draw(st.sampled_from(keys[:50]))
        inner = value[key]
        if isinstance(inner, dict | list) and inner and draw(st.booleans()):
            value = inner
            continue
        how = draw(st.sampled_from(("replace", "drop", "add")))
        if how == "drop":
            del value[key]
        elif how == "add" and isinstance(value, dict):
            value[draw(st.sampled_from(("x", "", "schema_version", "a" * 300)))] = _nasty(draw)
        else:
            value[key] = _nasty(draw)
        return


def _nasty(draw: st.DrawFn) -> Any:
    return copy.deepcopy(draw(st.sampled_from(NASTY)))


@st.composite
def _bytes_changed(draw: st.DrawFn, seed: bytes) -> bytes:
    content = seed[:20_000]
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(content)))
        how = draw(st.sampled_from(("insert", "cut", "overwrite", "drop", "twice")))
        if how == "insert":
            content = content[:place] + draw(st.sampled_from(TEXTS)) + content[place:]
        elif how == "cut":
            content = content[:place]
        elif how == "overwrite":
            new = draw(st.binary(min_size=1, max_size=8))
            content = content[:place] + new + content[place + len(new) :]
        elif how == "drop":
            content = content[:place] + content[place + draw(st.integers(1, 200)) :]
        else:
            content = content[:place] + content[max(0, place - 50) :]
    return content
