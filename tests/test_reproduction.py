"""The reproduction of the paper's results: comparisons, tables and files, on invented costs."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_paradyse.costs.cost_file import read_cost_file, write_cost_file
from megatron_paradyse.costs.description import Hardware
from megatron_paradyse.costs.fitting import fit_table
from megatron_paradyse.costs.model import PAPER
from megatron_paradyse.costs.table import QUANTITIES, CostTable
from megatron_paradyse.data.synthesize import synthesize
from megatron_paradyse.errors import UserError
from megatron_paradyse.plan import parse_runs
from megatron_paradyse.planner import evaluate
from megatron_paradyse.planner.from_file import planned_length
from reproduction import headlines, measured, published, results, table3
from reproduction.compared import compare, least, most
from reproduction.costs import HEADS, ModelCosts, published_profile
from reproduction.curves import curve, curves
from reproduction.frameworks import (
    FixedRunner,
    Ran,
    Runner,
    as_published,
    ours,
    without_forest,
)
from reproduction.names import (
    AS_PUBLISHED,
    FIXED,
    PARADYSE,
    SHUFFLED,
    SORTED,
    framework_name,
)
from reproduction.table5 import contribution
from reproduction.tables import FIGURE2, read_table, update_table, write_table
from tests.costs.synthetic import make_table

ROOT = Path(__file__).resolve().parents[1]
THIS_PYTHON = {**os.environ, "PYTHON": sys.executable}  # whether or not there is a .venv
RESULTS = ROOT / "results"
STRATEGIES = (*FIXED, "megatron_ts+recompute", "metp+recompute")
LENGTHS = (512, 2048, 8192, 32768, 131072, 524288)
DOCUMENTS = (700, 3000, 5100, 9000, 30000, 90000, 150000, 160000, 200000, 280000)


@pytest.fixture(scope="module")
def costs(tmp_path_factory) -> ModelCosts:
    """Invented costs of 3 GB devices; both heads alike."""
    return _write_costs(tmp_path_factory.mktemp("costs"), _table(), "hybrid", "paper")


def _table() -> CostTable:
    table = make_table(lengths=LENGTHS, strategies=STRATEGIES)
    hardware = Hardware(name="invented", kind="cuda", memory_bytes=3 * 10**9, num_devices=4)
    return dataclasses.replace(
        table,
        description=dataclasses.replace(table.description, hardware=hardware),
        constants=dataclasses.replace(table.constants, buffer_tokens=0),
    )


def _write_costs(folder: Path, table: CostTable, *kinds: str) -> ModelCosts:
    for kind in kinds:
        model = fit_table(table, kind)
        for head in HEADS:
            write_cost_file(folder / f"gpt-{head}-{kind}.json", table, model)
    return ModelCosts("gpt", folder)


def test_paradyse_is_never_behind_a_single_strategy_that_fits(costs):
    limits = headlines.find_limits(costs)
    rows = headlines.check_rows(costs, limits, DOCUMENTS)
    found = next(row for row in rows if row["framework"] == "paradyse")
    assert found["lengths"] > 200 and not found["slower"] and not found["not_fitting"]


def test_plans_by_other_costs_are_judged_by_the_packages_own(costs):
    runner = Runner(costs, as_published())
    setup = FixedRunner(costs, "untiled").setup
    for ran in runner.run(DOCUMENTS[:6]):
        problem = setup.policy.problem(setup.layers, 1, planned_length(ran.tokens), False)
        real = evaluate(problem, parse_runs(ran.plan))
        assert real is not None and ran.peak_bytes == real.peak_bytes
        assert ran.seconds is not None and ran.seconds > real.seconds  # and the edges


def test_the_published_framework_recomputes_nothing_and_mixes_no_halves(costs):
    for ran in Runner(costs, as_published()).run(DOCUMENTS):
        assert "+recompute" not in ran.plan and "/" not in ran.plan


def test_the_longest_length_trains_and_the_next_does_not(costs):
    runner = Runner(costs, ours())
    longest = runner.longest_tokens()
    fits = [ran.seconds is not None for ran in runner.run((longest, longest + 64))]
    assert fits == [True, False]


def test_a_strategy_whose_bytes_are_more_than_are_counted_fits_nowhere(costs):
    """Quadratic ones come to more than 2^53 where others still train: BERT's at 2.1M tokens."""
    fixed = FixedRunner(costs, "untiled")
    far = fixed.run(1 << 29)
    assert far.keys() == fixed.run(512).keys() == set(STRATEGIES)
    assert far["colossal_z"].seconds is None and far["colossal_z"].peak_bytes is None


def test_without_the_published_forest_polynomials_tell_seconds_at_every_length():
    bare = without_forest(fit_table(make_table(), PAPER))
    assert {fit.longest_seen(name) for fit in bare.fits for name in QUANTITIES} == {1}


def test_smoothing_makes_plans_depend_on_the_order(costs):
    """Why shuffled rows of the published framework, which smooths, are kept, and no others."""
    lengths = range(100_000, 250_000, 3000)
    for framework, differs in ((ours(flags={"smoothing": 0.2}), True), (ours(), False)):
        runner = Runner(costs, framework)
        forward = {ran.tokens: ran.plan for ran in runner.run(lengths)}
        backward = {ran.tokens: ran.plan for ran in runner.run(lengths[::-1])}
        assert (forward != backward) is differs


def test_a_crossover_begins_where_the_range_before_it_ended(costs, tmp_path):
    """MegatronTS is fastest at every length; here UlyssesZ takes half of its own time beyond 8K."""
    table = _table()
    measurements = [
        dataclasses.replace(
            one, forward_seconds=one.forward_seconds / 2, backward_seconds=one.backward_seconds / 2
        )
        if one.strategy == "ulysses_z" and one.seq_length > 8192
        else one
        for one in table.measurements
    ]
    table = dataclasses.replace(table, measurements=measurements)
    found = _write_costs(tmp_path, table, "hybrid")
    rows = headlines.crossover_rows(found, headlines.find_limits(costs))
    pairs = [
        (before, after)
        for before, after in itertools.pairwise(rows)
        if (before["head"], before["memory"]) == (after["head"], after["memory"])
    ]
    assert len(pairs) >= 4  # two heads, with and without a limit of memory
    for before, after in pairs:
        assert before["fastest"] != after["fastest"]
        assert before["to_tokens"] < after["from_tokens"]


def _ran(*seconds: float) -> list[Ran]:
    return [Ran(100 * (i + 1), one, 0) for i, one in enumerate(seconds)]


def test_a_contribution_is_what_the_whole_saves_until_the_other_ends():
    found = contribution(_ran(1, 2, 30), _ran(2, 4))
    assert found["cumulative_seconds"] == 6 and found["full_seconds_to_same_length"] == 3
    assert found["saved_share"] == found["ci_low"] == found["ci_high"] == 0.5


def test_the_interval_of_a_contribution_holds_what_was_seen():
    found = contribution(_ran(1, 2, 3, 4), _ran(1, 2.5, 4, 4))
    assert found["ci_low"] < found["saved_share"] < found["ci_high"]


def test_published_ablations_save_what_the_paper_prints():
    printed = (0.0, 11.80, -0.13, 0.49, 1.03, 1.29, 0.04)
    for row, percent in zip(published.ABLATIONS, printed, strict=True):
        assert 100 * row.saved_share == pytest.approx(percent, abs=0.0051)


def test_measured_and_simulated_frameworks_are_told_by_the_same_names():
    names = {
        "full": "paradyse",
        "without metp": "paradyse: without METP",
        "as published": "paradyse-as-published",
        "as published, without smoothing": "paradyse-as-published: without smoothing",
        "paradyse: without METP": "paradyse: without METP",
    }
    assert {name: framework_name(name) for name in names} == names


def test_a_profile_for_the_published_fit_ends_where_memory_does():
    table = make_table(lengths=LENGTHS, strategies=STRATEGIES)
    limits = {"megatron_ts": 50_000, "metp": 200_000}
    found = published_profile(table, limits)
    ends = {name: 0 for name in (*limits, "model")}
    for m in found.measurements:
        if m.is_timed:
            ends[m.strategy] = max(ends[m.strategy], m.seq_length)
    assert ends == {"megatron_ts": 50_000, "metp": 200_000, "model": 200_000}


def test_a_curve_ends_at_the_first_document_that_does_not_fit():
    found = curve("metp", [(10, 1.0), (20, 2.0), (30, None), (15, 1.5)])
    assert found.seconds == [1.0, 3.0] and found.failed_tokens == 30


def test_equal_documents_are_compared_and_only_strategies_that_ended_are_extended():
    paradyse = curve("paradyse", [(10, 1.0), (20, 1.0), (40, 1.0)])
    short = curve("megatron_ts", [(10, 2.0), (20, 2.0), (40, None)])
    whole = curve("metp", [(10, 2.0), (20, 2.0), (40, 4.0)])
    rows = [compare(paradyse, short), compare(paradyse, whole)]
    assert [row.reduction for row in rows] == [0.5, 1 - 3 / 8]
    assert [row.extension for row in rows] == [1.0, None]
    assert most(rows, "reduction").against == "metp"
    assert least(rows, "reduction", recompute=True).against == "metp"  # it alone ends last


def _figure2_row(order: str, policy: str, document: int, tokens: int, seconds: float | None):
    values = ("gpt", "grch38", order, policy, document, tokens, seconds, 1, "")
    return dict(zip(FIGURE2, values, strict=True))


def test_shuffled_curves_take_the_seconds_of_the_sorted_ones(tmp_path):
    rows = [_figure2_row(SORTED, "metp", i, t, t / 10) for i, t in enumerate((10, 20, 30))]
    published_order = (30, 10, 20)
    rows += [
        _figure2_row(SHUFFLED, "paradyse-as-published", i, t, 1.0)
        for i, t in enumerate(published_order)
    ]
    write_table(tmp_path / "f.csv", FIGURE2, rows, made="simulated; here")
    found = curves(read_table(tmp_path / "f.csv"), "gpt", "grch38", SHUFFLED)
    assert found["metp"].tokens == list(published_order)
    assert found["metp"].seconds == pytest.approx([3, 4, 6])


def test_a_run_replaces_its_own_rows_and_keeps_others(tmp_path):
    path = tmp_path / "f.csv"
    write_table(
        path,
        FIGURE2,
        [_figure2_row(SORTED, name, 0, 10, 1.0) for name in ("metp", "paradyse")],
        made="simulated; before",
    )
    update_table(
        path,
        FIGURE2,
        [_figure2_row(SORTED, "metp", 0, 10, None)],
        made="simulated; after",
        replaces=lambda row: row["policy"] == "metp",
    )
    found = read_table(path)
    assert found.origins == ["simulated; after", "simulated; before"]
    assert found.origin == "simulated; after and simulated; before"
    assert {row["policy"]: row["seconds"] for row in found.rows} == {"metp": "", "paradyse": "1"}


def test_a_measured_panel_is_of_one_run(tmp_path, monkeypatch):
    """--as-published measures the single strategies again: older rows of ParaDySe would not
    compare with them. Panels that were not measured again keep their rows and their origin."""
    command = ["figure2", "--models", "gpt", "--output", str(tmp_path), "--scale", "tiny"]

    def ranks(run, what, model, task):
        seconds = 1.0 if PARADYSE in task["policies"] else 2.0
        rows = [_figure2_row(SORTED, name, 0, 10, seconds) for name in (*FIXED, *task["policies"])]
        return [{**row, "distribution": d} for d in task["lengths"] for row in rows]

    monkeypatch.setattr(measured.Run, "_ranks", ranks)
    for date, more in (("monday", []), ("friday", ["--as-published", "--distributions", "grch38"])):
        monkeypatch.setattr(measured, "origin", lambda *_, date=date: f"measured; here; {date}")
        monkeypatch.setattr("sys.argv", ["measured", *command, *more])
        measured.main()
    found = read_table(tmp_path / "figure2-measured.csv")
    again, kept = (found.where(distribution=name) for name in ("grch38", "githubcode"))
    assert {row["policy"] for row in again} == {*FIXED, AS_PUBLISHED}
    assert {row["policy"] for row in kept} == {*FIXED, PARADYSE, AS_PUBLISHED}
    assert {row["seconds"] for row in again} == {"2"} and {r["seconds"] for r in kept} == {"1"}
    for row, made in zip(found.rows, found.origins, strict=True):
        assert made.endswith("friday" if row["distribution"] == "grch38" else "monday")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "model,policy\n",
        "# source from row 2 on: x\na\n",
        "# x\na\n",
        "# source: x\n# source: y\na\n",
    ],
)
def test_a_file_that_does_not_say_where_it_comes_from_is_refused(text, tmp_path):
    (tmp_path / "f.csv").write_text(text)
    with pytest.raises(UserError, match="the first line must be '# source"):
        read_table(tmp_path / "f.csv")


@pytest.mark.parametrize("name", ["githubcode", "grch38"])
def test_drawn_documents_have_the_published_shares_and_say_that_they_are_drawn(name):
    for row in table3.length_rows(name):
        assert row["source"] == table3.DRAWN_SOURCE
        assert row["share"] == pytest.approx(row["paper_share"], abs=1.5)  # 3 sigma of 10,000


def test_real_documents_are_counted_where_they_are_given(tmp_path):
    prefix = str(tmp_path / "code")
    synthesize(prefix, distribution="githubcode", num_documents=40, max_tokens=6000, quiet=True)
    rows = table3.length_rows("githubcode", prefix)
    assert [row["documents"] for row in rows][2:] == [0] * 5
    assert sum(row["documents"] for row in rows) == 40
    assert {row["source"] for row in rows} == {"real data code"}


def test_hybrid_context_parallel_runs_every_document_once_on_a_power_of_two_of_ranks():
    from reproduction.peer import schedule

    lengths = dict(enumerate([64_000, 40_000, 9000, *range(500, 8000, 250)]))
    groups = schedule(lengths.items(), tokens_per_rank=10_000)
    placed = [
        (document, size)
        for group in groups
        for document, size in {pair for rank in group for pair in rank}
    ]
    assert sorted(document for document, _ in placed) == sorted(lengths)
    for document, size in placed:
        assert size in (1, 2, 4, 8) and lengths[document] <= 10_000 * size


def test_hybrid_context_parallel_holds_the_whole_model_and_a_share_of_the_optimizer(costs):
    from reproduction.peer import state_fits, static_bytes_of

    assert state_fits(costs)
    described = read_cost_file(costs.path()).table.description
    shape = described.model
    layer = 4 * shape.hidden_size * shape.num_heads * shape.head_dim
    layer += 2 * shape.hidden_size * shape.ffn_size
    count = shape.num_layers * layer + shape.hidden_size * shape.vocab_size
    assert static_bytes_of(described) == count * (2 + 4 + 12 / 8)


def test_a_script_writes_its_table_and_results_from_scratch(tmp_path):
    command = ["bash", "scripts/table3.sh", "--simulate", "--output", str(tmp_path)]
    subprocess.run(command, check=True, timeout=60, cwd=ROOT, env=THIS_PYTHON)
    assert len(read_table(tmp_path / "table3.csv").rows) == 14
    assert "GRCh38" in (tmp_path / "RESULTS.md").read_text()


def test_a_wrong_name_is_one_line_with_the_known_ones(tmp_path):
    command = ["bash", "scripts/figure2.sh", "--simulate", "--models", "opt"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=ROOT, env=THIS_PYTHON, check=False
    )
    assert done.returncode == 2
    assert (
        "reproduction figure2: error: argument --models: choose among bert, llama, gpt, got 'opt'"
        in done.stderr
    )


@pytest.mark.parametrize(
    "name", ["demo", "figure2", "table3", "table5", "case_study", "reproduce_all"]
)
def test_a_script_without_an_environment_says_how_to_make_one(name, tmp_path):
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(ROOT / "scripts" / f"{name}.sh", tmp_path / "scripts")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHON"}
    done = subprocess.run(
        ["bash", script], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: .venv is missing: run make setup first\n"


@pytest.mark.parametrize(
    ("options", "kept"), [("--help", True), ("--scale tiny", True), ("--simulate", False)]
)
def test_costs_that_are_kept_are_removed_by_a_whole_simulation_only(options, kept, tmp_path):
    """Asking for help removed them."""
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(ROOT / "scripts" / "reproduce_all.sh", tmp_path / "scripts")
    costs = tmp_path / "build" / "reproduction"
    costs.mkdir(parents=True)
    command = ["bash", script, *options.split()]
    subprocess.run(command, check=True, timeout=60, env={**os.environ, "PYTHON": "true"})
    assert costs.exists() == kept


def test_committed_results_say_what_their_tables_say(tmp_path):
    for path in RESULTS.iterdir():
        if path.suffix in (".csv", ".png"):
            (tmp_path / path.name).symlink_to(path)
    assert results.write(tmp_path).read_text() == (RESULTS / "RESULTS.md").read_text()


def test_committed_simulation_is_never_behind_a_single_strategy():
    rows = read_table(RESULTS / "check-simulated.csv").where(framework="paradyse")
    assert [row["model"] for row in rows] == ["bert", "llama", "gpt"]
    assert all(row["slower"] == row["not_fitting"] == "0" for row in rows)


def test_nothing_in_the_package_imports_the_reproduction():
    for path in (ROOT / "megatron_paradyse").rglob("*.py"):
        assert not re.search(r"^\s*(import|from) reproduction\b", path.read_text("utf-8"), re.M)
