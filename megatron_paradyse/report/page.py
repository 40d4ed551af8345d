"""The page: facts in words and figures, in one HTML file that loads nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_paradyse import __version__
from megatron_paradyse.report.content import Content
from megatron_paradyse.report.estimates import NO_LOAD
from megatron_paradyse.report.figures import Drawn
from megatron_paradyse.report.style import short
from megatron_paradyse.units import bytes_text, printable, short_number

TEMPLATE = Path(__file__).with_name("page.html")
TITLE = "Training report"


class Fact(NamedTuple):
    """A line of the top of the page."""

    name: str
    value: str
    note: str = ""


def facts(content: Content) -> list[Fact]:
    """What a reader wants to know first."""
    numbers = content.as_json()
    rate, tokens = numbers["tokens_per_second"], numbers["tokens"]
    longest = numbers["longest_sequence_tokens"]
    found = [
        Fact("iterations", f"{numbers['iterations']:,}", _starts(numbers)),
        Fact("tokens", "not in the trace" if tokens is None else f"{tokens:,}"),
        Fact(
            "tokens/s",
            "not in the trace" if rate is None else f"{rate:,.0f}",
            f"{short_number(numbers['seconds'])} s of iterations",
        ),
        Fact("longest document", "not in the trace" if longest is None else f"{longest:,} tokens"),
        Fact(
            "changes of plan",
            f"{numbers['changes_of_plan']:,}",
            f"of {numbers['microbatches']:,} microbatches",
        ),
        _saved(content),
        _error(content),
        Fact("out of memory", f"{content.num_out_of_memory:,}", "records, one of each rank"),
    ]
    return found


def _starts(numbers: dict[str, Any]) -> str:
    count, again = numbers["starts"], numbers["iterations_again"]
    if count < 2:
        return ""
    return f"{count} starts" + (f", {again:,} of them ran again" if again else "")


def _saved(content: Content) -> Fact:
    name = "estimated time saved"
    if content.costs is None:
        return Fact(name, "not known", "needs --costs")
    packed = content.num_packed
    if not content.predicted_seconds and packed:
        return Fact(name, "not known", f"{packed:,} packed rows: {NO_LOAD}")
    if not content.predicted_seconds:
        return Fact(name, "not known", "no predictions in the trace")
    best = content.best_fixed
    if best is None:
        return Fact(name, "not known", "estimate: no single strategy fits every microbatch")
    saved = best.seconds - content.predicted_seconds
    return Fact(
        name,
        f"{saved / best.seconds:.1%}",
        f"estimate by the cost model: {short_number(content.predicted_seconds)} s of the layers "
        f"where {short(best.name)}, the best single strategy that fits, takes "
        f"{short_number(best.seconds)} s"
        + (f"; without {packed:,} packed rows: {NO_LOAD}" if packed else ""),
    )


def _error(content: Content) -> Fact:
    name = "prediction error"
    if content.time_error is None:
        return Fact(name, "no predictions")
    peak = content.peak_error
    return Fact(
        name,
        f"{content.time_error:.1%}",
        "median, of time" + ("" if peak is None else f"; of peaks {peak:.1%}"),
    )


def origin(content: Content) -> str:
    """One sentence: what ran."""
    run = content.run
    files = ", ".join(os.path.basename(trace.path) for trace in content.traces[:4])
    if len(content.traces) > 4:
        files += f" and {len(content.traces) - 4} more"
    if run is None:
        return f"From {files}, which do not say what ran (traces of an earlier version)."
    ranks = run.ranks
    layout = f"tensor {ranks['tensor']}, pipeline {ranks['pipeline']}, data {ranks['data']}"
    budget = run.memory_budget_bytes
    starts = max(len(trace.runs) for trace in content.traces)
    last = f"Last of {starts} starts: policy" if starts > 1 else "Policy"
    started = run.date.replace("T", " ").replace("+00:00", " UTC")
    return (
        f"{last} {run.policy} on {ranks['world']} ranks ({layout}) of {run.hardware.name}; "
        f"{run.model['num_layers']} layers, hidden size {run.model['hidden_size']}, {run.dtype}; "
        f"memory budget {'none' if budget is None else f'{bytes_text(budget)} a rank'}; "
        f"started {started}, megatron_paradyse {run.version}. From {files}."
    )


def render(content: Content, figures: Sequence[Drawn], warnings: Sequence[str]) -> str:
    """The page as text; everything from data is escaped."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    ours = content.predicted_seconds
    fixed = [
        {
            "name": one.name,
            "seconds": "" if one.num_unfit else short_number(one.seconds),
            "over": "" if one.num_unfit else f"{one.seconds / ours:.2f}",
            "unfit": f"{one.num_unfit:,}" if one.num_unfit else "",
        }
        for one in content.fixed
    ]
    return template.render(
        title=TITLE,
        origin=printable(origin(content)),
        facts=facts(content),
        warnings=list(map(printable, warnings)),
        figures=figures,
        fixed=fixed,
        footer=f"{content.source()}; megatron_paradyse {__version__}",
    )
