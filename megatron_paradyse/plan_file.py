"""A hand-written plan: which strategy which layer runs.

default: megatron_ts
layers:
  1-4: ulysses_z                                  # attention and MLP
  5: {attention: megatron_cz, mlp: metp+recompute}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from megatron_paradyse.errors import UserError
from megatron_paradyse.plan import LayerChoice, Plan
from megatron_paradyse.setting_kinds import layer_numbers
from megatron_paradyse.strategies import parse_strategy_name
from megatron_paradyse.yaml_file import compose_yaml, refuse_twice


@dataclass(frozen=True)
class PlanFile:
    """Choices by layer number (from 1), and the one for layers that are not named."""

    path: str
    layers: dict[int, LayerChoice]
    default: LayerChoice | None

    @property
    def strategies(self) -> tuple[str, ...]:
        choices = [*self.layers.values(), *([self.default] if self.default else [])]
        names = {name for choice in choices for name in (choice.attention, choice.mlp)}
        return tuple(sorted(names))

    def plan(self, layer_numbers: Sequence[int]) -> Plan:
        """The plan of these layers; UserError if one is not in the file."""
        missing = [n for n in layer_numbers if n not in self.layers]
        if missing and self.default is None:
            raise UserError(
                f"{self.path}: layer {missing[0]} has no strategy: add it, or a default"
            )
        return Plan({n: self.layers.get(n, self.default) for n in layer_numbers})  # type: ignore[misc]


def load_plan_file(path: str) -> PlanFile:
    """Read a plan; UserError with file and line for anything that is not as the format says."""
    root = compose_yaml(path, "plan file")
    if root is not None:
        refuse_twice(path, root)
    layers: dict[int, LayerChoice] = {}
    default = None
    for key, value in _items(root, path):
        if key.value == "default":
            default = _choice(value, path)
        elif key.value == "layers":
            for span, choice in _items(value, path):
                chosen = _choice(choice, path)
                for number in layer_numbers(span.value, _at(span, path)):
                    if number in layers:
                        raise UserError(f"{_at(span, path)}: layer {number} is given twice")
                    layers[number] = chosen
        else:
            raise UserError(f"{_at(key, path)}: unknown key {key.value!r}: use default and layers")
    if not layers and default is None:
        raise UserError(f"{path}: the plan is empty: give layers, or a default")
    return PlanFile(path, layers, default)


def _at(node: yaml.Node, path: str) -> str:
    return f"{path}:{node.start_mark.line + 1}"


def _items(node: yaml.Node | None, path: str) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
    if not isinstance(node, yaml.MappingNode):
        where = path if node is None else _at(node, path)
        raise UserError(f"{where}: expected 'key: value' lines")
    return node.value


def _choice(node: yaml.Node, path: str) -> LayerChoice:
    if isinstance(node, yaml.ScalarNode):
        return LayerChoice(_name(node, path), _name(node, path))
    names = {}
    for key, value in _items(node, path):
        if key.value not in ("attention", "mlp"):
            raise UserError(f"{_at(key, path)}: unknown key {key.value!r}: use attention and mlp")
        names[key.value] = _name(value, path)
    if set(names) != {"attention", "mlp"}:
        raise UserError(f"{_at(node, path)}: give both attention and mlp")
    return LayerChoice(**names)


def _name(node: yaml.Node, path: str) -> str:
    if not isinstance(node, yaml.ScalarNode) or not node.value:
        raise UserError(f"{_at(node, path)}: expected the name of a strategy, such as megatron_ts")
    try:
        parse_strategy_name(str(node.value))
    except UserError as error:
        raise UserError(f"{_at(node, path)}: {error}") from error
    return str(node.value)
