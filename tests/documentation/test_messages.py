"""docs/troubleshooting.md quotes messages that the package prints."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from tests.documentation.markdown import ROOT, Document

PAGE = Document(ROOT / "docs" / "troubleshooting.md")
QUOTED = re.findall(r"^\| `([^`]+)` \|", PAGE.text, re.M)
VALUE = "…"


@cache
def _texts() -> list[str]:
    """Every text in the package's code, with VALUE for what is filled in."""
    texts: list[str] = []
    for path in sorted((ROOT / "megatron_paradyse").rglob("*.py")):
        texts += _texts_of(ast.parse(path.read_text(encoding="utf-8")))
    return texts


def _texts_of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        parts = (p.value if isinstance(p, ast.Constant) else VALUE for p in node.values)
        yield "".join(map(str, parts))
    else:
        for child in ast.iter_child_nodes(node):
            yield from _texts_of(child)


def _is_in(quoted: str, text: str) -> bool:
    """Whether its fixed parts are there in order, with whatever the code fills in between."""
    place = 0
    for part in (part.strip() for part in quoted.split(VALUE)):
        place = text.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return True


def test_messages_are_quoted_once():
    assert len(QUOTED) > 60 and len(set(QUOTED)) == len(QUOTED)


@pytest.mark.parametrize("quoted", QUOTED)
def test_a_quoted_message_is_one_of_the_package(quoted):
    assert len(quoted.replace(VALUE, "").strip()) >= 12, "too little to be found by"
    assert any(_is_in(quoted, text) for text in _texts()), quoted


def test_a_message_that_nobody_prints_is_noticed():
    assert not any(_is_in("… is too long by …: cut it", text) for text in _texts())
