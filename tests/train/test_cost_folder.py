"""The folder in which starts keep costs that they made: shared, not to be written, not there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from megatron_paradyse.costs.cost_file import read_cost_file
from megatron_paradyse.errors import UserError
from megatron_paradyse.settings import Settings
from megatron_paradyse.train import auto_costs, cost_cache, memory_record
from tests.train.searching import search
from tests.train.synthetic_costs import write_costs


def test_jobs_that_measure_the_same_at_once_write_files_of_their_own(tmp_path, monkeypatch):
    """One fitted what another had begun: 3 lengths in the place of 4. The first keeps its name, to
    go on with where it is interrupted."""
    outputs: list[str] = []
    fitted: list[str] = []

    def profile(meanwhile=lambda: None):
        one = search(tmp_path, monkeypatch)

        def fit(raw, _):
            raw.write_text("measured")
            fitted.append(str(raw))
            meanwhile()

        monkeypatch.setattr(one, "_wait", lambda *_: None)
        monkeypatch.setattr(one, "_fit", fit)
        one._profile()

    def start(command, env, **_):
        assert env["OMP_NUM_THREADS"] == "7"  # as this process has
        outputs.append(command[command.index("--output") + 1])

    monkeypatch.setattr(auto_costs.subprocess, "Popen", start)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    profile(meanwhile=profile)
    assert fitted == outputs and fitted[0] == str(tmp_path / "costs-key.raw.json") != fitted[1]
    assert [str(path) for path in tmp_path.iterdir()] == fitted[:1]


def test_a_lock_that_was_removed_is_no_lock(tmp_path):
    """Who opened it before its holder ended would share a file with who made it anew."""
    costs = tmp_path / "costs-key.json"
    with cost_cache.stem_of_own(costs) as stem:
        assert stem == "costs-key"
        late = costs.with_suffix(".lock").open("w")
    with late:
        assert not cost_cache._locks(late)
        with cost_cache.stem_of_own(costs) as stem:
            assert stem == "costs-key" and not cost_cache._locks(late)


def test_costs_that_another_job_has_kept_meanwhile_stay(tmp_path, monkeypatch):
    """Its ranks may be about to read them, and end where two of them have read others."""
    one, kept = search(tmp_path, monkeypatch), tmp_path / "costs-key.json"
    made = write_costs(tmp_path / "made.json")
    costs, p = made.read_text(), read_cost_file(made).table.description.p
    one._args.tensor_model_parallel_size = p
    monkeypatch.setattr(one, "_run", lambda command, *_: Path(command[-1]).write_text(costs))
    for before, after in (("of an earlier version", costs), (costs + "\n", costs + "\n")):
        kept.write_text(before)
        one._fit(tmp_path / "costs-key.raw.json")
        assert kept.read_text() == after
        assert {path.name for path in tmp_path.iterdir()} == {"costs-key.json", "made.json"}


def test_a_folder_in_which_no_costs_can_be_made_is_one_line(tmp_path, monkeypatch):
    one = search(tmp_path, monkeypatch)
    (tmp_path / "costs-key.lock").mkdir()  # even the superuser cannot open it
    with pytest.raises(UserError, match="Is a directory: set MEGATRON_PARADYSE_CACHE"):
        one.run()


def test_a_process_that_cannot_start_blames_no_folder(tmp_path, monkeypatch):
    def start(*_, **options):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(auto_costs.subprocess, "Popen", start)
    with pytest.raises(
        UserError, match=r"start \(Cannot allocate memory\): give --paradyse-cost-m"
    ):
        search(tmp_path, monkeypatch).run()


def test_a_user_without_a_home_is_told_where_costs_could_be(tmp_path, monkeypatch):
    """As in a container; with a cost file too it ended in a RuntimeError's traceback."""
    one = search(tmp_path, monkeypatch)
    for name in ("HOME", "XDG_CACHE_HOME", "MEGATRON_PARADYSE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    assert memory_record.name_of_costs(str(tmp_path / "costs.json"), "abc") == "abc"
    with pytest.raises(UserError, match="none is known: set HOME, or MEGATRON_PARADYSE_CACHE"):
        auto_costs.Search(one._args, Settings())
