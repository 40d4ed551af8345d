"""Numbers of docs/ against the records of benchmarks/results/ that they were read from."""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.documentation.markdown import ROOT
from tests.documentation.tables import record


@cache
def rows(page: str) -> dict[str, str]:
    """Of every table on a page, the second cell by the first."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return {first: second for first, second, *_ in cells}


def cell(page: str, begins: str) -> str:
    found = [second for first, second in rows(page).items() if first.startswith(begins)]
    assert len(found) == 1, (page, begins, found)
    return found[0]


TEXT = (ROOT / "docs/results.md").read_text(encoding="utf-8").splitlines()
FLAGS = record("megatron_flags")
EQUAL = {name: row for name, row in FLAGS["rows"].items() if row["is"] == "equal"}
OTHERS = [row for name, row in EQUAL.items() if "experts" not in name.lower()]


@pytest.mark.parametrize(
    ("outcome", "key"),
    [
        ("equal", "equal"),
        ("refused in one line", "refused"),
        ("different", "differs"),
        ("failed", "failed"),
    ],
)
def test_outcomes_of_megatron_flags(outcome, key):
    assert cell("docs/flags.md", outcome) == str(FLAGS[key])


def percent(share: float) -> str:
    return f"{100 * share:.2g}%"


def largest(rows) -> str:
    return f"{max(row['loss'] for row in rows):.1e}".replace("e-0", "e-")


LONGEST = {row["model"]: row for row in record("max_length")["rows"] if row["state_bytes"] == 16}
DYNAMIC, WHOLE = record("dynamic_workload"), record("whole_model")
RELIABILITY = record("reliability")
READ_OFF = [
    (f"Settings of Megatron's flags, of {len(FLAGS['rows'])},", f"{len(EQUAL)}"),
    ("... that are refused in one line", f"{FLAGS['refused']}"),
    ("... that differ, that fail", f"{FLAGS['differs']}, {FLAGS['failed']}"),
    (
        f"... the largest difference of a loss among the {len(EQUAL)} ",
        f"{largest(EQUAL.values())}; {largest(OTHERS)}",
    ),
    ("Tensors that differ after a checkpoint", f"{record('checkpoints')['different_tensors']}"),
    ("One iteration with `megatron_ts`", f"{record('overhead')['ratio_median']:.2f}"),
    ("Time of `optimal` over that of the best", f"{DYNAMIC['ratio_to_best_fixed']:.2f}"),
    ("... with `+recompute` among", f"{DYNAMIC['ratio_to_best_fixed_recompute']:.2f}"),
    ("... over the best measured strategy", f"{DYNAMIC['ratio_to_oracle']:.2f}"),
    ("Loss head where a quarter", f"{record('head')['quarter_learnt_over_all']:.2f}"),
    (
        "Tokens a second of packed",
        f"{record('packed_workload')['tokens_per_second_ratio_to_unpacked']:.1f}",
    ),
    (
        "... over the best fixed strategy on",
        f"{record('packed_workload')['ratio_to_best_fixed_packed']:.2f}",
    ),
    ("Scores of the fullest rank", f"{record('placement')['imbalance_max']:.2f}"),
    ("... of the scores that a window", f"{record('placement')['windowed_imbalance_max']:.2f}"),
    ("Predicted peak memory of whole iterations", percent(round(WHOLE["memory_max"], 3))),
    ("Predicted time of the same", percent(WHOLE["time_median"])),
    ("Time at lengths that were not", percent(record("cost_model")["hybrid"]["time_median"])),
    ("Error of simulated seconds", percent(record("simulator")["error_median"])),
    ("... at 8K tokens", percent(record("simulator")["error_median_by_length"]["8192"])),
    ("Error against the H200", percent(record("simulator")["h200"]["error_median"])),
    (
        "... of its layers of 8K tokens",
        percent(record("simulator")["h200"]["error_median_by_length"]["8192"]),
    ),
    ("Hangs beyond the limit", f"{RELIABILITY['hangs']}"),
    ("Corrupted files", f"{RELIABILITY['corruptions']}"),
    ("Diverging losses", f"{RELIABILITY['divergences']}"),
]


@pytest.mark.parametrize(("begins", "expected"), READ_OFF, ids=[first for first, _ in READ_OFF])
def test_results_are_those_of_the_records(begins, expected):
    assert cell("docs/results.md", begins) == expected


def test_longest_sequences_are_those_of_the_record():
    longest = [
        row["best_single_tokens"] * row["ratio_to_best_single"] / 2**20
        for row in (LONGEST[name] for name in ("gpt", "llama", "bert"))
    ]
    (line,) = [line for line in TEXT if line.startswith("| Longest sequence, tokens |")]
    assert line == "| Longest sequence, tokens | {:.3g}M | {:.3g}M | {:.3g}M |".format(*longest)


H200 = "nvidia-h200"


def table_rows(page: str, heading: str) -> set[str]:
    """The rows of the tables under a heading, up to the next heading."""
    text = (ROOT / page).read_text(encoding="utf-8").split(f"### {heading}\n")[1]
    lines = re.split(r"^##+ ", text, maxsplit=1, flags=re.MULTILINE)[0].splitlines()
    return {line for line in lines if line.startswith("| ")}


def test_limits_measured_on_a_gpu():
    found = table_rows("docs/memory.md", "Measured on a GPU")
    limits = [
        limit
        for model in record("gpu_limits", H200)["models"].values()
        for limit in model["limits"]
        if limit["above"]
    ]
    for limit in limits:
        numbers = " | ".join(f"{limit[key]:,}" for key in ("predicted", "tokens", "above"))
        row = f"| `{limit['strategy']}` | {numbers} | {100 * limit['error']:.1f}% |"
        assert any(line.endswith(row) for line in found), row
    assert len(found) == len(limits) + 2  # the head and its rule


def test_strategies_and_ring_measured_on_a_gpu():
    found = table_rows("docs/strategies.md", "Measured on a GPU")
    rows = {(row["s"], row["strategy"]): row for row in record("strategies", H200)["rows"]}
    names = ("megatron_ts", "ulysses_z", "megatron_cz", "metp", "colossal_z")
    for s in sorted({s for s, _ in rows}):
        cells = [milliseconds(rows[s, name]) for name in names]
        assert f"| {s:,} | {' | '.join(cells)} |" in found
    for size in record("gpu_ring", H200)["sizes"]:
        ends = (size["ratio_to_single_call_forward"], size["ratio_to_single_call_forward_backward"])
        begins = f"| {size['s']:,}, {size['n']}"
        (line,) = [line for line in found if re.match(re.escape(begins) + r"\b", line)]
        assert line.endswith(f"| {ends[0]:.2f} | {ends[1]:.2f} |")


def milliseconds(row: dict) -> str:
    if "seconds" not in row:
        return row["refused"]
    value = 1000 * row["seconds"]
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"
