"""The first sections of RESULTS.md: headlines, the check, crossovers."""

from __future__ import annotations

from reproduction import compared, differences, published
from reproduction.compared import Compared
from reproduction.markdown import NOT_RUN, percent, table, tokens
from reproduction.names import (
    AS_PUBLISHED,
    DISTRIBUTIONS,
    MEASURED,
    MODELS,
    PARADYSE,
    SIMULATED,
    title,
)
from reproduction.tables import Table

Files = dict[str, Table | None]
FRAMEWORKS = (PARADYSE, AS_PUBLISHED)


def headlines(files: Files) -> str:
    """Reductions and extensions, each with a sentence."""
    rows = []
    for what, reported in (
        ("reduction", published.TIME_REDUCTION),
        ("extension", published.LENGTH_EXTENSION),
    ):
        for model in MODELS:
            for distribution in DISTRIBUTIONS:
                for framework in FRAMEWORKS:
                    paper = reported.get((model, distribution))
                    rows.append(
                        [
                            f"{_named(what)}: {title(model)}, {title(distribution)}, "
                            f"{title(framework)}",
                            percent(paper, 2) if paper else "not given",
                            _cell(files, MEASURED, what, (model, distribution), framework),
                            _cell(files, SIMULATED, what, (model, distribution), framework),
                            differences.sentence(f"{what}:{model}:{distribution}:{framework}"),
                        ]
                    )
    text = differences.HEADLINES
    header = [
        "",
        "paper, up to",
        _measured_header(files),
        "simulated, 8 x A100 80 GB",
        "difference",
    ]
    return "\n\n".join(["## Headlines", text, table(header, rows), _reached(files)])


def _named(what: str) -> str:
    return {"reduction": "less time", "extension": "longer sequences"}[what]


def _measured_header(files: Files) -> str:
    found = files["figure2-measured"] or files["table5-measured"]
    return f"measured: {found.hardware}" if found else "measured here"


def _cell(files: Files, form: str, what: str, panel: tuple[str, str], framework: str) -> str:
    """Up to, over the paper's four strategies; then over the best of all."""
    rows = _compared(files, form, panel, framework)
    if rows is None:
        return NOT_RUN
    top = compared.most(rows, what)
    if top is None:
        return "no strategy ends" if what == "extension" and rows else NOT_RUN
    best = compared.least(rows, what, recompute=False)
    words = f"{percent(getattr(top, what))} ({title(top.against)})"
    if what == "extension" and top.in_data != top.extension:
        words = words.replace(")", f"; in the data {percent(top.in_data)})")
    if best is not None:
        words += f"; over the best {percent(getattr(best, what))} ({title(best.against)})"
    any_best = compared.least(rows, what, recompute=True)
    if any_best is not None and any_best != best:
        words += (
            f"; over the best with recomputation {percent(getattr(any_best, what))} "
            f"({title(any_best.against)})"
        )
    return words


def _compared(
    files: Files, form: str, panel: tuple[str, str], framework: str
) -> list[Compared] | None:
    if form == SIMULATED:
        found = files["headlines-simulated"]
        return compared.simulated(found, *panel, framework) if found else None
    found = files["figure2-measured"]
    return compared.measured(found, *panel, framework) or None if found else None


def _reached(files: Files) -> str:
    """The longest sequence of every strategy, simulated."""
    found = files["headlines-simulated"]
    if found is None:
        return ""
    rows = []
    for model in MODELS:
        for framework in FRAMEWORKS:
            compared_rows = found.where(model=model, framework=framework)
            limits = {row["against"]: row["limit_against"] for row in compared_rows}
            if limits:
                names = [f"{title(name)} {tokens(limit)}" for name, limit in limits.items()]
                reached = tokens(compared_rows[0]["limit"])
                rows.append([title(model), f"{title(framework)} {reached}", "; ".join(names)])
    text = "Longest sequences that fit, simulated, in tokens:"
    return f"{text}\n\n{table(['model', 'framework', 'single strategies, same head'], rows)}"


def checks(found: Table | None) -> str:
    """Whether ParaDySe is ever behind a single strategy."""
    if found is None:
        return f"## Never behind the best single strategy\n\n{NOT_RUN}"
    rows = [
        [
            title(row["model"]),
            title(row["framework"]),
            {"ten": "ten, with recomputation", "five": "five"}[row["among"]],
            row["lengths"],
            row["slower"],
            f"{float(row['worst_ratio']):.3f}",
            row["not_fitting"],
        ]
        for row in found.rows
    ]
    header = ["model", "framework", "best of", "lengths", "slower at", "worst ratio", "OOM at"]
    head = "## Never behind the best single strategy (simulated)"
    return "\n\n".join([head, differences.CHECK, table(header, rows)])


def crossovers(found: Table | None) -> str:
    """From which length on which strategy is the fastest."""
    if found is None:
        return ""
    rows = []
    for model in MODELS:
        for head in ("tiled", "untiled"):
            for memory in ("80 GB", "unlimited"):
                ranges = found.where(model=model, head=head, memory=memory)
                words = [
                    f"{title(r['fastest'])} {tokens(r['from_tokens'])} to {tokens(r['to_tokens'])}"
                    for r in ranges
                ]
                if words:
                    rows.append([title(model), head, memory, "; ".join(words)])
    header = ["model", "loss head", "memory", "fastest of the five single strategies"]
    head = "## Crossovers between strategies (simulated)"
    return "\n\n".join([head, differences.CROSSOVERS, table(header, rows)])
