"""What a key of a YAML file may hold: a check for training, and JSON Schema for editors.

check(value, where) gives the value in the type that the program uses, or raises UserError that
begins with where. A check sees what PyYAML makes of the text: `off` is False, 1e-4 a text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_paradyse.costs.layers import MAX_LAYERS
from megatron_paradyse.errors import UserError
from megatron_paradyse.strategies import BUILT_IN, OFFLOAD, RECOMPUTE, parse_strategy_name
from megatron_paradyse.units import BYTES_PATTERN, COUNT_PATTERN, parse_bytes, parse_count

Schema = dict[str, Any]
SPAN = r"(\d{1,6})(?:-(\d{1,6}))?"  # of layers: 5, or 1-4; numbers beyond are refused by name
MAX_SECONDS = 86_400
_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]{1,6}")
_NODES = r"([1-9]\d{0,5})(?::([1-9]\d{0,5}))?"


@dataclass(frozen=True)
class Kind:
    """Values of one sort; of a flag: its metavar and, before check, the type of its text."""

    check: Callable[[Any, str], Any]
    schema: Schema
    metavar: str | None = None
    flag_type: Callable[[str], Any] = str
    choices: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Restriction:
    """The strategies that one layer may run."""

    attention: tuple[str, ...]
    mlp: tuple[str, ...]


def choice(*names: str) -> Kind:
    """One of these names."""

    def check(value: Any, where: str) -> str:
        if value not in names:
            raise UserError(f"{where}: {value!r:.60} is not one of {', '.join(names)}")
        return value

    return Kind(check, {"enum": list(names)}, choices=names)


def whole(low: int, high: int, *words: str) -> Kind:
    """A whole number, or one of these words."""

    def check(value: Any, where: str) -> Any:
        is_number = re.fullmatch(r"\d{1,18}", str(value)) is not None
        if value in words or (is_number and low <= int(value) <= high):
            return value
        others = "".join(f", {word}" for word in words)
        raise UserError(
            f"{where}: {value!r:.60} is not a whole number from {low} to {high}{others}"
        )

    number = {"type": "integer", "minimum": low, "maximum": high}
    return Kind(check, {"anyOf": [number, {"enum": list(words)}]} if words else number)


def _anything(value: Any, where: str) -> Any:
    return value


def _nodes(value: Any, where: str) -> Any:
    """A number of nodes, or MIN:MAX, as torchrun takes it."""
    match = re.fullmatch(_NODES, str(value))
    if match is None or int(match[1]) > int(match[2] or match[1]):
        raise UserError(f"{where}: {value!r:.60} is not a number of nodes such as 2, or 1:4")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise UserError(f"{where}: {value!r:.60} is not a text")
    return value


def _number(value: Any) -> float | None:
    """The number that it is, 5e-2 too, which is one to editors and a text to PyYAML."""
    if isinstance(value, str) and _EXPONENT.fullmatch(value):
        value = float(value)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _share(value: Any, where: str) -> float:
    number = _number(value)
    if number is None or not 0 <= number <= 1:
        raise UserError(f"{where}: {value!r:.60} is not a number from 0 to 1")
    return float(number)


def _switch(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise UserError(f"{where}: {value!r:.60} is not true or false")
    return value


def _token(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UserError(f"{where}: {value!r:.60} is not a token id such as 103")
    return value


def _seconds(value: Any, where: str) -> float:
    number = _number(value)
    if number is None or not 0 <= number <= MAX_SECONDS:
        raise UserError(f"{where}: {value!r:.60} is not a number of seconds from 0 to a day")
    return float(number)


def _size(value: Any, where: str) -> str:
    try:
        parse_bytes(_text(value, where))
    except UserError as error:
        raise UserError(f"{where}: {str(error).removeprefix(f'{where}: ')}") from None
    return value


def _tokens(value: Any, where: str) -> int:
    problem = UserError(f"{where}: {value!r:.60} is not a number of tokens such as 2048 or 64K")
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise problem
    try:
        tokens = parse_count(str(value))
    except UserError:
        raise problem from None
    if tokens < 1:
        raise problem
    return tokens


def _replicas(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{where}: {value!r:.60} is not a number of replicas such as 4")
    return value


def _head_tile(value: Any, where: str) -> str | int:
    if value is False:  # YAML reads `off` so
        value = "off"
    if value in ("auto", "off"):
        return value
    try:
        return _tokens(value, where)
    except UserError:
        raise UserError(
            f"{where}: {value!r:.60} is not a number of tokens such as 2048, auto or off"
        ) from None


def _names(value: Any, where: str) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    if not isinstance(value, list) or not value or not all(isinstance(v, str) and v for v in value):
        raise UserError(
            f"{where}: {value!r:.60} is not a list of strategy names, as megatron_ts,metp is"
        )
    for name in value:
        try:
            parse_strategy_name(name)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
    return tuple(dict.fromkeys(value))


def layer_numbers(span: Any, where: str) -> range:
    """5, or 1-4, as the numbers of layers; UserError for any else."""
    match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", str(span))
    first, last = (0, 0) if match is None else (int(match[1]), int(match[2] or match[1]))
    if not 1 <= first <= last:
        raise UserError(f"{where}: {span!r:.60} is not a layer or a range such as 1-4")
    if last > MAX_LAYERS:
        raise UserError(
            f"{where}: {span!r:.60} names layers beyond {MAX_LAYERS:,}, the most that a model has: "
            "name those that yours has"
        )
    return range(first, last + 1)


def _restrictions(value: Any, where: str) -> dict[int, Restriction]:
    """{"1-2": [megatron_ts], 5: {attention: [metp], mlp: [metp]}} by layer number."""
    if not isinstance(value, dict) or not value:
        raise UserError(f"{where}: give layers and their strategies, such as 1-2: [megatron_ts]")
    found: dict[int, Restriction] = {}
    for span, names in value.items():
        numbers = layer_numbers(span, where)
        halves = names if isinstance(names, dict) else {"attention": names, "mlp": names}
        if set(halves) != {"attention", "mlp"}:
            raise UserError(f"{where}: {span}: give both attention and mlp, or one list")
        restriction = Restriction(**{half: _names(v, where) for half, v in halves.items()})
        for number in numbers:
            if number in found:
                raise UserError(f"{where}: layer {number} is given twice")
            found[number] = restriction
    return found


def by_layer(of_a_half: Schema) -> Schema:
    """Layers or ranges, each with one value, or one for attention and one for the MLP."""
    halves = {
        "type": "object",
        "properties": {"attention": of_a_half, "mlp": of_a_half},
        "required": ["attention", "mlp"],
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "minProperties": 1,
        "patternProperties": {f"^{SPAN}$": {"anyOf": [of_a_half, halves]}},
        "additionalProperties": False,
    }


# An editor offers the built-in names and accepts others: packages may add strategies.
_NAMES = [name + more for name in BUILT_IN for more in ("", RECOMPUTE, OFFLOAD)]
DEFINITIONS: Schema = {  # of every schema
    "strategy": {
        "type": "string",
        "anyOf": [
            {"enum": _NAMES},
            {"pattern": r"^[A-Za-z_][A-Za-z0-9_]*(\+(recompute|offload))?$"},
        ],
    }
}
STRATEGY: Schema = {"$ref": "#/definitions/strategy"}
_POLICY: Schema = {
    "type": "string",
    "anyOf": [
        {"enum": ["optimal", "heuristic", *(f"fixed:{name}" for name in _NAMES)]},
        {"pattern": "^(heuristic|fixed|plan|random):.+$"},
    ],
}
_STRATEGIES: Schema = {
    "anyOf": [
        {"type": "array", "items": STRATEGY, "minItems": 1},
        {"type": "string", "minLength": 1},
    ]
}
_SIZE: Schema = {"type": "string", "pattern": rf"^\s*{BYTES_PATTERN}\s*$"}
_COUNTS: list[Schema] = [
    {"type": "integer", "minimum": 1},
    {"type": "string", "pattern": rf"^\s*{COUNT_PATTERN}\s*$"},
]
_TILE: Schema = {"anyOf": [{"enum": ["auto", "off", False]}, *_COUNTS]}

SCALAR = Kind(_anything, {"type": ["string", "number", "boolean"], "minLength": 1})
NODES = Kind(
    _nodes,
    {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": f"^{_NODES}$"}]},
)
TEXT = Kind(_text, {"type": "string", "minLength": 1}, "TEXT")
FILE = Kind(_text, {"type": "string", "minLength": 1}, "FILE")
POLICY = Kind(_text, _POLICY, "POLICY")
SIZE = Kind(_size, _SIZE, "SIZE")
SHARE = Kind(_share, {"type": "number", "minimum": 0, "maximum": 1}, "SHARE", float)
SECONDS = Kind(_seconds, {"type": "number", "minimum": 0, "maximum": MAX_SECONDS}, "SECONDS", float)
SWITCH = Kind(_switch, {"type": "boolean"})
TOKEN = Kind(_token, {"type": "integer", "minimum": 0}, "ID", int)
TOKENS = Kind(_tokens, {"anyOf": _COUNTS}, "TOKENS")
REPLICAS = Kind(_replicas, {"type": "integer", "minimum": 1}, "REPLICAS", int)
HEAD_TILE = Kind(_head_tile, _TILE, "TOKENS")
STRATEGIES = Kind(_names, _STRATEGIES, "NAMES")
LAYERS = Kind(_restrictions, by_layer(_STRATEGIES))
