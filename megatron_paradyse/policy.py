"""Policies answer which plan a microbatch of (b, s) runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatron_paradyse.errors import UserError
from megatron_paradyse.plan import Plan, uniform_plan
from megatron_paradyse.settings import Settings


class Policy(Protocol):
    """Chooses a plan from the shape of a microbatch alone, alike on every rank."""

    def plan(self, batch_size: int, seq_length: int, layer_numbers: Sequence[int]) -> Plan:
        """The plan of the layers that this pipeline stage holds, for s = seq_length tokens."""
        ...


class FixedPolicy:
    """One strategy for every layer of every microbatch."""

    def __init__(self, strategy: str):
        self._strategy = strategy
        self._plans: dict[tuple[int, ...], Plan] = {}

    def plan(self, batch_size: int, seq_length: int, layer_numbers: Sequence[int]) -> Plan:
        key = tuple(layer_numbers)
        if key not in self._plans:
            self._plans[key] = uniform_plan(key, self._strategy)
        return self._plans[key]


def make_policy(settings: Settings) -> Policy:
    """The policy that the settings name; UserError for one that does not exist."""
    kind, _, argument = settings.policy.partition(":")
    if kind == "fixed" and argument == "megatron_ts":
        return FixedPolicy(argument)
    raise UserError(f"unknown policy {settings.policy!r}: use fixed:megatron_ts")
