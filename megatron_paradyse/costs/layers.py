"""Layers that differ: which of the measured operations are those of a layer.

The halves of layer 1, and of the layers like it, are the operations "attention" and "mlp". A half
that is not like layer 1's has the number of the first layer that has it: "attention@4", "mlp@2";
and so has a whole layer with such a half, "layer@4".
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_paradyse.errors import UserError

ATTENTION, MLP, LAYER = "attention", "mlp", "layer"
HALVES = (ATTENTION, MLP)
FIRST = 1  # the layer whose operations have no number
MARK = "@"
MAX_LAYERS = 100_000

Operations = tuple[str, str]  # of a layer: its attention's, its MLP's
ALIKE: Operations = (ATTENTION, MLP)


def half_of(operation: str) -> str:
    """attention@4 -> attention; others as they are."""
    return operation.partition(MARK)[0]


def layer_of(operation: str) -> int:
    """attention@4 -> 4; FIRST where there is no number."""
    _, mark, number = operation.partition(MARK)
    return int(number) if mark else FIRST


def is_of_a_layer(operation: str) -> bool:
    """Whether it is a name of a half or of a whole layer, with a layer's number or without."""
    name, mark, number = operation.partition(MARK)
    if name not in (*HALVES, LAYER):
        return False
    is_number = number.isascii() and number.isdigit() and len(number) < 10
    return not mark or (is_number and str(int(number)) == number and int(number) > FIRST)


@dataclass(frozen=True)
class LayerKinds:
    """The operations of every layer. others: operation -> the layers that have it, ascending, the
    first of which is its number; of halves that are not like layer 1's. UserError for any else.
    """

    num_layers: int
    others: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fault = self._fault()
        if fault:
            raise UserError(f"layers that differ: {fault}")

    def _fault(self) -> str | None:
        seen: set[tuple[str, int]] = set()
        for name, layers in self.others.items():
            half = half_of(name)
            if half not in HALVES or not is_of_a_layer(name) or name == half:
                return f"{name!r:.40} is not attention@N or mlp@N"
            if not layers or layer_of(name) != layers[0] or sorted(set(layers)) != [*layers]:
                return f"the layers of {name} ascend from {layer_of(name)}, got {layers!r:.60}"
            if layers[-1] > self.num_layers:
                return f"{name} has layer {layers[-1]} of {self.num_layers}"
            if any((half, number) in seen for number in layers):
                return f"a layer of {name} has another {half} too"
            seen |= {(half, number) for number in layers}
        return None

    @functools.cached_property
    def _of_layer(self) -> dict[int, Operations]:
        found: dict[int, list[str]] = {}
        for name, layers in self.others.items():
            for number in layers:
                found.setdefault(number, [*ALIKE])[HALVES.index(half_of(name))] = name
        return {number: (halves[0], halves[1]) for number, halves in sorted(found.items())}

    def operations(self, number: int) -> Operations:
        """Of the layer with that number, of which the first is 1."""
        return self._of_layer.get(number, ALIKE)

    @functools.cached_property
    def first_layers(self) -> dict[Operations, int]:
        """The layers to build so that each kind is there, by kind; layer 1 first."""
        found = {ALIKE: FIRST}
        for number, kind in self._of_layer.items():
            found.setdefault(kind, number)
        return found

    def counts(self) -> dict[Operations, int]:
        """How many layers there are of each kind, in the order of first_layers."""
        counted = Counter(map(self.operations, range(1, self.num_layers + 1)))
        return {kind: counted[kind] for kind in self.first_layers}

    def share(self, operation: str) -> float:
        """Of the layers, those with that half; of plain halves, those that have no other."""
        own = self.others.get(operation)
        if own is None:
            half = half_of(operation)
            others = sum(len(of) for name, of in self.others.items() if half_of(name) == half)
            return 1 - others / self.num_layers
        return len(own) / self.num_layers

    def halves(self) -> tuple[str, ...]:
        """The operations that are halves, each once: what plans are made of."""
        return tuple(dict.fromkeys((*ALIKE, *self.others)))

    def measured(self) -> tuple[str, ...]:
        """The halves, and after those of each kind the whole layer."""
        found: dict[str, None] = {}
        for kind, number in self.first_layers.items():
            whole = LAYER if number == FIRST else f"{LAYER}{MARK}{number}"
            found |= dict.fromkeys((*kind, whole))
        return tuple(found)


def ranges_text(numbers: Sequence[int]) -> str:
    """Of ascending numbers of layers: "1-3, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def kinds_of(attention: Sequence[Hashable], mlp: Sequence[Hashable]) -> LayerKinds:
    """From what the halves of each layer are: those of which equals are alike."""
    others: dict[str, tuple[int, ...]] = {}
    for half, values in zip(HALVES, (attention, mlp), strict=True):
        layers: dict[Hashable, list[int]] = {}
        for number, value in enumerate(values, 1):
            layers.setdefault(value, []).append(number)
        for numbers in layers.values():
            if numbers[0] != FIRST:
                others[f"{half}{MARK}{numbers[0]}"] = tuple(numbers)
    return LayerKinds(len(attention), others)
