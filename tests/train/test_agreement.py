"""Ranks that would compute otherwise than the others are named before anything runs."""

from __future__ import annotations

import argparse

import pytest

from megatron_paradyse.errors import UserError
from megatron_paradyse.train.plugin import watch_and_agree
from tests.train.harness import run_each

CASES = {
    "flag": "--lr is 0.2 there and 0.1 on the others",
    "setting": "--paradyse-order is 'bucketed' there and 'shuffled' on the others",
    "plan": "the plan file is",
    "code": "the code of megatron_paradyse is another there and",
}


def run(tmp_path, difference, rank):
    for number in range(3):
        odd = number == rank and difference == "plan"
        (tmp_path / f"plan-{number}").write_text(
            "default: metp\n" if odd else "default: megatron_ts\n"
        )
    return run_each(
        "tests.train.agreeing",
        [difference, str(rank), str(tmp_path)],
        ranks=3,
        folder=tmp_path / "logs",
        timeout_seconds=60,
    )


@pytest.mark.parametrize("difference", CASES)
def test_the_rank_that_differs_is_named_with_both_values(difference, tmp_path):
    codes, stdout, stderr = run(tmp_path, difference, 1)
    assert 0 not in codes and None not in codes, stderr
    line = next(line for line in stderr.splitlines() if line.startswith("error: "))
    assert f"rank 1 of 3 would compute something else: {CASES[difference]}" in line
    assert "agrees" not in stdout


def test_what_may_differ_between_machines_does(tmp_path):
    """Paths of plans, traces and logs; the plans' contents are the same."""
    codes, stdout, stderr = run(tmp_path, "none", 0)
    assert codes == [0, 0, 0], stderr
    assert stdout.count("agrees") == 3


def test_a_rank_that_never_comes_is_named(tmp_path):
    codes, _, stderr = run(tmp_path, "late", 2)
    assert codes[2] == 0 and 0 not in codes[:2]
    said = [line for line in stderr.splitlines() if line.startswith("error")]
    assert said and all("no word of ranks 2 for 1.5 s: see their logs" in line for line in said)


def test_a_checkout_of_megatron_has_a_version_to_compare(monkeypatch):
    """Of what an import finds: no package need be installed."""
    from megatron_paradyse.train import plugin

    plugin.install()
    from megatron_paradyse.train import describe

    monkeypatch.setattr(describe, "megatron_version", lambda: "0.19.1")
    assert describe.versions()["megatron-core"] == "0.19.1"


@pytest.mark.parametrize("world", ["1", "2"])
def test_a_rank_that_no_launcher_started_is_told_to_begin_with_torchrun(world, monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(UserError, match=r"MASTER_ADDR and MASTER_PORT not set: begin .* torchrun"):
        watch_and_agree(argparse.Namespace(distributed_timeout_minutes=1))
