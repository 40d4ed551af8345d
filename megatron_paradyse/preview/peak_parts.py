"""What a plan's peak consists of, and where in the microbatch it is."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_paradyse.planner.peak import base_bytes, operations, walk
from megatron_paradyse.preview.forecast import Forecast
from megatron_paradyse.preview.setup import Setup
from megatron_paradyse.strategies import RECOMPUTE, base_name, offloads, recomputes


@dataclass(frozen=True)
class PeakParts:
    """Bytes whose sum is the plan's peak, and the place where it is.

    static: parameters, gradients and optimizer; in_flight: what other microbatches of the pipeline
    may hold; embedding: what it keeps, or the input of a stage without it; gather_buffer:
    Megatron's, of [s, b, h]; kept: by the layers up to the place; workspace: at the place, above
    all these.
    """

    place: str
    static: int
    in_flight: int
    embedding: int
    gather_buffer: int
    kept: int
    workspace: int


def peak_parts(setup: Setup, found: Forecast) -> PeakParts:
    """Where the predicted peak of a plan is, and of which bytes it is made; it must have one."""
    problem, plan = found.problem, found.outcome.plan
    run = operations(problem, plan)
    assert run is not None, "the plan is one of the problem's"
    peaks = walk(problem, run)
    at = peaks.index(max(peaks))
    labels = _labels(found)
    count = len(run)
    if at == 0 or at == 2 * count + 2:
        place, before = "the embedding", 0
    elif at <= count:
        place, before = f"the forward of {labels[at - 1]}", at
    elif at == count + 1:
        place, before = _end(found), count
    else:
        before = 2 * count + 2 - at
        place = f"the backward of {labels[before - 1]}"
    kept = 0 if problem.forward_only else sum(choice.kept_bytes for choice in run[:before])
    memory = setup.policy.memory
    size = (found.planned_length, found.batch_size)
    base = base_bytes(problem, run)
    buffer = base - problem.base_bytes
    embedding = memory.embedding_kept(*size) + memory.more_angles(size[0], found.load)
    in_flight = problem.base_bytes - memory.static_bytes - embedding
    if not problem.gather_bytes:  # then the buffer is counted there, whatever the plan
        buffer = setup.stage.buffer_bytes_per_token * size[0] * size[1]
        embedding -= buffer
    return PeakParts(
        place,
        memory.static_bytes,
        in_flight,
        embedding,
        buffer,
        kept,
        found.outcome.peak_bytes - base - kept,
    )


def host_bytes(setup: Setup, found: Forecast) -> int:
    """What a rank's layers keep in host memory when all of them wait for their backward."""
    size = (found.planned_length, found.batch_size)

    def kept(name: str, operation: str) -> float:
        again = base_name(name) + RECOMPUTE
        return setup.policies.model.operation(again, operation, *size).kept_bytes

    total = 0.0
    for number, choice in found.outcome.plan.layers.items():
        attention, mlp = setup.policies.kinds.operations(number)
        if offloads(choice.attention):
            total += kept(choice.attention, attention)
        if offloads(choice.mlp) and not recomputes(choice.attention):
            total += kept(choice.mlp, mlp)
    return int(total)


def _end(found: Forecast) -> str:
    if found.problem.tail_bytes > found.problem.head_bytes:
        return "the end of the layers, with room for another microbatch's backward"
    return "the loss head"


def _labels(found: Forecast) -> list[str]:
    """One per operation of the plan, in the order in which they run."""
    labels = []
    for number in sorted(found.problem.layers):
        choice = found.outcome.plan[number]
        if found.problem.layers[number].pair(choice.attention, choice.mlp) is not None:
            labels.append(f"layer {number} ({choice.names})")
        else:
            labels.append(f"layer {number}'s attention ({choice.attention})")
            labels.append(f"layer {number}'s MLP ({choice.mlp})")
    return labels
