"""What each layer runs for one microbatch: the answer of every policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MEGATRON_TS = "megatron_ts"


@dataclass(frozen=True)
class LayerChoice:
    """The strategies of one layer, by name; a name may end in +recompute."""

    attention: str = MEGATRON_TS
    mlp: str = MEGATRON_TS


@dataclass(frozen=True)
class Plan:
    """The choice of every layer of a pipeline stage, by Megatron's layer number (from 1)."""

    layers: Mapping[int, LayerChoice]

    def __getitem__(self, layer_number: int) -> LayerChoice:
        return self.layers[layer_number]

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
            f"{first if first == last else f'{first}-{last}'} {_pair(choice)}"
            for first, last, choice in runs
        )


def _pair(choice: LayerChoice) -> str:
    if choice.attention == choice.mlp:
        return choice.attention
    return f"{choice.attention}/{choice.mlp}"


def uniform_plan(layer_numbers, strategy: str) -> Plan:
    """Every layer runs one strategy for attention and MLP."""
    choice = LayerChoice(strategy, strategy)
    return Plan({number: choice for number in layer_numbers})
