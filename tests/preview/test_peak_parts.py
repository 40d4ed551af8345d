"""Where a plan's peak is, and of what: problems whose highest step is known."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_paradyse.costs.table import OperationCosts
from megatron_paradyse.plan import parse_runs
from megatron_paradyse.planner.peak import evaluate
from megatron_paradyse.planner.problem import Choice, LayerOptions, Problem
from megatron_paradyse.preview.forecast import Forecast
from megatron_paradyse.preview.peak_parts import host_bytes, peak_parts

PLAN = "1 a/b, 2 a/c"  # the two halves of layer 2 are one operation
HIGH = 100_000
STATIC, EMBEDDING, OTHERS, PER_TOKEN = 7_000, 900, 3_000, 10
B, S = 2, 16


def choice(name: str, kept: int, forward: int = 1, backward: int = 1, gathers: bool = False):
    return Choice(name, 1.0, kept, forward, backward, gathers)


def forecast_of(*, forward=(1, 1, 1), backward=(1, 1, 1), gathers: bool = False, **more: int):
    """Of an attention that keeps 10, an MLP that keeps 200, and a layer that keeps 3,000."""
    first = LayerOptions(
        (choice("a", 10, forward[0], backward[0], gathers),),
        (choice("b", 200, forward[1], backward[1]),),
    )
    pair = choice("a", 3_000, forward[2], backward[2])
    second = LayerOptions((choice("a", 1),), (choice("c", 1),), {("a", "c"): pair})
    base = STATIC + OTHERS + EMBEDDING
    problem = Problem({1: first, 2: second}, 1 << 30, base_bytes=base, **more)
    outcome = evaluate(problem, parse_runs(PLAN))
    assert outcome is not None
    return Forecast(B, S - 1, S, problem, outcome, 0.0, True)


def parts_of(found: Forecast):
    memory = SimpleNamespace(
        static_bytes=STATIC,
        embedding_kept=lambda s, b: (EMBEDDING - 40) * (s == S and b == B),
        more_angles=lambda s, load: 40 * (s == S),
    )
    stage = SimpleNamespace(buffer_bytes_per_token=PER_TOKEN)
    return peak_parts(SimpleNamespace(policy=SimpleNamespace(memory=memory), stage=stage), found)


PLACES = {
    "the embedding": ({"embedding_bytes": HIGH}, 0),
    "the forward of layer 1's attention (a)": ({"forward": (HIGH, 1, 1)}, 10),
    "the forward of layer 1's MLP (b)": ({"forward": (1, HIGH, 1)}, 210),
    "the forward of layer 2 (a/c)": ({"forward": (1, 1, HIGH)}, 3_210),
    "the loss head": ({"head_bytes": HIGH, "tail_bytes": HIGH}, 3_210),
    "the end of the layers, with room for another microbatch's backward": (
        {"head_bytes": HIGH - 1, "tail_bytes": HIGH},
        3_210,
    ),
    "the backward of layer 2 (a/c)": ({"backward": (1, 1, HIGH)}, 3_210),
    "the backward of layer 1's MLP (b)": ({"backward": (1, HIGH, 1)}, 210),
    "the backward of layer 1's attention (a)": ({"backward": (HIGH, 1, 1)}, 10),
}


@pytest.mark.parametrize("place", PLACES)
def test_the_highest_step_is_named_with_what_is_kept_until_there(place):
    how, kept = PLACES[place]
    parts = parts_of(forecast_of(**how))
    assert (parts.place, parts.kept, parts.workspace) == (place, kept, HIGH)
    assert (parts.static, parts.in_flight) == (STATIC, OTHERS)


def test_an_evaluation_keeps_nothing_until_its_peak():
    parts = parts_of(forecast_of(forward=(1, 1, HIGH), forward_only=True))
    assert (parts.place, parts.kept) == ("the forward of layer 2 (a/c)", 0)


@pytest.mark.parametrize(
    ("how", "buffer", "embedding"),
    [
        ({}, PER_TOKEN * S * B, EMBEDDING - PER_TOKEN * S * B),  # counted with the embedding
        ({"gather_bytes": 500, "gathers": True}, 500, EMBEDDING),
        ({"gather_bytes": 500}, 0, EMBEDDING),  # this plan does not gather
    ],
)
def test_the_gather_buffer_is_told_by_itself_wherever_it_is_counted(how, buffer, embedding):
    parts = parts_of(forecast_of(embedding_bytes=HIGH, **how))
    assert (parts.gather_buffer, parts.embedding, parts.workspace) == (buffer, embedding, HIGH)


WAITING = {
    "1-2 metp": 0,
    "1 metp+offload": 30,  # the layer's input, once
    "1 metp+offload/metp+recompute": 30,
    "1 metp+offload/metp": 30,
    "1 metp+recompute/metp+offload": 0,  # the attention says where the layer's input waits
    "1-2 metp/metp+offload": 8,
}


@pytest.mark.parametrize("plan", WAITING)
def test_inputs_wait_in_host_memory_once_for_what_recomputes_together(plan):
    def operation(name: str, half: str, s: int, b: int) -> OperationCosts:
        assert (name, s, b) == ("metp+recompute", S, B)
        return OperationCosts(1.0, 1.0, 30 if half == "attention" else 4, 0, 0)

    policies = SimpleNamespace(
        model=SimpleNamespace(operation=operation),
        kinds=SimpleNamespace(operations=lambda number: ("attention", "mlp")),
    )
    found = SimpleNamespace(
        planned_length=S, batch_size=B, outcome=SimpleNamespace(plan=parse_runs(plan))
    )
    assert host_bytes(SimpleNamespace(policies=policies), found) == WAITING[plan]
