"""What each layer runs for one microbatch: the answer of every policy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from megatron_paradyse.errors import UserError

MEGATRON_TS = "megatron_ts"
MOST_LAYERS = 1024  # of a plan that is read
_RUN = re.compile(r"(\d{1,6})(?:-(\d{1,6}))? ([^/,]+)(?:/([^,]+))?")


@dataclass(frozen=True)
class LayerChoice:
    """The strategies of one layer, by name; a name may end in +recompute or +offload."""

    attention: str = MEGATRON_TS
    mlp: str = MEGATRON_TS

    @property
    def names(self) -> str:
        """The two as people read them, "ulysses_z/metp"; one where they are the same."""
        return self.attention if self.attention == self.mlp else f"{self.attention}/{self.mlp}"


@dataclass(frozen=True)
class Plan:
    """The choice of every layer of a pipeline stage, by Megatron's layer number (from 1)."""

    layers: Mapping[int, LayerChoice]

    def __getitem__(self, layer_number: int) -> LayerChoice:
        return self.layers[layer_number]

    def halves(self, operations: Callable[[int], tuple[str, str]]) -> Iterator[tuple[str, str]]:
        """(strategy, operation) of each layer's attention and MLP; operations: of a layer's two."""
        for number, choice in self.layers.items():
            yield from zip((choice.attention, choice.mlp), operations(number), strict=True)

    def runs(self) -> str:
        """The plan as runs of like layers: "1-3 megatron_ts, 4 ulysses_z/metp"."""
        runs: list[tuple[int, int, LayerChoice]] = []
        for number in sorted(self.layers):
            choice = self.layers[number]
            if runs and runs[-1][1] == number - 1 and runs[-1][2] == choice:
                runs[-1] = (runs[-1][0], number, choice)
            else:
                runs.append((number, number, choice))
        return ", ".join(
            f"{first if first == last else f'{first}-{last}'} {choice.names}"
            for first, last, choice in runs
        )


def parse_runs(text: str) -> Plan:
    """The plan that Plan.runs() wrote; UserError for any other text."""
    layers: dict[int, LayerChoice] = {}
    for run in text.split(", "):
        match = _RUN.fullmatch(run)
        first, last = (0, 0) if match is None else (int(match[1]), int(match[2] or match[1]))
        if match is None or not 1 <= first <= last or last - first >= MOST_LAYERS:
            raise UserError(f"{run!r:.60} is no run of layers such as '1-3 megatron_ts'")
        choice = LayerChoice(match[3], match[4] or match[3])
        if not layers.keys().isdisjoint(range(first, last + 1)):
            raise UserError(f"{text!r:.60} names a layer twice: name each once")
        layers.update(dict.fromkeys(range(first, last + 1), choice))
    if len(layers) > MOST_LAYERS:
        raise UserError(f"a plan of {len(layers)} layers: at most {MOST_LAYERS} are read")
    return Plan(layers)


def uniform_plan(layer_numbers, strategy: str) -> Plan:
    """Every layer runs one strategy for attention and MLP."""
    choice = LayerChoice(strategy, strategy)
    return Plan({number: choice for number in layer_numbers})
