"""Numbers and tables as the commands print them: units, thousands separators, aligned columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from megatron_paradyse.costs.table import CostTable
from megatron_paradyse.planner.peak import with_margin
from megatron_paradyse.preview.setup import Setup
from megatron_paradyse.units import bytes_text, counted

WIDTH = 100


def timed_text(costs: CostTable) -> str:
    """What was timed of all: 128 to 8,192 tokens, 1 or 4 per microbatch."""
    lengths, sizes = costs.timed()
    each = " or ".join(f"{b:,}" for b in sizes)
    return f"{lengths[0]:,} to {lengths[-1]:,} tokens, {each} per microbatch"


def seconds_text(seconds: float) -> str:
    """12.34 s, or 56.7 ms below a tenth of a second."""
    if seconds >= 1000:
        return f"{seconds:,.0f} s"
    if seconds >= 0.1:
        return f"{seconds:.4g} s"
    return f"{1e3 * seconds:.4g} ms"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int]) -> str:
    """Columns with two spaces between them, to the right but for those in left."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if i in left else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def wrapped(text: str, *, indent: str = "") -> str:
    """Lines of at most WIDTH characters; later ones are indented by two more."""
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def heading(setup: Setup) -> str:
    """Which costs, which model, which policy and which budget: four lines."""
    d, settings = setup.description, setup.policies.settings
    file, shape = setup.policies.costs.file, setup.description.model
    lines = [
        f"costs: {file.path}, {d.source} {d.date}: {d.p} x {d.hardware.name}, {d.interconnect}, "
        f"{d.dtype}, {d.attention_mask}",
        f"model: {setup.policies.num_layers:,} layers{_kinds(setup)}, h {shape.hidden_size:,}, "
        f"{shape.num_heads} heads{_depth(setup)}{_stage(setup)}",
        f"policy: {settings.policy}, granularity {settings.granularity}, strategies "
        f"{', '.join(setup.policies.costs.strategies)}",
        f"memory of a rank: budget {_budget(setup)}; {_static(setup)}{_host(setup)}",
    ]
    return "\n".join(wrapped(line) for line in lines)


def _kinds(setup: Setup) -> str:
    count = len(setup.policies.kinds.first_layers)
    predicting = setup.description.mtp_num_layers
    more = f", {predicting} of multi-token prediction" if predicting else ""
    return f"{f' of {count} kinds' if count > 1 else ''}{more}"


def _depth(setup: Setup) -> str:
    measured = setup.description.model.num_layers
    if setup.policies.num_layers == measured:
        return ""
    return f" (the file's: {measured:,})"


def _stage(setup: Setup) -> str:
    grid = setup.grid
    if grid.num_stages == 1:
        return ""
    return (
        f"; stage {grid.stage} of {grid.num_stages}, layers {setup.layers[0]}-{setup.layers[-1]}, "
        f"{counted(setup.stage.num_in_flight, 'microbatch', 'microbatches')} in flight"
    )


def _static(setup: Setup) -> str:
    held = f"static {bytes_text(setup.stage.static_bytes)}"
    if setup.static_given:
        return f"{held}, as given"
    d = setup.description
    whole = setup.grid.num_stages == 1 and setup.policies.num_layers == d.model.num_layers
    replicas = max(1, d.hardware.num_devices // d.p)
    shared = f" by {replicas} replicas" if replicas > 1 else ""
    return f"{held}, as {d.source}{shared}{'' if whole else ', by estimated parameters'}"


def _budget(setup: Setup) -> str:
    if not setup.limited:
        return setup.budget
    budget, margin = setup.stage.budget_bytes, setup.stage.margin
    within = bytes_text(with_margin(budget, margin))
    less = f", plans within {within}, as peaks may be {margin:.1%} above predictions"
    return f"{bytes_text(budget)} ({setup.budget}){less if margin else ''}"


def _host(setup: Setup) -> str:
    room = setup.stage.host_bytes
    return "" if room is None else f"; {bytes_text(room)} of host memory for +offload"
