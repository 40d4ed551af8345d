"""Everything that the user sets, in one dataclass: flags over a YAML file over defaults."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_paradyse.errors import UserError
from megatron_paradyse.units import parse_count

SEQUENCES_CHOICES = ("documents", "fixed")
LOG_CHOICES = ("megatron", "compact")
OVER_BUDGET_CHOICES = ("warn", "refuse")
GRANULARITY_CHOICES = ("operation", "layer", "sequence")
RUN_FILE_KEY = "paradyse"  # of a file for megatron-paradyse train
BY_COST = (
    "layers",
    "granularity",
    "cost_model",
    "accept_costs",
    "memory_margin",
    "over_budget",
    "smoothing",
    "balance",
    "correction",
    "profile",
    "offload",
)  # settings of policies that choose by cost; others refuse them


@dataclass(frozen=True)
class Restriction:
    """The strategies that one layer may run."""

    attention: tuple[str, ...]
    mlp: tuple[str, ...]


@dataclass(frozen=True)
class Settings:
    """Values of the --paradyse-* flags and of the YAML keys of the same name."""

    policy: str = "optimal"
    strategies: tuple[str, ...] | None = None
    layers: Mapping[int, Restriction] | None = None
    granularity: str = "operation"
    cost_model: str | None = None
    accept_costs: bool = False
    memory_budget: str | None = None
    memory_margin: float = 0.03
    over_budget: str = "warn"
    smoothing: float | None = None
    verify_plans: bool = False
    balance: bool = False
    correction: bool = True
    profile: bool = True
    offload: bool | None = None  # None: unless the costs are of a CPU
    trace: str | None = None
    log: str = "megatron"
    sequences: str = "documents"
    order: str = "shuffled"
    long_documents: str = "split"
    mask_token: int | None = None  # of a BERT
    head_tile: str | int = "auto"  # tokens, auto or off


def load_yaml_settings(path: str) -> dict[str, Any]:
    """The settings that a YAML file gives, checked against the fields of Settings.

    Of a file for `megatron-paradyse train`, those under its key `paradyse`. Raises UserError with
    the file, the line and the remedy.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise UserError(
            f"--paradyse-config {path}: {error.strerror}: give an existing YAML file"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = " ".join(str(error).split())
        raise UserError(f"--paradyse-config {path} is not YAML: {problem}") from error
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{path}:1: expected 'key: value' lines")
    inner = next((value for key, value in root.value if key.value == RUN_FILE_KEY), None)
    return settings_of(path, root if inner is None else inner)


def settings_of(path: str, node: yaml.Node) -> dict[str, Any]:
    """The settings that a mapping inside a YAML file gives, as load_yaml_settings."""
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{path}:{node.start_mark.line + 1}: expected 'key: value' lines")
    known = {field.name for field in dataclasses.fields(Settings)}
    settings: dict[str, Any] = {}
    for key_node, value_node in node.value:
        where = f"{path}:{key_node.start_mark.line + 1}"
        key = key_node.value
        if not isinstance(key_node, yaml.ScalarNode) or key not in known:
            raise UserError(f"{where}: unknown key {key!r}: known are {', '.join(sorted(known))}")
        if key in settings:
            raise UserError(f"{where}: key {key!r} is given twice: keep one")
        try:
            value = yaml.safe_load(yaml.serialize(value_node))
        except yaml.YAMLError as error:
            raise UserError(f"{where}: {' '.join(str(error).split())}") from error
        settings[key] = _checked(key, value, where)
    return settings


def make_settings(flags: dict[str, Any], config_path: str | None) -> Settings:
    """Flags that were given win over the YAML file, which wins over the defaults."""
    values = load_yaml_settings(config_path) if config_path else {}
    for name, value in flags.items():
        if value is not None:
            values[name] = _checked(name, value, f"--paradyse-{name.replace('_', '-')}")
    return Settings(**values)


def _checked(name: str, value: Any, where: str) -> Any:
    """The value in the type of its field, or UserError."""
    from megatron_paradyse.data.documents import LONG_DOCUMENT_CHOICES
    from megatron_paradyse.data.order import ORDER_CHOICES

    choices = {
        "log": LOG_CHOICES,
        "sequences": SEQUENCES_CHOICES,
        "order": ORDER_CHOICES,
        "long_documents": LONG_DOCUMENT_CHOICES,
        "over_budget": OVER_BUDGET_CHOICES,
        "granularity": GRANULARITY_CHOICES,
    }.get(name)
    if choices is not None:
        if value not in choices:
            raise UserError(f"{where}: {value!r} is not one of {', '.join(choices)}")
        return value
    if name in ("smoothing", "memory_margin"):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise UserError(f"{where}: {value!r} is not a number from 0 to 1")
        return float(value)
    if name in ("accept_costs", "verify_plans", "balance", "correction", "profile", "offload"):
        if not isinstance(value, bool):
            raise UserError(f"{where}: {value!r} is not true or false")
        return value
    if name == "head_tile":
        return _checked_head_tile(value, where)
    if name == "mask_token":
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UserError(f"{where}: {value!r} is not a token id such as 103")
        return value
    if name == "strategies":
        return _names(value, where)
    if name == "layers":
        return _restrictions(value, where)
    if not isinstance(value, str):
        raise UserError(f"{where}: {value!r} is not a text")
    return value


def _names(value: Any, where: str) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    if not isinstance(value, list) or not value or not all(isinstance(v, str) and v for v in value):
        raise UserError(f"{where}: {value!r} is not a list of strategy names")
    return tuple(value)


def _restrictions(value: Any, where: str) -> dict[int, Restriction]:
    """{"1-2": [megatron_ts], 5: {attention: [metp], mlp: [metp]}} by layer number."""
    if not isinstance(value, dict) or not value:
        raise UserError(f"{where}: give layers and their strategies, such as 1-2: [megatron_ts]")
    found: dict[int, Restriction] = {}
    for span, names in value.items():
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", str(span))
        first, last = (0, 0) if match is None else (int(match[1]), int(match[2] or match[1]))
        if not 1 <= first <= last:
            raise UserError(f"{where}: {span!r} is not a layer or a range such as 1-4")
        halves = names if isinstance(names, dict) else {"attention": names, "mlp": names}
        if set(halves) != {"attention", "mlp"}:
            raise UserError(f"{where}: layers {span}: give both attention and mlp, or one list")
        restriction = Restriction(**{half: _names(v, where) for half, v in halves.items()})
        for number in range(first, last + 1):
            if number in found:
                raise UserError(f"{where}: layer {number} is given twice")
            found[number] = restriction
    return found


def _checked_head_tile(value: Any, where: str) -> str | int:
    if value is False:  # YAML reads `off` so
        value = "off"
    if value in ("auto", "off"):
        return value
    problem = UserError(f"{where}: {value!r} is not a number of tokens such as 2048, auto or off")
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise problem
    try:
        tokens = parse_count(str(value))
    except UserError:
        raise problem from None
    if tokens < 1:
        raise problem
    return tokens
