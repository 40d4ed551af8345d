"""Tables of docs/ against the records of benchmarks/results/: numbers are theirs, rounded."""

from __future__ import annotations

import re
from statistics import median

import pytest

from tests.documentation.markdown import ROOT
from tests.documentation.tables import check, is_rounded, record, table

PLANNED = {
    "realistic, all": ("realistic", "all"),
    "... the fastest fits everywhere": ("realistic", "uniform"),
    "... mixed": ("realistic", "mixed"),
    "costs without structure": ("adversarial", "all"),
    "subset sums": ("subset_sums", "all"),
    "realistic, every other layer of another kind": ("every_other", "all"),
    "... one layer in six of another kind": ("one_in_six", "all"),
    "... two kinds in any order": ("any_order", "all"),
}


def test_times_of_the_planner():
    rows = table("planner.md", "| problems | | median")
    assert len(rows) == len(PLANNED)
    for name, *cells in rows:
        kind, which = PLANNED[name.partition(" (")[0]]
        found = record("planner")["rows"][kind][which]
        check(cells, [found[key] for key in ("problems", "median", "p95", "max")])


def test_how_even_placements_are():
    found = {
        (row["distribution"], row["p"], row["budget_tokens"]): row
        for row in record("placement")["rows"]
    }
    name = ""
    for first, p, budget, *cells in table("packing.md", "| | p | budget"):
        name = first.lower() or name
        tokens = int(budget[:-1]) << (20 if budget[-1] == "M" else 10)
        row = found[name, int(p), tokens]
        shares = [100 * row[key] for key in ("documents_across_ranks", "padding")]
        ratio = row["bytes_ratio_to_ring"]
        check(cells, [row["microbatches"], row["imbalance_max"], *shares, ratio])


def test_seconds_of_packed_global_batches():
    names = {"MegatronCZ": "megatron_cz", "UlyssesZ": "ulysses_z", "METP": "metp"}
    packed = record("packed_workload")
    for name, *cells in table("packing.md", "| seconds of a global batch of"):
        way, _, strategy = name.partition(", ")
        base, plus, suffix = strategy.partition(",")[0].partition("+")
        key = way if strategy == "optimal" else names[base] + plus + suffix
        batches = [median(rounds) for rounds in packed["seconds"][key]]
        check(cells, [*batches, sum(batches), sum(batches) / packed["packed_seconds"]])


def test_estimates_against_hybrid_context_parallelism():
    rows = table("packing.md", "| documents | R = 8")
    found = {
        (
            row["workload"].partition("-")[0],
            row["documents"] // (row["ranks"] // 8),
            row["ranks"],
        ): row
        for row in record("hybrid_cp")["estimates"]
    }
    assert len(rows) == 12 and len(found) == 32
    of = ("", 128)
    for name, *cells in rows:
        spread = "--paradyse-spread" in name
        if not spread:
            few = 16 if re.search(r", 16\b", name) else 128
            of = (re.split(r"[ ,]", name.lower())[0], few)
        for ranks, cell in zip((8, 16, 32, 64), cells, strict=True):
            if cell != "-":
                check([cell], [found[*of, ranks]["spread_ratio" if spread else "ratio"]])


def test_longest_sequences_that_are_simulated():
    found = {(row["model"], row["state_bytes"]): row for row in record("max_length")["rows"]}
    rows = table("memory.md", "| model, state | ParaDySe: tokens")
    assert len(rows) == len(found)
    for name, *cells, parts in rows:
        model, _, state = name.lower().partition(", ")
        row = found[model, int(state)]
        ours, without, peak = (row[key] for key in ("paradyse", "without_offload", "peak"))
        (metp,) = [limit["tokens"] for limit in row["single"] if limit["strategy"] == "metp"]
        host = row["paradyse_host_bytes"] / 2**30
        less = [without[f"paradyse_{key}"] for key in ("tokens", "seconds")]
        check(cells, [ours["tokens"], row["paradyse_seconds"], host, *less, metp])
        held = [peak[key] / 2**30 for key in ("static", "embedding", "kept", "workspace")]
        check(parts.split(", "), held)


def test_longest_sequences_on_cpu_ranks():
    rows = table("memory.md", "| | GPT, predicted")
    for begin, shape in ((0, ""), (3, "_llama"), (6, "_bert")):
        limits = record(f"max_length_real{shape}")["limits"]
        keys = ("predicted", "tokens", "above")
        found = {limit["strategy"]: [limit[key] for key in keys] for limit in limits}
        assert {name for name, *_ in rows} == set(found)
        for name, *cells in rows:
            check(cells[begin : begin + 3], found[name])


def test_faults_by_kind():
    rows = table("reliability.md", "| kind | faults")
    found = record("reliability")["by_kind"]
    assert [name for name, *_ in rows] == list(found)
    for name, faults, _, longest in rows:
        check([faults, longest], [found[name]["faults"], found[name]["seconds_max"]])


def test_seconds_of_documents_that_are_chosen_for():
    dynamic = record("dynamic_workload")
    rows = table("choosing.md", "| | seconds | over optimal")
    ours = dynamic["optimal_seconds"]
    fixed = {name: seconds for name, seconds in dynamic["fixed"].items() if seconds != "oom"}
    heuristic = ours * dynamic["heuristic_over_optimal"]
    expected = [ours, heuristic, dynamic["oracle_seconds"], *sorted(fixed.values())]
    for (_, *cells), seconds in zip(rows[:-1], expected, strict=True):
        check(cells, [seconds, seconds / ours])


def test_errors_of_fits_on_cpu_ranks():
    found = record("cost_model")
    for name, *cells in table("cost-model.md", "| | largest error inside | at 4x |"):
        check(cells, [100 * found[name][key] for key in ("memory_max", "memory_max_4x")])
    keys = ("time_median", "time_p95", "time_median_2x")
    noise = [found[key] for key in ("noise_floor", "noise_p95", "noise_floor_2x")]
    for name, *cells in table("cost-model.md", "| | median inside | 95% inside"):
        errors = [found[name][key] for key in keys] if name in found else noise
        check(cells, [100 * error for error in errors])
    lengths = {s for part in found["configuration"]["bytes"] for s in part}
    page = (ROOT / "docs/cost-model.md").read_text(encoding="utf-8")
    assert f"from one profile of {len(lengths)} lengths" in page


def test_errors_of_simulated_seconds_on_an_h200():
    names = ("megatron_ts", "ulysses_z", "megatron_cz", "metp", "colossal_z")
    rows = record("simulator")["h200"]["rows"]
    found = {(row["s"], row["strategy"]): 100 * row["error"] for row in rows}
    (page,) = [table("simulator.md", "| tokens | megatron_ts")]
    for s, *cells in page:
        told = [cell for cell in cells if cell != "out of memory"]
        check(told, [found[int(s.replace(",", "")), name] for name in names[: len(told)]])
    assert len(page) == len({s for s, _ in found})


def test_how_even_placements_within_windows_are():
    rows = record("placement")["windowed_rows"]
    page = table("packing.md", "| window | p = 2 to 8")
    assert len(page) == len({row["window"] for row in rows})
    for window, *cells in page:
        expected = [
            max(
                row["imbalance_max"]
                for row in rows
                if row["window"] == int(window.replace(",", ""))
                and row["p"] in ranks
                and row["budget_tokens"] == budget << 10
            )
            for ranks in ((2, 4, 8), (64,))
            for budget in (64, 256, 1024)
        ]
        check(cells, expected)


def test_attention_with_windows():
    found = {(row["p"], row["window"], row["s"]): row for row in record("windows")["rows"]}
    rows = table("strategies.md", "| ranks, window | s")
    assert len(rows) == len(found)
    of = ""
    for name, s, *cells in rows:
        of = name or of
        ranks, _, window = of.replace(",", "").partition(" ")
        row = found[int(ranks), int(window.split()[-1]), int(s[:-1]) << 10]
        check([cell.partition(" ")[0] for cell in cells], list(row["ms"].values()))
        whole = [cell.partition(" ")[2] for cell in cells[:2]]
        check(whole, [row["whole_ms"][key] for key in ("megatron_cz", "metp")])


def test_plans_of_layers_with_and_without_a_window():
    plans = {one["s"]: one for one in record("windows")["plans"]}
    page = " ".join((ROOT / "docs/strategies.md").read_text(encoding="utf-8").split())
    lost = {s: f"{100 * (one['single_over_plan'] - 1):.1f}%" for s, one in plans.items()}
    first, *longer = lost.values()
    assert list(plans) == [s << 10 for s in (16, 32, 64, 128)]
    told = "{}, {} and {} longer at 32K, 64K and 128K, embedding and loss head".format(*longer)
    assert told in page and f"MegatronTS's MLP throughout, {first};" in page
    assert {one["plan"] for one in plans.values()} == {
        "1-12 ulysses_z/megatron_ts",
        "1-5 megatron_cz/ulysses_z, 6 ulysses_z, 7-11 megatron_cz/ulysses_z, 12 ulysses_z",
    }


def test_errors_of_merged_attention():
    found = {(row["dtype"], row["p"]): row for row in record("numerics")["rows"]}
    rows = table("numerics.md", "| p | float32")
    assert 2 * len(rows) == len(found)
    for p, error, units, share, half_error, half_units in rows:
        single, half = found["float32", int(p)], found["bfloat16", int(p)]
        assert float(error) == float(f"{single['error_max']:.1e}")
        of_bound = 100 * single["error_over_bound"]
        values = [single["error_in_units"], of_bound, half["error_max"], half["error_in_units"]]
        check([units, share, half_error, half_units], values)


def test_seconds_beyond_what_megatron_ts_can_run():
    dynamic = record("dynamic_workload")
    keys = ("tail_ratio_to_simple_rule", "tail_operation_over_layer", "tail_layer_mixing_ratio")
    of_lengths = zip(*(dynamic[key] for key in keys), strict=True)
    rows = table("choosing.md", "| tokens | over")
    for (s, *cells, _), tail, ratios in zip(rows, dynamic["tail"], of_lengths, strict=True):
        check([s, *cells], [tail["s"], *ratios])


def test_errors_of_predicted_iterations():
    alike, differ = record("whole_model"), record("whole_model_differ")
    keys = (
        ("memory_max",),
        ("time_median", "time_p95"),
        ("time_noise",),
        ("processor_time_median",),
    )
    for (_, *cells), of in zip(table("profiler.md", "| | layers alike"), keys, strict=True):
        for cell, found in zip(cells, (alike, differ), strict=True):
            check(cell.split(", "), [100 * found[key] for key in of])


def test_bytes_a_token_of_embedding_and_head():
    moments = {"peak of the forward": "forward", "kept": "kept", "peak of the backward": "backward"}
    found = {
        (row["way"], row["edge"], row["moment"]): row["bytes_per_token"]
        for row in record("edges")["rows"]
        if row["positions"] == "rope" and row["maker"] == "all"
    }
    sums = [row for row in table("memory.md", "| what | Megatron, measured") if "**" in row[0]]
    for name, megatron, _, tiles in sums[:-1]:
        edge, _, moment = name.strip("*").partition(", ")
        values = [found[way, edge, moments[moment]] for way in ("megatron", "tiles")]
        check([megatron, tiles], values)
    assert len(sums) == 6


def test_errors_of_simulated_seconds_on_eight_a100():
    simulated = record("simulator")
    medians = table("simulator.md", "| | median | wanted")
    told = [cell.partition(" (")[0].split(", ") for _, cell, _ in medians]
    by = ("error_median_by_strategy", "error_median_by_length")
    overall, strategies, lengths = [simulated["error_median"]], *(simulated[k].values() for k in by)
    for cells, errors in zip(told[:3], (overall, strategies, lengths), strict=True):
        check(cells, [100 * error for error in errors])
    share, right = 100 * simulated["pairs_right"], simulated["pairs_right"] * simulated["pairs"]
    check([told[3][0], told[3][1].partition(" ")[0]], [share, right])
    rows = table("simulator.md", "| layers, h | strategy")
    for (size, name, cell), row in zip(rows, simulated["large_deviations"], strict=True):
        assert (size, name) == (f"{row['layers']}, {row['hidden_size']}", row["strategy"])
        check([cell], [100 * row["error"]])


@pytest.mark.parametrize(
    ("text", "value", "is_so"),
    [("1,024", 1024.4, True), ("9.5%", 9.44, False), ("-4%", -3.5, True)],
)
def test_numbers_are_compared_to_the_digits_that_are_told(text, value, is_so):
    assert is_rounded(text, value) == is_so
