"""The sections of RESULTS.md."""

from __future__ import annotations

from reproduction import differences, published
from reproduction.markdown import NOT_RUN, percent, seconds, table, tokens
from reproduction.names import (
    AS_PUBLISHED,
    DISTRIBUTIONS,
    MEASURED,
    MODELS,
    PARADYSE,
    SHUFFLED,
    SIMULATED,
    framework_name,
    title,
)
from reproduction.tables import Table

Files = dict[str, Table | None]
INTRODUCTION = """# The paper's results, again

Written by `python -m reproduction.results` from the CSV files beside it; how to make them:
[docs/reproduction.md](../docs/reproduction.md). Three columns: the paper's figure (8 x A100 80 GB),
ours **measured** here at small scale, and ours **simulated** at the paper's scale: no GPU ran.
Simulated costs follow from datasheets, not from the paper's results; nothing is tuned to agree."""


def ablations(files: Files) -> str:
    """Table 5 beside the paper's: GPT on GRCh38."""
    rows = []
    for row in published.ABLATIONS:
        name = row.framework
        own = AS_PUBLISHED if name == "full" else f"{AS_PUBLISHED}: {name}"
        paper = f"{percent(row.saved_share, 2)}, to {tokens(row.max_tokens)}"
        cells = [_ablation_cell(files[f"table5-{form}"], own) for form in (MEASURED, SIMULATED)]
        ours = PARADYSE if name == "full" else f"{PARADYSE}: {name}"
        cells += [_ablation_cell(files[f"table5-{form}"], ours) for form in (MEASURED, SIMULATED)]
        rows.append([name, paper, *cells, differences.sentence(f"table5:{name}")])
    header = ["", "paper: saved by the whole, reach", "as published, measured"]
    header += ["as published, simulated", "ours, measured", "ours, simulated", "difference"]
    head = "## Table 5: what each part contributes, GPT on GRCh38"
    return "\n\n".join([head, differences.TABLE5, table(header, rows)])


def _ablation_cell(found: Table | None, framework: str) -> str:
    if found is None:
        return NOT_RUN
    rows = found.where(model="gpt", distribution="grch38")
    rows = [row for row in rows if framework_name(row["framework"]) == framework]
    return _contribution(rows[0]) if rows else "-"


def _contribution(row: dict[str, str]) -> str:
    reach = f"to {tokens(row['max_tokens'])}"
    if not row["saved_share"]:
        return reach
    low, high = (percent(float(row[name]), 2) for name in ("ci_low", "ci_high"))
    return f"{percent(float(row['saved_share']), 2)} [{low}, {high}], {reach}"


def contributions(found: Table | None) -> str:
    """Every part in every panel, simulated, with a verdict."""
    if found is None:
        return ""
    panels = [(m, d) for m in MODELS for d in DISTRIBUTIONS if found.where(model=m, distribution=d)]
    names = list(dict.fromkeys(row["framework"] for row in found.rows))
    rows = []
    for name in (n for n in names if ":" in n):
        of_name = {
            (m, d): row
            for m, d in panels
            for row in found.where(model=m, distribution=d, framework=name)
        }
        cells = [_contribution(of_name[panel]) if panel in of_name else "-" for panel in panels]
        rows.append([name, *cells, verdict(found, name)])
    header = ["", *(f"{title(m)}, {title(d)}" for m, d in panels), "the whole, against this"]
    head = "## Every part, every panel (simulated)"
    return "\n\n".join([head, differences.CONTRIBUTIONS, table(header, rows)])


WORTH = 0.001  # of the time, below which nothing is called a gain


def verdict(found: Table, framework: str) -> str:
    """In how many panels the whole framework is faster, or reaches further, than this one."""
    whole = framework.split(":")[0]
    faster = slower = further = panels = 0
    for row in found.where(framework=framework):
        full = found.where(framework=whole, model=row["model"], distribution=row["distribution"])
        if not full or not row["saved_share"]:
            continue
        panels += 1
        faster += float(row["ci_low"]) > WORTH
        slower += float(row["ci_high"]) < -WORTH
        further += int(full[0]["max_tokens"]) > 1.001 * int(row["max_tokens"])
    counted = (("faster", faster), ("reaches further", further), ("slower", slower))
    words = [f"{word} in {count} of {panels}" for word, count in counted if count]
    if not faster and not further:
        words.append("**does not help**")
    return "; ".join(words)


def case_study(files: Files) -> str:
    """A restart's parts; and what restarts would add to the simulated documents."""
    found = files["case_study-measured"]
    parts = {row["part"]: row["seconds"] for row in found.rows} if found else {}
    reported = {**published.RESTART_SECONDS, "restart": published.RESTART_TOTAL_SECONDS}
    rows = [
        [part, f"{value:g}", seconds(parts[part]) if part in parts else NOT_RUN]
        for part, value in reported.items()
    ]
    others = {name: name for name in parts if name not in reported}
    others["alternating"] = "two strategies in turn, over one for itself"
    others["switch"] = "switch while training: choosing, and what the turn adds"
    rows += [
        [named, "not given", seconds(parts[name]) if name in parts else NOT_RUN]
        for name, named in others.items()
    ]
    made = f" ({found.origin})" if found else ""
    sections = [
        "## Case study: a restart against a switch",
        table(["seconds", "paper", f"measured here{made}"], rows),
        differences.CASE_STUDY,
    ]
    restarts = files["case_study-simulated"]
    if restarts is not None:
        header = ["panel, shuffled", "documents", "changes", "31 s each", "training", "ParaDySe"]
        cells = [
            [
                f"{title(r['model'])}, {title(r['distribution'])}",
                *(r["documents"], r["changes"], seconds(r["restart_seconds"])),
                *(seconds(r["training_seconds"]), seconds(r["paradyse_seconds"])),
            ]
            for r in restarts.where(order=SHUFFLED)
        ]
        sections += [differences.RESTARTS, table(header, cells)]
    return "\n\n".join(sections)


def lengths(found: Table | None) -> str:
    """Table 3."""
    if found is None:
        return f"## Table 3: lengths of documents\n\n{NOT_RUN}"
    rows = [
        [
            *(r["dataset"], r["source"], r["bucket"], tokens(r["documents"])),
            *(f"{float(r['share']):.1f}%", f"{float(r['paper_share']):.1f}%"),
        ]
        for r in found.rows
    ]
    header = ["data set", "source", "tokens", "documents", "share", "paper"]
    longest = {r["dataset"]: r["max_tokens"] for r in found.rows}
    words = ", ".join(f"{name} {tokens(count)}" for name, count in longest.items())
    text = f"{differences.TABLE3} Longest document: {words} tokens."
    return "\n\n".join(["## Table 3: lengths of documents", text, table(header, rows)])


def peer(found: Table | None) -> str:
    """Hybrid context parallelism, estimated."""
    if found is None:
        return f"## A peer: Megatron's hybrid context parallelism\n\n{NOT_RUN}"
    rows = [
        [
            f"{title(r['model'])}, {title(r['distribution'])}, {r['peer']}",
            f"{float(r['static_bytes']) / 2**30:.1f}",
            tokens(r["max_tokens"]) if int(r["max_tokens"]) else "does not fit",
            f"{r['documents_that_fit']} of {r['documents']}",
            seconds(r["peer_seconds"]),
            percent(float(r["busy_share"])) if r["busy_share"] else "-",
            seconds(r["paradyse_seconds"]),
            _ratio(r),
        ]
        for r in found.rows
    ]
    header = ["", "state of a rank, GiB", "longest", "documents it fits", "peer, s (estimate)"]
    header += ["its ranks are busy", "ParaDySe, s", "ParaDySe over the peer"]
    head = "## A peer: Megatron's hybrid context parallelism (an estimate from simulated costs)"
    return "\n\n".join([head, differences.PEER, table(header, rows)])


def _ratio(row: dict[str, str]) -> str:
    if not row["peer_seconds"] or not float(row["peer_seconds"]):
        return "-"
    return f"{float(row['paradyse_seconds']) / float(row['peer_seconds']):.2f}"


def open_points() -> str:
    """What cannot be separated or explained."""
    return "\n".join(["## Open, and what `as published` is not", "", *differences.OPEN])
