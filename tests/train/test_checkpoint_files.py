"""A checkpoint is loaded whole or not at all, and one that a save left half is passed over."""

from __future__ import annotations

import json
import os
from traceback import StackSummary

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron_paradyse.errors import UserError
from megatron_paradyse.train import checkpoints, plugin
from megatron_paradyse.train.checkpoint_files import (
    LIST,
    TRACKER,
    begin_writing,
    folder_of,
    iteration_to_load,
    list_files,
    others,
    unfinished_iterations,
    whole_iterations,
)


@pytest.fixture
def folder(tmp_path):
    for iteration in (4, 8, 12):
        checkpoint = folder_of(str(tmp_path), iteration)
        (checkpoint / "inner").mkdir(parents=True)
        (checkpoint / "common.pt").write_bytes(b"x" * iteration)
        (checkpoint / "inner" / "0.distcp").write_bytes(b"y" * 10 * iteration)
        list_files(checkpoint)
    (tmp_path / TRACKER).write_text("12")
    return tmp_path


def test_a_good_folder_is_loaded_as_its_tracker_says(folder):
    assert iteration_to_load(str(folder), None) is None
    assert iteration_to_load(str(folder), 8) is None
    assert whole_iterations(str(folder)) == [4, 8, 12]
    assert others(str(folder), None) == "load another with --ckpt-step 12"


@pytest.mark.parametrize("name", ["common.pt", "inner/0.distcp"])
def test_every_truncation_is_refused_with_the_file_and_an_earlier_checkpoint(folder, name):
    path = folder / "iter_0000012" / name
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(UserError, match=rf"iteration 12 .* is not whole: '{name}' is {size} b"):
            iteration_to_load(str(folder), None)
    path.unlink()
    with pytest.raises(UserError, match=r"is missing, .* were written: .* --ckpt-step 8"):
        iteration_to_load(str(folder), None)
    assert iteration_to_load(str(folder), 8) is None


@pytest.mark.parametrize("text", ["", "1x", "\x00\x00", "-4"])
def test_a_tracker_that_was_cut_off_gives_the_newest_whole(folder, text):
    (folder / TRACKER).write_text(text)
    assert iteration_to_load(str(folder), None) == 12
    (folder / "iter_0000012" / "common.pt").write_bytes(b"")
    assert iteration_to_load(str(folder), None) == 8


def test_a_cut_tracker_without_a_whole_checkpoint_is_an_error(tmp_path):
    (tmp_path / TRACKER).write_text("")
    with pytest.raises(UserError, match="no checkpoint beside it is whole"):
        iteration_to_load(str(tmp_path), None)


def test_a_first_start_and_a_stock_checkpoint_are_megatrons_business(tmp_path, folder):
    assert iteration_to_load(str(tmp_path / "nothing"), None) is None
    (folder / "iter_0000012" / LIST).unlink()
    assert iteration_to_load(str(folder), None) is None


def test_the_list_of_a_checkpoint_names_every_file(folder):
    listed = json.loads((folder / "iter_0000008" / LIST).read_text())
    assert listed == {"common.pt": 8, "inner/0.distcp": 80}


@pytest.mark.parametrize("by_stock_megatron", [False, True])
def test_a_checkpoint_that_is_written_over_is_whole_again_at_the_end_alone(
    by_stock_megatron, folder
):
    checkpoint = folder / "iter_0000012"
    if by_stock_megatron:
        (checkpoint / LIST).unlink()
    begin_writing(checkpoint)
    with pytest.raises(UserError, match=r"lists no files: .* --ckpt-step 8"):
        iteration_to_load(str(folder), None)
    (checkpoint / "common.pt").write_bytes(b"longer than before")
    list_files(checkpoint)
    assert iteration_to_load(str(folder), None) is None and 12 in whole_iterations(str(folder))
    begin_writing(folder / "iter_0000016")  # a new one
    assert not (folder / "iter_0000016").exists()


def test_megatron_hashes_no_list_of_a_checkpoint_that_is_written_over(folder, monkeypatch):
    """With --verify-integrity: the list is written once more after that."""
    plugin.install()
    from megatron.core.dist_checkpointing import serialization, validation

    from megatron_paradyse.train import checkpoints

    names = ("save_checkpoint", "load_checkpoint", "maybe_finalize_async_save")
    names += ("append_to_progress_log",)
    wrapped = [(checkpoints.training, name) for name in names]
    wrapped += [(checkpoints.checkpointing, "check_checkpoint_args")]
    for module, name in [*wrapped, (serialization, "save_integrity_manifest")]:
        monkeypatch.setattr(module, name, getattr(module, name))  # to be put back
    checkpoints.install()
    begin_writing(folder / "iter_0000012")
    serialization.save_integrity_manifest(str(folder / "iter_0000012"))
    list_files(folder / "iter_0000012")
    validation._verify_integrity_manifest_impl(str(folder / "iter_0000012"))
    assert iteration_to_load(str(folder), None) is None


def test_a_save_that_was_cut_off_is_told_of(folder):
    assert unfinished_iterations(str(folder), 4) == []
    new, stock, legacy = (folder_of(str(folder), n) for n in (16, 20, 24))
    for path in (new / "0.distcp", stock / "metadata.json", legacy / "mp_rank_00" / "model.pt"):
        path.parent.mkdir(parents=True)
        path.touch()
    begin_writing(folder_of(str(folder), 8))  # written over
    assert unfinished_iterations(str(folder), 4) == [8, 16]
    assert unfinished_iterations(str(folder), 12) == [16]
    assert unfinished_iterations(str(folder / "nothing"), 0) == []


@pytest.mark.parametrize("name", ["x" * 300, "\0", "../" * 2000])
def test_a_list_of_files_that_can_have_no_such_name_is_refused(folder, name):
    (folder / "iter_0000012" / LIST).write_text(json.dumps({name: 1}))
    with pytest.raises(UserError, match="is missing, 1 were written: load another with"):
        iteration_to_load(str(folder), None)


def test_a_list_that_stock_megatron_has_outdated_is_said_to_be_one(folder):
    path = folder / "iter_0000012" / "common.pt"
    path.write_bytes(b"longer than before")
    age = (path.parent / LIST).stat().st_mtime_ns
    os.utime(path, ns=(age - 1, age - 1))
    with pytest.raises(UserError, match="12 were written: load another with"):
        iteration_to_load(str(folder), None)
    os.utime(path, ns=(age + 1, age + 1))
    with pytest.raises(UserError, match=f"saved it again, remove its {LIST}"):
        iteration_to_load(str(folder), None)


MISSED = "optimizer.state.exp_avg.decoder.weight from model not in state dict: "
PARAMETERS = ["decoder.weight", "optimizer.state.fp32_param.decoder.weight"]


@pytest.mark.parametrize(
    ("missed", "held", "told"),
    [
        (MISSED, PARAMETERS, "it holds no states of an optimizer, as where"),
        (f"chained_0.{MISSED}", [f"chained_0.{PARAMETERS[1]}"], "it holds no states"),
        (MISSED, [*PARAMETERS, "optimizer.state.momentum_buffer.decoder.weight"], "give the opti"),
        (MISSED, ["decoder.weight", "optimizer.distributed.0"], "give the optimizer that it was"),
        (MISSED.replace("exp_avg", "fp32_param"), PARAMETERS, "give the optimizer that it was"),
    ],
)
def test_a_checkpoint_without_states_is_told_from_one_of_another_optimizer(missed, held, told):
    """Where every step was skipped no optimizer finds any."""
    error = KeyError(f"{missed}{sorted(held)}")
    for failed in (error, CheckpointException("load", {1: (error, StackSummary())})):
        assert str(checkpoints.remedy_of(failed)).startswith(told)


def test_the_legacy_format_says_which_weight_is_of_another_size():
    """PyTorch begins with a line that says nothing of it."""
    saved = torch.nn.Linear(2, 4).state_dict()
    with pytest.raises(RuntimeError) as caught:
        torch.nn.Linear(2, 3).load_state_dict(saved)
    reason = checkpoints.reason_of(caught.value)
    assert reason.startswith("RuntimeError: size mismatch for weight: copying a param with shape ")
    assert str(checkpoints.remedy_of(caught.value)).startswith("give the flags that it was trained")


PART = "decoder.layers.self_attention.q_layernorm.weight"
NO_PART = KeyError(f"{PART} from model not in state dict: ['common_state/shard_0_1', 'o.weight']")
NO_STATE = KeyError(f"chained_1.{MISSED}{['decoder.weight', 'chained_0.optimizer.state.a.b']}")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (NO_PART, "it has other parts than this model: give the flags that it was trained with, "),
        (RuntimeError(f"Missing key in checkpoint state_dict: {PART}."), "it has other parts"),
        (NO_STATE, "give the optimizer that it was trained with"),
    ],
)
def test_a_checkpoint_of_other_parts_is_not_taken_for_a_broken_one(error, told):
    """As TransformerEngine's layers have, with norms inside their linears."""
    for failed in (error, CheckpointException("load", {0: (error, StackSummary())})):
        assert str(checkpoints.remedy_of(failed)).startswith(told)
