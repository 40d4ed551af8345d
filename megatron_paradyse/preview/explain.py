"""The decision for one length, step by step, in words and numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_paradyse.costs.layers import ATTENTION, MLP, Operations, ranges_text
from megatron_paradyse.planner.problem import Choice, LayerOptions, Outcome
from megatron_paradyse.preview.forecast import Forecast, alone
from megatron_paradyse.preview.layout import (
    bytes_text,
    seconds_text,
    table,
    wrapped,
)
from megatron_paradyse.preview.peak_parts import PeakParts, peak_parts
from megatron_paradyse.preview.plan_text import rival_text, why_it_lost
from megatron_paradyse.preview.setup import Setup

MORE, LESS = 1.1, 0.9


def explanation(setup: Setup, one: Forecast) -> str:
    """All of one length."""
    title = f"{one.title}, {one.batch_size} per microbatch"
    if one.planned_length != one.seq_length:
        title += f"; planned as {one.planned_length:,}"
    parts = [f"{title}\n{'-' * len(title)}", _costs(setup, one), _alone(setup, one)]
    parts += [_chosen(setup, one), _peak(setup, one)]
    if setup.limited:
        parts.append("\n".join(wrapped(line) for line in _other_budgets(setup, one)))
    return "\n\n".join(parts)


def _costs(setup: Setup, one: Forecast) -> str:
    """Seconds, kept and workspace of the halves of a layer, per strategy; of each kind of layer."""
    kinds: dict[Operations, list[int]] = {}
    for number in setup.layers:
        kinds.setdefault(setup.policies.kinds.operations(number), []).append(number)
    texts = []
    for numbers in kinds.values():
        of = f"layer {numbers[0]}" if len(numbers) == 1 else f"each layer of {ranges_text(numbers)}"
        of = "one layer" if len(kinds) == 1 else of
        texts.append(_costs_of(of, _halves([one.problem.layers[n] for n in numbers])))
    return "\n\n".join(texts)


def _costs_of(of: str, halves: dict[str, dict[str, Choice]]) -> str:
    choices = [choice for half in halves.values() for choice in half.values()]
    largest = max(max(c.kept_bytes, c.workspace_bytes) for c in choices)
    unit, name = (1 << 30, "GiB") if largest >= 1 << 30 else (1 << 20, "MiB")
    slow = max(choice.seconds for choice in choices) >= 1
    scale, second = (1, "s") if slow else (1e3, "ms")

    def cells(choice: Choice | None) -> list[str]:
        if choice is None:
            return ["-"] * 3
        sizes = [f"{size / unit:,.3f}" for size in (choice.kept_bytes, choice.workspace_bytes)]
        return [f"{scale * choice.seconds:,.4g}", *sizes]

    names = dict.fromkeys(name for half in halves.values() for name in half)
    rows = [[n, *cells(halves[ATTENTION].get(n)), *cells(halves[MLP].get(n))] for n in names]
    columns = [f"{half} {what}" for half in ("att.", "MLP") for what in (second, "kept", "space")]
    intro = (
        f"Costs of {of}, forward and backward (kept: {name} from forward to backward; space: "
        f"{name} of workspace above that, the larger of the two passes):"
    )
    return f"{wrapped(intro)}\n{table(['strategy', *columns], rows, left=[0])}"


def _halves(layers: Sequence[LayerOptions]) -> dict[str, dict[str, Choice]]:
    """half -> strategy -> choice, of these layers together, whose costs are alike."""
    halves: dict[str, dict[str, Choice]] = {ATTENTION: {}, MLP: {}}
    for options in layers:
        for half, choices in ((ATTENTION, options.attention), (MLP, options.mlp)):
            halves[half] |= {choice.name: choice for choice in choices}
    return halves


def _alone(setup: Setup, one: Forecast) -> str:
    """What each strategy would take on every layer."""
    outcomes = alone(one.problem)
    if not outcomes:
        return "No single strategy may run on all layers."
    rows = []
    for name, outcome in sorted(outcomes.items(), key=lambda item: item[1].seconds):
        seconds = seconds_text(outcome.seconds + one.edge_seconds)
        rows.append([name, seconds, bytes_text(outcome.peak_bytes), _verdict(setup, outcome)])
    title = f"One strategy on all {len(one.problem.layers):,} layers, the fastest first:"
    return f"{title}\n{table(['strategy', 'seconds', 'peak', ''], rows, left=[0, 3])}"


def _verdict(setup: Setup, outcome: Outcome) -> str:
    if not setup.limited:
        return "no budget"
    return "fits" if outcome.fits else f"exceeds the budget by {bytes_text(outcome.exceeds_bytes)}"


def _chosen(setup: Setup, one: Forecast) -> str:
    """The plan, and why it and not another."""
    fastest = min(alone(one.problem).values(), key=lambda o: o.seconds, default=None)
    seconds = f"{seconds_text(one.outcome.seconds)} and {seconds_text(one.edge_seconds)}"
    lines = [f"Chosen: {one.outcome.plan.runs()}. Its layers, and embedding and head: {seconds}."]
    if not one.outcome.fits:
        over = bytes_text(one.outcome.exceeds_bytes)
        lines.append(f"No plan fits; this is the least peak, {over} above the budget.")
    elif fastest is not None and not fastest.fits:
        first = fastest.plan[min(fastest.plan.layers)]
        lines.append(
            f"The fastest single strategy, {first.attention}, exceeds the budget by "
            f"{bytes_text(fastest.exceeds_bytes)}; this is the {_best(setup, one)} that fits."
        )
    bound = one.outcome.bound_seconds
    if one.kept_single(setup):
        lines.append(
            f"Mixing strategies would gain less than the {setup.policies.gain:.0%} that it must "
            "by these costs (--mixing-gain)."
        )
    elif bound is not None and bound < one.outcome.seconds * (1 - 1e-9):
        lines.append(f"Proved to within {one.outcome.seconds / bound - 1:.2%} of the best.")
    text = [wrapped(" ".join(lines))]
    text += [wrapped(f"Lost: {rival_text(one, rival)}.", indent="  ") for rival in one.rivals]
    return "\n".join(text)


def _best(setup: Setup, one: Forecast) -> str:
    if setup.policies.settings.policy != "optimal":
        return "best plan that Algorithm 1 tries"
    return "fastest plan of one strategy" if one.kept_single(setup) else "fastest plan"


def _peak(setup: Setup, one: Forecast) -> str:
    parts = peak_parts(setup, one)
    budget = one.problem.budget_bytes
    of = f" of {bytes_text(budget)}" if setup.limited else ""
    title = f"Its peak, {bytes_text(one.outcome.peak_bytes)}{of}, is at {parts.place}:"
    rows = [[f"  {name}", bytes_text(size), why] for name, size, why in _rows(setup, parts, one)]
    return f"{wrapped(title)}\n{table(['', '', ''], rows, left=[0, 2]).lstrip(chr(10))}"


def _rows(setup: Setup, parts: PeakParts, one: Forecast) -> Iterator[tuple[str, int, str]]:
    yield "static", parts.static, "parameters, gradients, optimizer"
    if parts.in_flight:
        yield "in flight", parts.in_flight, "what other microbatches of the pipeline may hold"
    if setup.stage.has_embedding:
        more = "; of predictions of more tokens" if setup.stage.num_predicting else ""
        yield "embedding", parts.embedding, f"its output, masks and tables{more}"
    else:
        yield "input", parts.embedding, "of the stage, from the one before it, and tables"
    if parts.gather_buffer:
        yield "gather buffer", parts.gather_buffer, "Megatron's, of the whole sequence"
    yield "layers", parts.kept, f"kept by those so far, of {len(one.problem.layers):,}"
    yield "workspace", parts.workspace, "at that place, above all these"


def _other_budgets(setup: Setup, one: Forecast) -> Iterator[str]:
    """What would change with 10% more or less memory."""
    barred = setup.policy.barred(one.batch_size, one.seq_length, one.row)
    size = (one.batch_size, one.planned_length)
    how = *size, one.problem.forward_only, one.load, barred
    for share, word in ((MORE, "more"), (LESS, "less")):
        policy = setup.with_budget(share)
        budget = bytes_text(int(setup.stage.budget_bytes * share))
        problem = policy.problem(setup.layers, *how)
        outcome = policy.planner.plan(problem)
        title = f"With 10% {word} memory, {budget}: "
        if not outcome.fits:
            over = bytes_text(outcome.exceeds_bytes)
            yield title + f"no plan fits, the least peak would be {over} too much."
        elif outcome.plan == one.outcome.plan:
            yield title + "the same plan" + ("." if one.outcome.fits else ", and it fits.")
        else:
            yield title + f"{outcome.plan.runs()}, {_speed(one, outcome)}."


def _speed(one: Forecast, outcome: Outcome) -> str:
    return why_it_lost(one, Outcome(outcome.plan, outcome.seconds, outcome.peak_bytes, 0))
