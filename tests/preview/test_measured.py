"""Limits found by running: the search, the file of trials, and the command on ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from megatron_paradyse.cli import cli
from megatron_paradyse.errors import UserError
from megatron_paradyse.preview.measured import About, Trial, TrialFile, read_trials, search
from tests.train.harness import run_forked

STEP = 64
ABOUT = About("abc", 1 << 30, 30_000, 1, 4, 2, False, "cpu", "2.15", "none")


def searched(limit: int, predicted: int, resolution: float = 0.02, most: int | None = None):
    """The limit found where `limit` is the truth, and the lengths that were tried."""
    tried: list[int] = []

    def fits(tokens: int) -> bool | None:
        assert tokens % STEP == 0 and tokens > 0 and tokens not in tried
        if most is not None and tokens > most:
            return None
        tried.append(tokens)
        return tokens <= limit

    trials = SimpleNamespace(fits=fits, longest=lambda: most)
    return search("metp", predicted, trials, step=STEP, resolution=resolution), tried


@pytest.mark.parametrize("predicted", [0, 64, 6_400, 100_032, 128_000, 1_000_000])
@pytest.mark.parametrize("limit", [64, 6_400, 100_000, 131_072])
def test_the_limit_is_found_whatever_was_predicted(limit, predicted):
    found, tried = searched(limit, predicted)
    assert found.tokens <= limit < found.above
    assert found.above - found.tokens <= 0.02 * found.above + STEP
    assert len(tried) <= 30


def test_two_trials_confirm_a_good_prediction():
    found, tried = searched(100_032, 100_032)
    assert len(tried) == 2 and tried[0] < 100_032 < tried[1]
    assert found.error == pytest.approx(0.01, abs=0.002)


def test_where_nothing_fits_the_limit_is_0():
    found, _ = searched(0, 6_400)
    assert (found.tokens, found.above, found.error) == (0, STEP, None)


def test_what_would_take_too_long_is_left_open():
    found, _ = searched(100_000, 90_000, most=95_000)
    assert found.above is None and 90_000 < found.tokens <= 95_000
    assert found.why == "longer ones would take too long"


def test_the_longest_that_does_not_take_too_long_is_tried_instead_of_the_predicted():
    found, tried = searched(100_000, 90_000, most=50_000)
    assert tried == [found.tokens] and 50_000 - STEP < found.tokens <= 50_000
    assert found.above is None and found.why == "longer ones would take too long"
    found, tried = searched(30_000, 90_000, most=50_000)  # the prediction is wrong
    assert found.tokens <= 30_000 < found.above <= 1.03 * found.tokens
    assert searched(30_000, 90_000, most=STEP - 1)[1] == []


def trial(tokens: int, status: str = "fits") -> Trial:
    return Trial("metp", tokens, status, "1-4 metp", "2026-11-22", 5, 6, 7)


def test_trials_go_on_from_their_file(tmp_path):
    path = str(tmp_path / "trials.json")
    file = TrialFile(path, ABOUT)
    for one in (trial(64), trial(128, "oom")):
        file.add(one)
        file.save()
    again = TrialFile(path, ABOUT)
    assert list(again.trials.values()) == [trial(64), trial(128, "oom")]
    assert read_trials(path) == (ABOUT, [trial(64), trial(128, "oom")])
    with pytest.raises(
        UserError, match=r"budget_bytes: 1073741824, here 5.*give another --measure"
    ):
        TrialFile(path, replace(ABOUT, budget_bytes=5))


@pytest.mark.parametrize("holdings", [None, 0])
def test_trials_of_strategies_of_another_version_are_refused(holdings, tmp_path):
    """They held other bytes; files of before 2026-11-29 do not tell which."""
    path = tmp_path / "trials.json"
    file = TrialFile(str(path), ABOUT)
    file.add(trial(64))
    file.save()
    content = json.loads(path.read_text())
    content["about"].pop("holdings")
    content["about"] |= {} if holdings is None else {"holdings": holdings}
    path.write_text(json.dumps(content))
    assert read_trials(str(path)) == (replace(ABOUT, holdings=holdings), [trial(64)])
    with pytest.raises(UserError, match=r"strategies of another version .*give another --measure"):
        TrialFile(str(path), ABOUT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content["about"].pop("ranks"), "about lacks 'ranks'"),
        (lambda content: content["trials"].append(3), r"trials\[1\] must be an object"),
        (lambda content: content["trials"][0].update(tokens=-1), r"tokens must lie in"),
        (lambda content: content["about"].update(stand_in=0), "stand_in must be true or false"),
        (lambda content: content.update(more=1), "has unknown 'more'"),
    ],
)
def test_a_file_of_something_else_is_refused(change, message, tmp_path):
    path = tmp_path / "trials.json"
    file = TrialFile(str(path), ABOUT)
    file.add(trial(64))
    file.save()
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"is not a file of trials: .*{message}"):
        read_trials(str(path))


MODEL = ["--hidden-size", 64, "--num-attention-heads", 4, "--vocab-size", 255]
MODEL += ["--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope"]
MODEL += ["--attention-dropout", 0, "--hidden-dropout", 0]
STRATEGIES = "ulysses_z,metp+recompute"
RESOLUTION = 0.2


def command(*arguments: object) -> str:
    """stdout of the command in a process of its own."""
    run = subprocess.run(
        [sys.executable, "-m", "megatron_paradyse", *(str(a) for a in arguments)],
        capture_output=True, text=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


def forked(folder: Path, *arguments: object) -> None:
    """A command that starts no ranks, in a process that need not import Megatron."""
    argv = [str(argument) for argument in arguments]
    code, _, stderr = run_forked(
        "megatron_paradyse.__main__", argv, ranks=1, folder=folder, timeout_seconds=200
    )
    assert code == 0, stderr[-3000:]


@pytest.fixture(scope="module")
def costs(tmp_path_factory):
    """Simulated for the ranks of the tests, whose kernels hold more than a GPU's."""
    folder = tmp_path_factory.mktemp("limits")
    raw, fitted = folder / "raw.json", folder / "costs.json"
    forked(
        folder, "simulate", "--gpu", "a100-80g", "--ranks", 2, "--dtype", "float32", "-o", raw,
        "--lengths", "128,512,2K", "--strategies", STRATEGIES, *MODEL, "--num-layers", 2,
    )  # fmt: skip
    forked(folder, "fit", raw, "-o", fitted)
    return fitted


@pytest.fixture(scope="module")
def measured(costs, tmp_path_factory):
    """What ranks, and one process in their place, say: values and trials."""
    found, figure = {}, tmp_path_factory.mktemp("figure") / "limits.png"
    some = ("--measure-only", "ParaDySe,ulysses_z")
    for how in (("--nproc", 2, "--figure", figure), ("--stand-in", *some)):
        path = tmp_path_factory.mktemp("measured") / "trials.json"
        output = command(
            "max-length", costs, "--measure", path, *how, "--json",
            "--memory-budget", "5MiB", "--memory-margin", 0, "--resolution", RESOLUTION, *MODEL,
        )  # fmt: skip
        found[how[0]] = json.loads(output), read_trials(str(path))[1]
    assert figure.stat().st_size > 5000
    return found


@pytest.mark.timeout(400)
def test_ranks_find_the_limits_of_their_memory(measured):
    values, trials = measured["--nproc"]
    limits = {limit["strategy"]: limit for limit in values["measured"]["limits"]}
    assert set(limits) == {"ParaDySe", "metp", "metp+offload", *STRATEGIES.split(",")}
    budget = values["budget_bytes"]
    for one in trials:
        assert one.fits == (one.peak_bytes <= budget) and one.peak_bytes > 0.3 * budget
    for limit in limits.values():
        assert 0 < limit["above"] - limit["tokens"] <= RESOLUTION * limit["above"] + STEP
    assert limits["ParaDySe"]["tokens"] >= limits["ulysses_z"]["tokens"]
    assert not values["measured"]["about"]["stand_in"]


@pytest.mark.timeout(400)
def test_one_process_holds_in_the_place_of_a_rank_what_the_rank_does(measured):
    (_, ranks), (values, alone) = measured["--nproc"], measured["--stand-in"]
    peaks = {(one.strategy, one.tokens): one.peak_bytes for one in ranks}
    both = [one for one in alone if (one.strategy, one.tokens) in peaks]
    assert len(both) >= 4 and values["measured"]["about"]["stand_in"]
    for one in both:
        assert one.peak_bytes == pytest.approx(peaks[one.strategy, one.tokens], rel=0.01)


def refused(*arguments: object) -> str:
    result = CliRunner().invoke(cli, ["max-length", *(str(a) for a in arguments)])
    assert result.exit_code != 0
    return " ".join(result.output.split())


def test_wrong_usage_is_told(costs, tmp_path):
    trials = tmp_path / "trials.json"
    budget = ("--memory-budget", "12MiB")
    assert "--memory-bugdet is for measuring: give --measure" in refused(
        costs, "--memory-bugdet", 1
    )
    assert "give --nproc 2 to start 2 ranks here" in refused(costs, *budget, "--measure", trials)
    told = refused(costs, *budget, "--measure", trials, "--nproc", 3)
    assert "the costs are of 2 ranks, not of 3: give --nproc 2" in told
    told = refused(costs, *budget, "--measure", trials, "--nproc", 2, "--stand-in")
    assert "--stand-in is one process" in told
    told = refused(costs, *budget, "--measure", "--nproc", 2)
    assert "expected the name of a file, got --nproc: put FILE before it" in told
    told = refused(costs, *budget, "--measure", trials, "--stand-in", "--measure-only", "metpp")
    assert "--measure-only metpp: give some of ParaDySe, " in told
    assert not list(tmp_path.iterdir())


def test_limits_are_measured_on_all_ranks_over_which_experts_lie(costs, tmp_path):
    """Of costs of 2 ranks no number of ranks was right: experts over 4 need those, too."""
    content = json.loads(Path(costs).read_text())
    content["description"]["halves"] = {"mlp": {"expert_parallel": 4, "expert_tensor_parallel": 1}}
    other = tmp_path / "experts.json"
    other.write_text(json.dumps(content))
    measure = ("--memory-budget", "12MiB", "--measure", tmp_path / "trials.json")
    assert "give --nproc 4 to start 4 ranks here" in refused(other, *measure)
    told = refused(other, *measure, "--nproc", 2)
    assert "the costs are of 4 ranks, not of 2: give --nproc 4" in told
