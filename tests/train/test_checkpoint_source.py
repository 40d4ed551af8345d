"""Every way in which Megatron reads a checkpoint passes over what is not whole, or says a line."""

from __future__ import annotations

import argparse
import shutil
import sys

import pytest
from megatron.training import checkpointing

from megatron_paradyse.errors import UserError
from megatron_paradyse.train import checkpoint_source, checkpoints, plugin
from megatron_paradyse.train.checkpoint_files import (
    LIST,
    TRACKER,
    begin_writing,
    folder_of,
    list_files,
    problem_of,
    whole_iterations,
)


@pytest.fixture
def folder(tmp_path):
    for iteration in (4, 8):
        folder_of(str(tmp_path), iteration).mkdir()
        (folder_of(str(tmp_path), iteration) / "common.pt").write_bytes(b"x")
        list_files(folder_of(str(tmp_path), iteration))
    (tmp_path / TRACKER).write_text("8")
    return tmp_path


def arguments(**given) -> argparse.Namespace:
    values = {"load": None, "pretrained_checkpoint": None, "ckpt_step": None, "paradyse": True}
    values |= dict.fromkeys(("ckpt_convert_format", "no_save_optim", "no_save_rng"))
    return argparse.Namespace(**values | {"exit_on_missing_checkpoint": False} | given)


def loaded(folder, step=None) -> int:
    with checkpoint_source.whole(str(folder), step, flag="--load"):
        return step or checkpointing.read_metadata(str(folder / TRACKER))[0]


def test_weights_to_begin_with_are_read_where_load_has_nothing_yet(folder, tmp_path):
    new, old = str(tmp_path / "new"), str(folder)
    args = arguments(load=new, pretrained_checkpoint=old)
    assert checkpoint_source.source(args) == ("--pretrained-checkpoint", old)
    assert checkpoint_source.source(arguments(load=new)) == ("--load", new)
    args.load, args.pretrained_checkpoint = old, new
    assert checkpoint_source.source(args) == ("--load", old)


def test_a_tracker_that_was_cut_off_is_read_as_the_newest_whole_and_mended(folder, capfd):
    begin_writing(folder_of(str(folder), 8))
    (folder / TRACKER).write_text("")
    assert loaded(folder) == 4
    assert (folder / TRACKER).read_text() == "4"
    assert "was cut off: loading iteration 4, the newest that is whole" in capfd.readouterr().out
    assert loaded(folder) == 4
    assert capfd.readouterr().out == ""


def test_a_step_that_is_named_is_loaded_whatever_the_tracker_holds(folder):
    (folder / TRACKER).write_text("")
    with checkpoint_source.whole(str(folder), 4, flag="--load"):
        assert checkpointing.read_metadata(str(folder / TRACKER)) == (4, False)
    assert (folder / TRACKER).read_text() == ""  # the next start may name none


@pytest.mark.parametrize("newest", ["8", "release", None])
def test_states_of_the_legacy_format_are_read_of_the_step_that_is_named(newest, folder, capfd):
    """Megatron asks the tracker again for a distributed optimizer's, and where to go on."""
    (folder / TRACKER).unlink()
    if newest is not None:
        (folder / TRACKER).write_text(newest)
    with checkpoint_source.whole(str(folder), 4, flag="--load"):
        assert checkpointing.read_metadata(str(folder / TRACKER)) == (4, False)
    assert (folder / TRACKER).exists() == (newest is not None)
    assert capfd.readouterr().out == ""


def test_a_folder_that_cannot_be_written_is_read_all_the_same(folder, monkeypatch):
    def refused(*_):
        raise PermissionError(13, "Permission denied")

    (folder / TRACKER).write_text("")
    monkeypatch.setattr(checkpoint_source, "write_whole", refused)
    assert loaded(folder) == 8
    assert (folder / TRACKER).read_text() == ""


def test_weights_to_begin_with_that_a_save_left_half_are_refused(folder, monkeypatch):
    begin_writing(folder_of(str(folder), 8))
    args = arguments(pretrained_checkpoint=str(folder))
    monkeypatch.setattr(checkpoints, "get_args", lambda: args)
    load = checkpoints._loading(lambda: pytest.fail("was read"))
    with pytest.raises(UserError, match=r"iteration 8 .* not whole: .* --ckpt-step 4"):
        load()
    shutil.rmtree(folder_of(str(folder), 4))
    with pytest.raises(UserError, match=r"not whole: .* give another --pretrained-checkpoint"):
        load()


@pytest.fixture
def first_rank(monkeypatch):
    for name, value in (("get_rank", 0), ("is_initialized", False)):
        monkeypatch.setattr(checkpoints.torch.distributed, name, lambda value=value: value)


@pytest.mark.parametrize("asks", [True, False])
def test_a_save_is_listed_once_it_has_ended(asks, folder, first_rank, monkeypatch):
    """asks: for the name of the tracker, as Megatron does before it writes it."""
    args = arguments(save=str(folder), async_save=False)
    args.paradyse_instead_of, args.paradyse_settings = {}, None
    monkeypatch.setattr(checkpoints, "get_args", lambda: args)
    found, named = [], []

    def write(iteration):
        checkpoint = folder_of(str(folder), iteration)
        found.append(problem_of(checkpoint))
        checkpoint.mkdir(exist_ok=True)
        (checkpoint / "common.pt").write_bytes(b"longer")
        if asks:
            tracker = checkpointing.get_checkpoint_tracker_filename(str(folder))
            assert tracker == str(folder / TRACKER)
            named.append((checkpoint / LIST).is_file() and problem_of(checkpoint) is None)

    for iteration in (8, 12):
        checkpoints._saving(write)(iteration)
        assert (folder_of(str(folder), iteration) / LIST).is_file()
    assert found == ["paradyse-files.json lists no files", "its folder is not there"]
    assert named == ([True, True] if asks else [])
    assert whole_iterations(str(folder)) == [4, 8, 12]


def test_a_start_tells_of_a_save_that_was_cut_off(folder, first_rank, monkeypatch, capsys):
    monkeypatch.setattr(checkpoints, "get_args", lambda: arguments(load=str(folder)))
    monkeypatch.setattr(checkpointing, "get_loaded_iteration", lambda: 8)
    (folder_of(str(folder), 12)).mkdir()
    assert checkpoints._loading(lambda: "was read")() == "was read"
    said = f"> paradyse: the save of iteration 12 in {folder} was cut off: it is not loaded"
    assert said in capsys.readouterr().out


def test_progress_that_cannot_be_written_is_a_line(monkeypatch):
    def append(*_, **__):
        raise NotADirectoryError(20, "Not a directory", "/dev/null/x")

    monkeypatch.setattr(checkpoints, "get_args", lambda: arguments(save="/dev/null/x"))
    with pytest.raises(UserError, match="--log-progress cannot be written to /dev/null/x: Not a"):
        checkpoints._progressing(append)("Starting job")


def test_a_conversion_of_no_checkpoint_is_refused(folder, tmp_path, monkeypatch):
    """Megatron wrote nothing, and ended with exit code 0."""
    args = arguments(load=str(tmp_path / "none"), ckpt_convert_format="torch")
    monkeypatch.setattr(checkpoints, "get_args", lambda: args)
    load = checkpoints._loading(lambda: "was read")
    with pytest.raises(UserError, match=f"torch: no checkpoint in --load {args.load}: give the"):
        load()
    args.load = str(folder)
    monkeypatch.setattr(checkpoints, "_tell_unfinished", lambda folder: None)
    assert load() == "was read"


def test_arguments_are_read_of_the_newest_whole_checkpoint(folder):
    """As --use-checkpoint-args asks, before there are process groups."""
    (folder / TRACKER).write_text("")
    tracker = str(folder / TRACKER)
    read = checkpoints.reading_arguments(lambda *_: checkpointing.read_metadata(tracker))
    assert read(arguments(load=str(folder))) == (8, False)


@pytest.mark.parametrize("fails", [EOFError(), SystemExit()])
def test_arguments_that_cannot_be_read_are_a_line(fails, folder):
    def load(*_):
        raise fails

    read, args = checkpoints.reading_arguments(load), arguments(pretrained_checkpoint=str(folder))
    with pytest.raises(UserError, match=rf"in {folder} cannot be loaded: .*--ckpt-step 8"):
        read(args, "pretrained_checkpoint")
    args.paradyse = False  # then all is Megatron's
    with pytest.raises(type(fails)):
        read(args, "pretrained_checkpoint")


def test_a_job_ends_well_without_a_checkpoint_alone(folder, tmp_path):
    """With --exit-on-missing-checkpoint: one that Megatron cannot read is there."""
    read = checkpoints.reading_arguments(lambda *_: sys.exit())
    args = arguments(load=str(tmp_path / "none"), exit_on_missing_checkpoint=True)
    with pytest.raises(SystemExit):
        read(args)
    args.load = str(folder)
    with pytest.raises(UserError, match="Megatron cannot read it"):
        read(args)


def test_megatron_reads_arguments_through_it():
    plugin.install()
    assert checkpointing.load_args_from_checkpoint.__wrapped__.__module__ == checkpointing.__name__
