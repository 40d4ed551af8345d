"""docs/troubleshooting.md quotes messages that the package prints."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import click
import pytest

from megatron_paradyse.cli import cli
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


def test_commands_in_messages_have_the_options_that_they_are_quoted_with():
    found = 0
    for text in _texts():
        for quoted in re.findall(r"megatron-paradyse ([a-z][^\n'`]*)", text):
            words = quoted.split()
            with click.Context(cli) as context:
                command = cli.get_command(context, words[0])
                if isinstance(command, click.Group) and len(words) > 1:
                    command = command.get_command(context, words[1])
                if command is None or command.context_settings.get("ignore_unknown_options"):
                    continue
                known = {name for one in command.params for name in one.opts}
            options = {word for word in words if re.fullmatch(r"--[a-z-]+", word)}
            assert {o for o in options if not o.startswith("--paradyse")} <= known, quoted
            found += bool(options)
    assert found > 5


def test_what_a_training_prints_says_whose_news_it_is():
    folder = ROOT / "megatron_paradyse"
    begun = [
        text
        for path in (*(folder / "train").glob("*.py"), folder / "cpu_platform.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("print", "print_rank_0")
        for text in list(_texts_of(call.args[0]))[:1]
    ]
    assert len(begun) > 6
    assert not [text for text in begun if not text.startswith("> paradyse: ")]
