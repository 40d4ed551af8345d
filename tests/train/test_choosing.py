"""Training that chooses by cost: the plans that were promised, the same losses, restarts alike."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megatron_paradyse.costs.cost_file import read_cost_file, write_cost_file
from megatron_paradyse.costs.fitting import fit_table
from megatron_paradyse.machine import cpu_name
from megatron_paradyse.plan import parse_runs
from megatron_paradyse.preview.forecast import forecast
from megatron_paradyse.preview.setup import Grid, make_setup
from megatron_paradyse.report.trace_file import read_trace
from tests.train.harness import (
    attempt,
    data_flags,
    estimates,
    run_forked,
    train,
    train_under_torchrun,
    with_defaults,
)
from tests.train.synthetic_costs import with_seconds_scaled, write_costs

ITERATIONS = 3  # benchmarks/loss_curves.py: 200
TP2 = ["--tensor-model-parallel-size", 2, "--sequence-parallel"]
TP4 = ["--tensor-model-parallel-size", 4, "--sequence-parallel"]
ONE_EACH = ["--micro-batch-size", 1, "--global-batch-size", 2, "--lr", "1e-3"]
ONE_EACH += ["--seq-length", 256, "--max-position-embeddings", 256]
BUDGET = ["--paradyse-memory-budget", "52MB"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    lengths = np.random.default_rng(3).integers(2, 257, size=200).tolist()
    return [*data_flags(tmp_path_factory.mktemp("data"), lengths), *ONE_EACH]


@pytest.fixture(scope="module")
def costs(tmp_path_factory):
    return write_costs(tmp_path_factory.mktemp("costs") / "costs.json")


def by_cost(costs, policy="optimal"):
    return [
        *("--paradyse-policy", policy, "--paradyse-cost-model", costs, "--paradyse-accept-costs"),
        *("--paradyse-verify-plans", "--paradyse-no-correction"),
    ]


def records(path, kind="microbatch"):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


OVERLAPPED = [
    *("--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear"),
    *("--untie-embeddings-and-output-weights", "--overlap-grad-reduce", "--ddp-bucket-size", 2000),
]
GRIDS = {
    "tp4": (4, TP4),
    "tp2-pp2": (4, [*TP2, "--pipeline-model-parallel-size", 2, "--global-batch-size", 4]),
    "tp2-pp2, more tokens predicted": (
        4,
        [
            *TP2,
            "--pipeline-model-parallel-size",
            2,
            "--global-batch-size",
            4,
            "--position-embedding-type",
            "rope",
            "--mtp-num-layers",
            1,
        ],
    ),
    # replicas with other plans have gradients ready in other orders, in many small buckets
    "tp2-dp2": (4, [*TP2, *OVERLAPPED]),
}


@pytest.mark.parametrize("grid", GRIDS)
def test_switching_by_cost_follows_the_losses_of_megatron_ts(grid, data, costs, tmp_path):
    """Microbatches of different lengths in flight, each with a plan of its own; losses to 1e-4."""
    ranks, flags = GRIDS[grid]
    if "--mtp-num-layers" in flags:
        costs = write_costs(tmp_path / "costs.json", num_predicting=1)
    stages = 2 if "--pipeline-model-parallel-size" in flags else 1
    flags = [*data, *flags, "--train-iters", ITERATIONS]
    fixed = train(tmp_path / "fixed", *flags, ranks=ranks)
    trace = tmp_path / "trace.jsonl"
    chosen = [*by_cost(costs), *BUDGET, "--paradyse-trace", trace]
    run = train(tmp_path / "run", *flags, *chosen, ranks=ranks, timeout_seconds=400)
    assert len(run.records) == ITERATIONS
    np.testing.assert_allclose(run.values("loss"), fixed.values("loss"), rtol=1e-4)
    found = [r for path in tmp_path.glob("trace*.jsonl") for r in records(path)]
    assert len(list(tmp_path.glob("trace*.jsonl"))) == {"tp4": 1}.get(grid, 2)
    expected = ITERATIONS * (4 * 2 if stages == 2 else 2)  # each stage writes its own
    assert len(found) == expected
    assert all(r["predicted_peak_bytes"] <= 52e6 / 1.03 + 1 for r in found)
    plans = {r["plan"] for r in found}
    assert any("megatron_ts" in p for p in plans) and any("metp" in p for p in plans)
    assert all(r["seconds"] > 0 for r in found)
    for path in tmp_path.glob("trace*.jsonl"):
        where = Grid(stages, 2 if "pp1" in path.name else 1, num_microbatches=4)
        ((stage,),) = (run["stages"] for run in records(path, "run"))
        held = stage["static_bytes"]
        assert all(told_beforehand(costs, held, where, r) for r in records(path))


def told_beforehand(costs, held, where, record) -> bool:
    """Whether `megatron-paradyse plan --static-memory` says what the trace does."""
    flags = {"memory_budget": BUDGET[1]}
    setup = make_setup(str(costs), flags, static_memory=held, grid=where)
    outcome = forecast(setup, record["seq_length"], rivals=False).outcome
    told = (outcome.plan.runs(), outcome.seconds, outcome.peak_bytes)
    return told == tuple(
        record[key] for key in ("plan", "predicted_seconds", "predicted_peak_bytes")
    )


def test_each_length_runs_the_cheapest_strategy_without_a_budget(data, costs, tmp_path):
    """By the laws of the costs megatron_ts is faster below 100 tokens, ulysses_z above."""
    trace = tmp_path / "trace.jsonl"
    flags = [*data, *TP2, *by_cost(costs), "--paradyse-trace", trace, "--train-iters", 6]
    run = train(tmp_path / "run", *flags, ranks=2)
    model = read_cost_file(costs).require_model()
    found = records(trace)
    assert found and "estimated by the cost model" in run.stdout
    for record in found:
        s = -(-record["seq_length"] // 64) * 64  # planned as the next multiple
        seconds = {
            name: model.operation(name, "mlp", s).time_seconds for name in model.strategies("mlp")
        }
        assert record["plan"] == f"1-4 {min(seconds, key=seconds.__getitem__)}"


def test_measured_times_correct_the_costs_alike_on_every_rank(data, tmp_path):
    """Training takes many times what the costs say: factors rise, and predictions follow them.

    So do trials of metp, which is predicted to be a little slower and has not run.
    """
    costs = write_costs(tmp_path / "costs.json", scale_seconds=0.01)
    near = with_seconds_scaled(read_cost_file(costs).table, ["metp"], 0.76)
    write_cost_file(costs, near, fit_table(near))
    trace = tmp_path / "trace.jsonl"
    chosen = [flag for flag in by_cost(costs) if flag != "--paradyse-no-correction"]
    flags = [*data, *TP2, *chosen, "--paradyse-trace", trace]
    flags += ["--train-iters", 400, "--exit-interval", 13]  # trials need iterations that are left
    run = train(tmp_path / "run", *flags, ranks=4)  # plans are verified
    paths = [tmp_path / f"trace-dp{replica}-pp0.jsonl" for replica in (0, 1)]
    corrections = [records(path, "correction") for path in paths]
    assert corrections[0] == corrections[1] and "profile again" in run.stdout
    assert [c["iteration"] for c in corrections[0]] == [4, 8, 12]
    first, second, _ = (c["seconds_factors"] for c in corrections[0])
    microbatches = records(paths[0])
    ran = {name for r in microbatches if r["iteration"] in (3, 4) for name in parts(costs, r)}
    assert all(1.2 < first[name] < second[name] for name in ran)
    assert corrections[0][1]["hopes"]["metp"] < 0.95
    assert "trying, where they may be faster, for a few iterations " in run.stdout
    before, after = (
        {n for r in microbatches if r["iteration"] in range(*its) for n in parts(costs, r)}
        for its in ((1, 9), (9, 13))
    )
    assert "metp" not in before and "metp" in after
    in_force = [{name: 1.0 for name in first}]
    for told in corrections[0]:
        hopes = told.get("hopes", in_force[0])
        in_force.append({n: factor * hopes[n] for n, factor in told["seconds_factors"].items()})
    for record in microbatches:
        factors = in_force[(record["iteration"] - 1) // 4]
        expected = sum(s * factors.get(name, 1) for name, s in parts(costs, record).items())
        assert record["predicted_seconds"] == pytest.approx(expected, rel=1e-3)
    reported = read_trace(str(paths[0]), read_cost_file(costs)).summary
    assert estimates(reported.lines()) == estimates(run.stdout.splitlines())


def parts(costs, record) -> dict[str, float]:
    """Seconds that the cost file predicts for each strategy of a traced plan."""
    model, found = read_cost_file(costs).require_model(), {}
    s = -(-record["seq_length"] // 64) * 64  # planned as the next multiple
    layers = parse_runs(record["plan"]).layers.values()
    for choice in layers:
        for name, operation in ((choice.attention, "attention"), (choice.mlp, "mlp")):
            seconds = model.operation(name, operation, s).time_seconds
            name = name.removesuffix("+recompute")
            found[name] = found.get(name, 0.0) + seconds
    return found


def test_a_run_without_costs_measures_them_once(data, tmp_path):
    """Under torchrun, then on ranks started otherwise: the second start finds what is kept."""
    flags = [*data, *TP2, "--paradyse-policy", "optimal", "--train-iters", 2]
    flags += ["--paradyse-strategies", "megatron_ts,ulysses_z+recompute"]
    save = ["--save", tmp_path / "saved", "--save-interval", 2]
    first = train_under_torchrun(*flags, *save, ranks=2, timeout_seconds=200)
    assert first.code == 0 and "Traceback" not in first.stderr, first.stderr[-3000:]
    assert first.stdout.count("Megatron runs on the CPU with gloo") == 1
    assert "measuring this model on this machine" in first.stdout
    assert "a quick profile of 4 lengths up to 256" in first.stdout
    assert "estimated by the cost model" in first.stdout
    assert (tmp_path / "saved" / "iter_0000002").is_dir()
    second = train(tmp_path / "b", *flags, ranks=2)
    assert "> paradyse: costs: kept from" in second.stdout
    assert "measuring" not in second.stdout


@pytest.mark.parametrize("policy", ["optimal", "heuristic"])
def test_a_restart_plans_and_learns_alike(policy, data, costs, tmp_path):
    """Started again from the checkpoint of iteration 3 of 6: the same plans and losses."""
    flags = [*data, *TP2, *by_cost(costs, policy), *BUDGET, "--train-iters", 6]
    flags += ["--paradyse-smoothing", 0.4]
    saved = ["--save", tmp_path / "saved", "--save-interval", 3]
    whole_trace, rest_trace = tmp_path / "whole.jsonl", tmp_path / "rest.jsonl"
    whole = train(tmp_path / "whole", *flags, *saved, "--paradyse-trace", whole_trace, ranks=2)
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("3")
    load = ["--load", tmp_path / "saved", "--paradyse-trace", rest_trace]
    rest = train(tmp_path / "rest", *flags, *load, ranks=2)
    np.testing.assert_allclose(rest.values("loss"), whole.values("loss")[3:], rtol=1e-6)
    shapes = ("iteration", "microbatch", "seq_length", "plan")
    again = [[r[key] for key in shapes] for r in records(rest_trace)]
    assert again == [[r[key] for key in shapes] for r in records(whole_trace) if r["iteration"] > 3]


def test_memory_that_ran_out_is_traced_and_teaches_the_next_start(data, tmp_path):
    """Costs that claim next to nothing lead into the emulated limit; the next start avoids it."""
    costs = write_costs(tmp_path / "costs.json", scale_bytes=1e-2, static_bytes=1e6)
    trace = tmp_path / "trace.jsonl"
    flags = [*data, *TP2, *by_cost(costs), "--paradyse-trace", trace]
    flags += ["--paradyse-memory-budget", "3MB", "--paradyse-memory-margin", 0]
    run = attempt(tmp_path, *flags, ranks=2)
    assert run.code not in (0, 124)
    errors = [line for line in run.stderr.splitlines() if line.startswith("error")]
    assert len(errors) == 1 and "out of memory at iteration " in errors[0], run.stderr[-3000:]
    assert "start again with this --paradyse-trace" in errors[0]
    found = records(trace, "out_of_memory")
    assert found and found[0]["predicted_peak_bytes"] <= 3_000_000 < found[0]["peak_bytes"]
    again = attempt(tmp_path, *flags, ranks=2)
    assert "tells of 1 plan that ran out of memory: the budget is at most" in again.stdout


def test_evaluation_plans_forwards_alone(tmp_path, costs):
    """Where training must save memory, an evaluation of the same lengths need not."""
    flags = [*data_flags(tmp_path, [200] * 60, "50,50,0"), *ONE_EACH]
    flags += [*TP2, *by_cost(costs), *BUDGET, "--eval-iters", 2, "--eval-interval", 2]
    trace = tmp_path / "trace.jsonl"
    run = train(tmp_path, *flags, "--paradyse-trace", trace, ranks=2)
    assert {r["iteration"] for r in records(trace)} == {1, 2, 3, 4}
    assert len(records(trace)) == 8  # evaluations are not microbatches of training
    assert "validation loss at iteration 4" in run.stdout


GROWING = ["--step-batch-size-schedule", f"0:4 {8 * 256}:12"]
SIZES = {"one": ["--global-batch-size", 8], "growing": GROWING}


@pytest.mark.parametrize("sizes", SIZES)
def test_balanced_replicas_train_on_the_same_global_batches(sizes, data, costs, tmp_path):
    """The same losses and gradients as undealt; and the replicas' predicted times come closer."""
    at = data.index("--global-batch-size")
    flags = [*data[:at], *data[at + 2 :], *TP2, *by_cost(costs), *SIZES[sizes]]
    spread, losses = {}, {}
    for name, more in {"plain": [], "balanced": ["--paradyse-balance"]}.items():
        trace = tmp_path / f"{name}.jsonl"
        run = train(tmp_path / name, *flags, *more, "--paradyse-trace", trace, ranks=4)
        losses[name] = [run.values("loss"), run.values("grad_norm")]
        sums = []
        for replica in (0, 1):
            found = records(tmp_path / f"{name}-dp{replica}-pp0.jsonl")
            assert len(found) == 16
            sums.append([sum(r["predicted_seconds"] for r in found if r["iteration"] == i)
                         for i in range(1, 5)])  # fmt: skip
        spread[name] = np.abs(np.subtract(*sums)).sum()
    np.testing.assert_allclose(losses["balanced"], losses["plain"], rtol=1e-5)
    assert spread["balanced"] < 0.5 * spread["plain"]


def test_ranks_with_different_plans_are_named(tmp_path):
    code, stdout, stderr = run_forked(
        "tests.train.differing_plans",
        with_defaults(TP2),
        ranks=2,
        folder=tmp_path,
        timeout_seconds=120,
    )
    assert code == 0, stderr[-3000:]
    assert stdout.count("alike: no error") == 2
    for rank in (0, 1):
        assert f"rank {rank} of those that have it runs" in stdout


REFUSED = {
    "no costs": (
        ["--paradyse-no-profile"],
        f"none in the cache, and none can be simulated for {cpu_name()}: leave --paradyse-no-",
    ),
    "no file": (["--paradyse-cost-model", "/nowhere.json"], "/nowhere.json"),
    "other costs": (["--paradyse-cost-model", "COSTS"], "these costs are not of this run: "),
    "strategy": (
        ["--paradyse-cost-model", "COSTS", "--paradyse-strategies", "megatron_cz"],
        "has no costs of megatron_cz: profile it, or choose among megatron_ts",
    ),
    "too small": (
        ["--paradyse-cost-model", "COSTS", "--paradyse-accept-costs", *BUDGET[:1], "1.4MB"],
        "parameters, gradients and optimizer take 1.8 MiB of a memory budget of 1.3 MiB",
    ),
    "refuse": (
        ["--paradyse-cost-model", "COSTS", "--paradyse-accept-costs", *BUDGET[:1], "3MB",
         "--paradyse-over-budget", "refuse"],
        "fits: the least peak is",
    ),
    "ablation": (
        ["--paradyse-policy", "heuristic:no-magic", "--paradyse-cost-model", "COSTS"],
        "heuristic takes no-prune",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_choosing_refuses_with_one_line(case, data, costs, tmp_path):
    flags, message = REFUSED[case]
    flags = [str(costs) if flag == "COSTS" else flag for flag in flags]
    flags = ["--paradyse-policy", "optimal", *flags]
    run = attempt(tmp_path, *data, *TP2, *flags, ranks=2)
    assert run.code not in (0, 124)
    assert message in run.stderr, run.stderr[-2000:]
