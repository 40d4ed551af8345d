"""What ran out of memory is kept beside the checkpoints, so that a restart plans otherwise."""

from __future__ import annotations

import argparse
import json

import pytest

from megatron_paradyse.settings import Settings
from megatron_paradyse.train import plugin
from tests.full_disk import largest_file
from tests.train.harness import attempt, data_flags
from tests.train.synthetic_costs import write_costs


def test_a_restart_without_a_trace_plans_otherwise_for_what_ran_out_of_memory(tmp_path):
    """Costs that claim next to nothing lead into the emulated limit at the first microbatch.

    With a smaller margin too, with which the plan would fit a budget that was lowered by the first.
    """
    costs = write_costs(tmp_path / "costs.json", scale_bytes=1e-3, static_bytes=1e6)
    saved = tmp_path / "saved"
    flags = data_flags(tmp_path, [1500] * 20)
    flags += ["--micro-batch-size", 1, "--seq-length", 2048, "--save", saved, "--load", saved]
    flags += ["--save-interval", 100]
    flags += ["--tensor-model-parallel-size", 2, "--sequence-parallel"]
    flags += ["--paradyse-policy", "optimal", "--paradyse-cost-model", costs]
    flags += ["--paradyse-accept-costs", "--paradyse-no-correction"]
    flags += ["--paradyse-memory-budget", "9MB", "--paradyse-memory-margin"]
    first = attempt(tmp_path / "first", *flags, 0.1, ranks=2)
    said = "start again with this --save, which lowers the budget"
    assert first.code == 2 and said in first.stderr, first.stderr[-3000:]
    before = failed(saved)
    again = attempt(tmp_path / "again", *flags, 0, ranks=2)
    assert "tells of 1 plan that ran out of memory: the budget is at most" in again.stdout
    after = [record for record in failed(saved) if record not in before]
    assert after, again.stderr[-3000:]
    assert {r["seq_length"] for r in after} == {r["seq_length"] for r in before}
    assert {r["plan"] for r in after}.isdisjoint(r["plan"] for r in before)
    least = min(r["predicted_peak_bytes"] for r in before)
    assert all(r["predicted_peak_bytes"] < least for r in after)


def test_a_document_that_no_plan_fits_is_not_helped_by_another_start(tmp_path):
    """The plan of least peak is tried, with a warning; another start would try it again."""
    costs = write_costs(tmp_path / "costs.json", scale_bytes=10, static_bytes=1e6)
    flags = data_flags(tmp_path, [1500] * 20)
    flags += ["--micro-batch-size", 1, "--seq-length", 2048]
    flags += ["--tensor-model-parallel-size", 2, "--sequence-parallel"]
    flags += ["--paradyse-policy", "optimal", "--paradyse-cost-model", costs]
    flags += ["--paradyse-accept-costs", "--paradyse-memory-budget", "9MB"]
    flags += ["--save", tmp_path / "saved", "--save-interval", 100]
    run = attempt(tmp_path, *flags, ranks=2)
    said = ": no plan fits it: use more ranks, more memory or a shorter --seq-length"
    assert run.code == 2 and said in run.stderr, run.stderr[-3000:]


def test_what_corrections_had_raised_is_not_chosen_again_by_a_start_without_them(tmp_path):
    """Eight short documents teach that bytes are eight times those of the file; the ninth is long.

    The checkpoint lies between, so that the restart meets the long one before it has learnt.
    """
    costs = write_costs(tmp_path / "costs.json", scale_bytes=1e-4, static_bytes=1e6)
    saved = tmp_path / "saved"
    flags = data_flags(tmp_path, [100] * 8 + [1500] * 8)
    flags += ["--micro-batch-size", 1, "--global-batch-size", 1, "--train-iters", 12]
    flags += ["--seq-length", 2048, "--paradyse-order", "short-to-long"]
    flags += ["--save", saved, "--load", saved, "--save-interval", 8]
    flags += ["--tensor-model-parallel-size", 2, "--sequence-parallel"]
    flags += ["--paradyse-policy", "optimal", "--paradyse-cost-model", costs]
    flags += ["--paradyse-accept-costs", "--paradyse-memory-budget", "9MB"]
    first = attempt(tmp_path / "first", *flags, ranks=2)
    before = failed(saved)
    assert first.code == 2 and "of the memory that the cost file says" in first.stdout
    assert {r["iteration"] for r in before} == {9}
    assert all(r["predicted_peak_bytes"] > r["uncorrected_peak_bytes"] for r in before)
    attempt(tmp_path / "again", *flags, ranks=2)
    after = [record for record in failed(saved) if record not in before]
    assert {r["iteration"] for r in after} == {9}
    assert {r["plan"] for r in after}.isdisjoint(r["plan"] for r in before)


def failed(folder):
    lines = (folder / "paradyse-out-of-memory.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture
def budget(monkeypatch):
    """The module, as on the only rank of a grid of H100s."""
    plugin.install()
    from megatron_paradyse.train import budget

    monkeypatch.setattr(budget, "grid", lambda: ["H100", 4, 1])
    monkeypatch.setattr(budget.torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(budget.torch.distributed, "all_reduce", lambda *_: None)
    return budget


@pytest.mark.parametrize(
    ("line", "budgets"),
    [
        ({}, [980]),  # of an earlier trace, which does not tell
        ({"grid": ["H100", 4, 1]}, [980]),
        ({"grid": ["H100", 2, 1]}, []),
        ({"grid": ["A100", 4, 1]}, []),
        ({"predicted_peak_bytes": None}, []),
        ({"uncorrected_peak_bytes": 400}, [490]),
        ({"uncorrected_peak_bytes": None}, [980]),
        ({"memory_margin": 0.5}, [980]),  # that of this start keeps the plan from coming again
        ({"costs": "abc"}, [980]),
        ({"costs": "def"}, []),  # which predict other peaks
        ({"memory_bytes": 2000}, [980]),
        ({"memory_bytes": 1985}, [980]),
        ({"memory_bytes": 1900}, []),  # there is more now
        ({"memory_bytes": None}, [980]),
        ({"shared_budget_bytes": 2000}, [1960]),  # what failed may be of another's tokens
        ({"shared_budget_bytes": 500}, [980]),
        ({"shared_budget_bytes": "no number"}, []),
    ],
)
def test_only_what_holds_for_this_start_lowers_the_budget(line, budgets, budget, tmp_path):
    record = {"kind": "out_of_memory", "predicted_peak_bytes": 800, "memory_margin": 0.25} | line
    path = tmp_path / "records.jsonl"
    path.write_text('{"kind": "out_of_memory", "pred\n' + json.dumps(record) + "\n")
    assert budget._budgets_of(path, here(memory_bytes=2000), 0.25) == budgets


def here(memory_bytes: int | None = None):
    from megatron_paradyse.train.memory_record import Start

    return Start(["H100", 4, 1], "abc", memory_bytes)


def test_what_an_enforced_budget_was_too_small_for_teaches_nothing_without_one(budget, tmp_path):
    record = {"kind": "out_of_memory", "predicted_peak_bytes": 800, "memory_bytes": 1000}
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(record) + "\n")
    assert budget._budgets_of(path, here(), 0.25) == []


def test_costs_that_each_start_measures_anew_are_the_same(monkeypatch, tmp_path):
    """Where their cache is lost; else a job that starts again would run out of memory forever."""
    plugin.install()
    from megatron_paradyse.train.memory_record import name_of_costs

    monkeypatch.setenv("MEGATRON_PARADYSE_CACHE", str(tmp_path / "cache"))
    kept, given = str(tmp_path / "cache" / "costs-12.json"), str(tmp_path / "costs-12.json")
    assert name_of_costs(kept, "abc") == name_of_costs(kept, "def")
    assert name_of_costs(kept, "abc") != name_of_costs(kept.replace("12", "13"), "abc")
    assert name_of_costs(given, "abc") != name_of_costs(given, "def")


@pytest.mark.parametrize("folder", [None, "msc://bucket/folder"])
def test_what_no_folder_holds_is_not_said_to_be_kept(folder, monkeypatch):
    """The line that a run ends with would name --save otherwise."""
    plugin.install()
    from megatron_paradyse.train import memory_record

    monkeypatch.setattr(memory_record, "get_args", lambda: argparse.Namespace(save=folder))
    assert memory_record.keep_beside_checkpoints({"kind": "out_of_memory"}) is False


def test_a_record_for_which_there_was_no_room_spoils_no_later_one(tmp_path, monkeypatch):
    """What had room was one line with the next, which no start could read."""
    plugin.install()
    from megatron_paradyse.train import memory_record

    monkeypatch.setattr(memory_record, "get_args", lambda: argparse.Namespace(save=str(tmp_path)))
    monkeypatch.setattr(memory_record, "grid", lambda: ["H100", 4, 1])
    with largest_file(10):
        assert memory_record.keep_beside_checkpoints({"peak_bytes": 5}) is False
    assert memory_record.keep_beside_checkpoints({"peak_bytes": 6}) is True
    assert failed(tmp_path) == [{"peak_bytes": 6, "grid": ["H100", 4, 1]}]


@pytest.mark.parametrize(("elsewhere", "told"), [(700, True), (1 << 62, False)])
def test_a_budget_that_another_rank_lowers_is_told_of(elsewhere, told, budget, capsys, monkeypatch):
    """Its trace is a file of its own, which the first rank does not read; so may be --save."""

    def with_others(values, operation):
        values.copy_(values.minimum(values.new_tensor([900, elsewhere])))

    monkeypatch.setattr(budget.torch.distributed, "all_reduce", with_others)
    found = budget.budget_bytes(Settings(memory_budget="1000"), costs="abc")
    assert found == (700 if told else 900)
    said = "what another rank reads, its trace or its folder of checkpoints, tells of plans that"
    assert (said in capsys.readouterr().out) == told


def test_the_budget_of_a_gpu_is_what_is_free_less_a_reserve(budget, monkeypatch):
    """With what this process has reserved of it before."""
    cuda = {"is_available": True, "mem_get_info": (700, 1000), "memory_reserved": 100}
    for name, value in cuda.items():
        monkeypatch.setattr(budget.torch.cuda, name, lambda value=value: value)
    assert budget.budget_bytes(Settings(), costs="abc") == 700 + 100 - 50
    assert budget.budget_bytes(Settings(memory_budget="900"), costs="abc") == 900


@pytest.mark.parametrize(
    ("peaks", "told"), [((800, 800), "1 plan that"), ((800, 700, 800), "2 plans that")]
)
def test_a_plan_counts_once_though_each_of_its_ranks_has_left_a_record(
    peaks, told, budget, tmp_path, capsys
):
    path = tmp_path / "records.jsonl"
    records = [{"kind": "out_of_memory", "predicted_peak_bytes": peak} for peak in peaks]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    budget.budget_bytes(Settings(memory_budget="900"), costs="abc", records=[path])
    assert f"{path} tells of {told} ran out of memory" in capsys.readouterr().out


def test_a_damaged_record_of_more_bytes_than_there_can_be_lowers_no_budget(budget, tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"kind": "out_of_memory", "predicted_peak_bytes": 1e30}\n')
    settings = Settings(memory_budget="900")
    assert budget.budget_bytes(settings, costs="abc", records=[path]) == 900


@pytest.mark.parametrize(("budget", "size"), [("2KiB", 2048), (None, None)])
def test_what_can_run_out_on_a_cpu_is_the_budget_that_is_enforced(budget, size, monkeypatch):
    """Else a start with a larger one would be held to what the smaller one could not run."""
    plugin.install()
    from megatron_paradyse.train import memory_record

    monkeypatch.setattr(memory_record.torch.cuda, "is_available", lambda: False)
    found = memory_record.circumstances(Settings(memory_budget=budget), "abc")
    assert found["memory_bytes"] == size and found["costs"] == "abc"


def start(name: str, tensor: int) -> dict:
    """The record of a start in a trace."""
    return {"kind": "run", "hardware": {"name": name}, "ranks": {"tensor": tensor, "pipeline": 1}}


@pytest.mark.parametrize(
    ("starts", "budgets"),
    [
        ([start("H100", 4)], [980]),
        ([start("H100", 2)], []),
        ([start("A100", 4)], []),
        ([start("H100", 2), start("H100", 4)], [980]),
    ],
)
def test_a_trace_goes_on_from_starts_on_other_grids(starts, budgets, budget, tmp_path):
    """What 2 ranks could not hold lowered the budget of 4 that go on with their trace."""
    record = {"kind": "out_of_memory", "predicted_peak_bytes": 800, "memory_margin": 0.25}
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [*starts, record]))
    assert budget._budgets_of(path, here(), 0.25) == budgets


@pytest.mark.parametrize(("told", "held"), [(None, 200), ("3GiB", 3 << 30)])
def test_free_host_memory_is_shared_by_the_ranks_of_a_machine(told, held, monkeypatch):
    plugin.install()
    from megatron_paradyse.train import budget

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(budget, "free_bytes", lambda: 1000)
    monkeypatch.setattr(budget.torch.distributed, "all_reduce", lambda *of: None)
    assert budget.host_bytes(Settings(host_memory=told)) == held


def test_smoothing_begins_anew_at_every_checkpoint(monkeypatch):
    """A restart from it has none, and shall plan as this run goes on."""
    plugin.install()
    from megatron_paradyse.train import session

    done = []
    save = lambda *of: done.append("saved")  # noqa: E731
    monkeypatch.setattr(session.training, "save_checkpoint_and_time", save)
    policies = argparse.Namespace(forget=lambda: done.append("forgotten"))
    session.Session(Settings())._forget_at_saves(policies)
    for _ in range(2):
        session.training.save_checkpoint_and_time(1)
    assert done == ["saved", "forgotten"] * 2


@pytest.mark.parametrize(("experts_shared", "budget"), [(True, 1000), (False, None)])
def test_what_others_tokens_may_have_taken_is_told_where_experts_are_shared(experts_shared, budget):
    """Replicas that only add up what routers count hold none of each other's."""
    plugin.install()
    from megatron_paradyse.train import session

    one = session.Session(Settings(memory_budget="1 GiB"))
    one._policies = argparse.Namespace(
        budget_bytes=1000, name_of_costs="abc", experts_shared=experts_shared, together=True
    )
    assert one._circumstances().get("shared_budget_bytes") == budget
