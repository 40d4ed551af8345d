"""One flat YAML mapping of a user's, read strictly: errors name the file and the line."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from megatron_paradyse.errors import UserError, did_you_mean
from megatron_paradyse.units import parse_bytes

MAX_CHARACTERS = 1 << 20
MAX_BYTES = 1e18  # of a size
# Numbers that are others to YAML 1.1 than to who wrote them: 010 is 8, and 1:30 is 90.
NOT_DECIMAL = re.compile(r"[-+]?(0[0-7_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
MAX_NODES = 20_000  # with every alias written out; PyYAML reads so many in about a second


@dataclass(frozen=True)
class Entry:
    """The values of a mapping and the lines of their keys."""

    path: str
    values: dict[str, Any]
    lines: dict[str, int]

    def error(self, key: str | None, why: str) -> UserError:
        place = self.path if key is None else f"{self.path}, line {self.lines[key]}"
        return UserError(f"{place}: {why if key is None else f'{key}: {why}'}")

    def number(self, key: str, *, low: float, high: float, above: bool = False) -> float:
        """A number from low (or, `above`, beyond it) to high; YAML reads 3e12 as a text."""
        value = self.values[key]
        try:
            number = float(value) if not isinstance(value, bool) else float("nan")
        except (TypeError, ValueError):
            number = float("nan")
        if not low <= number <= high or (above and number == low):
            bounds = f"above {low:g} and at most {high:g}" if above else f"in [{low:g}, {high:g}]"
            raise self.error(key, f"expected a number {bounds}, got {value!r:.40}")
        return number

    def size(self, key: str) -> int:
        """Bytes, as a number or as 80GiB."""
        value = self.values[key]
        if not isinstance(value, str) or value.isdigit():
            return int(self.number(key, low=1, high=MAX_BYTES))
        try:
            size = parse_bytes(value)
        except UserError as error:
            raise self.error(key, str(error)) from error
        if not 1 <= size <= MAX_BYTES:
            raise self.error(key, f"expected 1 to {MAX_BYTES:g} bytes, got {value:.40}")
        return size

    def text(self, key: str) -> str:
        value = self.values[key]
        if not isinstance(value, str) or not value.isprintable() or not 0 < len(value) <= 200:
            raise self.error(key, f"expected a text, got {value!r:.40}")
        return value


class _TooManyError(Exception):
    """Values, while they are read."""


class _BoundedLoader(yaml.SafeLoader):
    num_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES:
            raise _TooManyError
        return super().compose_node(parent, index)


def compose_yaml(path: str, what: str = "") -> yaml.Node | None:
    """The nodes of a YAML file, None for an empty one; UserError where there are none.

    what: before the path in errors, such as the flag that names it.
    """
    place = f"{what} {path}".lstrip()
    try:
        if stat.S_ISFIFO(os.stat(path).st_mode):  # opening it would wait for its writer
            raise UserError(f"{place} is a pipe: give an existing YAML file")
        with open(path, encoding="utf-8") as stream:
            text = stream.read(MAX_CHARACTERS + 1)
        if len(text) > MAX_CHARACTERS:
            raise UserError(f"{place}: larger than {MAX_CHARACTERS >> 20} MiB: give a smaller file")
        root = yaml.compose(text, _BoundedLoader)
        if root is not None and _expanded_nodes(root) > MAX_NODES:
            raise UserError(f"{place}: its aliases make more than {MAX_NODES:,} values: write less")
        return root
    except _TooManyError as error:
        raise UserError(
            f"{place}: more than {MAX_NODES:,} values: write less, layers as ranges such as 1-4"
        ) from error
    except OSError as error:
        raise UserError(f"{place}: {error.strerror}: give an existing YAML file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{place} is not YAML: {error.reason}: save it as UTF-8 text") from error
    except RecursionError as error:
        raise UserError(f"{place} is not YAML that anyone wrote: nested too deeply") from error
    except yaml.YAMLError as error:
        raise UserError(f"{place}{yaml_problem(error)}") from error


def _expanded_nodes(root: yaml.Node) -> int:
    """How many values there are when every alias is written out; an alias of itself: no end."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = MAX_NODES + 1  # while it is open
            inner = node.value if isinstance(node.value, list) else []
            parts = (
                part for item in inner for part in (item if isinstance(item, tuple) else [item])
            )
            sizes[id(node)] = 1 + sum(size(part) for part in parts)
        return sizes[id(node)]

    return size(root)


def yaml_problem(error: yaml.YAMLError) -> str:
    """What is wrong, where, and what mends it, to follow the name of the file."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return f" is not YAML: {' '.join(str(error).split())}"
    remedy = "check indentation, quotes and brackets there"
    if "'\\t'" in problem:
        remedy = "indent with spaces, not with tabs"
    return f", line {mark.line + 1}: this is not YAML: {problem}: {remedy}"


def entry_of(path: str, node: yaml.Node | None, what: str, keys: Sequence[str]) -> Entry:
    """A mapping of no other keys than these; UserError with the line of what is wrong."""
    if not isinstance(node, yaml.MappingNode):
        place = path if node is None else f"{path}, line {node.start_mark.line + 1}"
        raise UserError(f"{place}: {what} is described by 'key: value' lines")
    entry = Entry(path, {}, {})
    for key_node, value_node in node.value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if key not in keys:
            near = did_you_mean(key, keys)
            raise UserError(
                f"{path}, line {line}: {what} has no {key!r:.40}: {near}use {', '.join(keys)}"
            )
        if key in entry.values:
            raise UserError(f"{path}, line {line}: {key} is there twice: keep one")
        entry.values[key] = value_of(value_node, f"{path}, line {line}: {key}")
        entry.lines[key] = line
    return entry


def value_of(node: yaml.Node, where: str) -> Any:
    """What a node holds; UserError that begins with where for what PyYAML cannot read: a tag of
    Python's, a thirteenth month, a number of thousands of digits.
    """
    try:
        return yaml.SafeLoader("").construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        why = getattr(error, "problem", None) or str(error)
        raise UserError(
            f"{where}: cannot be read: {' '.join(why.split()):.200}: put a text in quotes"
        ) from error


def decimal_value_of(node: yaml.Node, where: str) -> Any:
    """As value_of; UserError for numbers of base 8 or 60 too."""
    value = value_of(node, where)
    for part in _scalars(node):
        if part.tag.endswith((":int", ":float")) and NOT_DECIMAL.fullmatch(part.value):
            read = yaml.SafeLoader("").construct_object(part)
            raise UserError(
                f"{where}: {part.value:.40} is {read} in YAML: write the number in decimal, or "
                f"'{part.value:.40}' in quotes for a text"
            )
    return value


def _scalars(node: yaml.Node) -> Iterator[yaml.ScalarNode]:
    """Those within a node that has been read, so that none holds itself."""
    if isinstance(node, yaml.ScalarNode):
        yield node
        return
    for part in node.value:
        for inner in part if isinstance(part, tuple) else (part,):
            yield from _scalars(inner)


def refuse_twice(path: str, node: yaml.Node) -> None:
    """UserError where a mapping inside a node has one key twice, of which PyYAML would keep the
    last, or a list or a mapping as a key, which it cannot read.
    """
    seen, waiting = set(), [node]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:  # an alias may hold itself
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif isinstance(node, yaml.MappingNode):
            keys: set[str] = set()
            for key, value in node.value:
                where = f"{path}:{key.start_mark.line + 1}"
                if not isinstance(key, yaml.ScalarNode):
                    raise UserError(
                        f"{where}: a key is a {key.id}: write it as a text or a number, such as 1-2"
                    )
                if key.value in keys:
                    raise UserError(f"{where}: key {key.value!r:.60} is given twice: keep one")
                keys.add(key.value)
                waiting.append(value)
