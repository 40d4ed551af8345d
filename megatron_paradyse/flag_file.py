"""Megatron's flags as lines of a YAML file: `num-layers: 4`, without the dashes in front.

true gives the flag alone, false and null leave it out, a list gives several values. Values stay as
they are written: 1e-4 is 1e-4, 0010 is 0010.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from megatron_paradyse.errors import UserError
from megatron_paradyse.settings import RUN_FILE_KEY
from megatron_paradyse.yaml_file import compose_yaml, refuse_twice

NAME = r"-*[a-z][a-z0-9_-]*"  # num-layers, num_layers or --num-layers
SCALAR: dict[str, Any] = {"type": ["string", "number", "boolean"], "minLength": 1}
VALUE: dict[str, Any] = {"anyOf": [SCALAR, {"type": "array", "items": SCALAR}, {"type": "null"}]}


def read_flags(path: str) -> list[str]:
    """The flags of the file that --model names; UserError with the line of what is wrong.

    Of a file for `megatron-paradyse train`, those under its key `megatron`, and the file itself as
    the --paradyse-config.
    """
    root, place = compose_yaml(path, "--model"), f"--model {path}"
    if root is None:
        raise UserError(f"{place}: expected 'flag: value' lines, as in 'num-layers: 4'")
    nodes = {key.value: node for key, node in items_of(place, "a model", root)}
    if "megatron" not in nodes:
        return flags_of(place, "a model", root)
    refuse_twice(place, root)
    settings = ["--paradyse-config", path] if RUN_FILE_KEY in nodes else []
    return [*flags_of(place, "megatron", nodes["megatron"]), *settings]


def flags_of(path: str, what: str, node: yaml.Node) -> list[str]:
    """The flags of a mapping; UserError that begins with path and the line."""
    flags: list[str] = []
    names: set[str] = set()
    for key, value in items_of(path, what, node):
        place = f"{path}, line {key.start_mark.line + 1}"
        if not re.fullmatch(NAME, str(key.value)):
            raise UserError(
                f"{place}: {key.value!r:.40} is no flag of Megatron's: write it like num-layers"
            )
        name = "--" + key.value.lstrip("-").replace("_", "-")
        if name in names:
            raise UserError(f"{place}: {key.value} is there twice: keep one")
        names.add(name)
        flags += _flag(path, name, value)
    return flags


def _flag(path: str, name: str, node: Any) -> list[str]:
    if isinstance(node, yaml.SequenceNode):
        return [name, *(text_of(path, name, item) for item in node.value)]
    if node.tag == "tag:yaml.org,2002:null":
        return []
    if node.tag == "tag:yaml.org,2002:bool":
        return [name] if str(node.value).lower() in ("true", "yes", "on") else []
    return [name, text_of(path, name, node)]


def items_of(path: str, what: str, node: yaml.Node) -> list[tuple[Any, Any]]:
    """The keys and values of a mapping whose keys are plain; UserError for anything else."""
    if not isinstance(node, yaml.MappingNode):
        line = node.start_mark.line + 1
        raise UserError(f"{path}, line {line}: {what} is described by 'key: value' lines")
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            line = key.start_mark.line + 1
            raise UserError(f"{path}, line {line}: expected 'key: value' lines")
    return node.value


def text_of(path: str, key: str, node: yaml.Node) -> str:
    """A scalar as it is written."""
    if not isinstance(node, yaml.ScalarNode) or not node.value or not node.value.isprintable():
        line = node.start_mark.line + 1
        raise UserError(f"{path}, line {line}: {key}: expected a number or a text")
    return node.value
