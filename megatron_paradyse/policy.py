"""Policies answer which plan a microbatch of (b, s) runs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

from megatron_paradyse.errors import UserError
from megatron_paradyse.packing.row import Row
from megatron_paradyse.plan import LayerChoice, Plan, uniform_plan
from megatron_paradyse.plan_file import PlanFile, load_plan_file
from megatron_paradyse.settings import Settings
from megatron_paradyse.strategies import parse_strategy_name, strategy_names, takes_wide

POLICIES = "fixed:STRATEGY, plan:FILE, random:SEED, optimal or heuristic"


class Policy(Protocol):
    """Chooses a plan from a microbatch's shape and row alone, alike on every rank of the group."""

    @property
    def strategies(self) -> tuple[str, ...]:
        """Every strategy that a plan of this policy may name."""
        ...

    def plan(
        self,
        batch_size: int,
        seq_length: int,
        layer_numbers: Sequence[int],
        *,
        forward_only: bool = False,
        row: Row | None = None,
    ) -> Plan:
        """The plan of the layers that this pipeline stage holds, for s = seq_length tokens.

        forward_only: the microbatch has no backward, as in an evaluation. row: of packed documents;
        given only where there is one.
        """
        ...


class FixedPolicy:
    """One strategy for every layer of every microbatch."""

    def __init__(self, strategy: str):
        self.strategies = (strategy,)
        self._plans: dict[tuple[int, ...], Plan] = {}

    def plan(
        self, batch_size: int, seq_length: int, layer_numbers: Sequence[int], **_: object
    ) -> Plan:
        key = tuple(layer_numbers)
        if key not in self._plans:
            self._plans[key] = uniform_plan(key, self.strategies[0])
        return self._plans[key]


class PlanFilePolicy:
    """A hand-written choice for every layer, the same for every microbatch."""

    def __init__(self, plan_file: PlanFile):
        self._file = plan_file
        self.strategies = plan_file.strategies

    def check_layers(self, num_layers: int) -> None:
        """UserError unless the plan is one of so many layers, multi-token prediction's too."""
        self._file.plan(range(1, num_layers + 1))
        beyond = [number for number in self._file.layers if number > num_layers]
        if beyond:
            raise UserError(
                f"{self._file.path}: layer {min(beyond)} is beyond the {num_layers} of the model: "
                "drop it"
            )

    def plan(
        self, batch_size: int, seq_length: int, layer_numbers: Sequence[int], **_: object
    ) -> Plan:
        return self._file.plan(layer_numbers)


class RandomPolicy:
    """Draws a choice for every layer of every microbatch: to prove that plans change no result.

    By where training is, so that an iteration that runs again, in place or after a restart, has the
    plans that it had.
    """

    draws = True  # the hook says at which microbatch

    def __init__(self, seed: str, strategies: Sequence[str]):
        self.strategies = tuple(strategies)
        self._seed = seed

    def plan(
        self,
        batch_size: int,
        seq_length: int,
        layer_numbers: Sequence[int],
        *,
        at: tuple[int, int] = (0, 0),
        row: Row | None = None,
        **_: object,
    ) -> Plan:
        """at: the iteration and the microbatch in it; replicas draw alike."""
        attention = mlp = self.strategies
        if row is not None and row.groups > 1:
            attention = tuple(name for name in attention if takes_wide(name))
        return Plan(
            {
                number: LayerChoice(
                    self._draw(at, number, "attention", attention),
                    self._draw(at, number, "mlp", mlp),
                )
                for number in layer_numbers
            }
        )

    def _draw(
        self, at: tuple[int, int], layer_number: int, operation: str, names: tuple[str, ...]
    ) -> str:
        key = f"{self._seed} {at} {layer_number} {operation}"
        number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8])
        return names[number % len(names)]


def cost_policy_kind(settings: Settings) -> str | None:
    """ "optimal" or "heuristic" where the policy chooses by cost, else None."""
    kind = settings.policy.partition(":")[0]
    return kind if kind in ("optimal", "heuristic") else None


def make_policy(settings: Settings) -> Policy:
    """The policy that the settings name, unless it chooses by cost (train/choosing.py does those).

    UserError for one that does not exist.
    """
    kind, _, argument = settings.policy.partition(":")
    for name in settings.strategies or ():
        parse_strategy_name(name)
    if kind == "fixed" and argument:
        parse_strategy_name(argument)
        return FixedPolicy(argument)
    if kind == "plan" and argument:
        return PlanFilePolicy(load_plan_file(argument))
    if kind == "random" and argument:
        names = settings.strategies or strategy_names()
        return RandomPolicy(argument, names)
    raise UserError(f"unknown policy {settings.policy!r}: use {POLICIES}")
