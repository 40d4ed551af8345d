"""What a checkpoint says of the run that wrote it, for stock Megatron and for other data."""

from __future__ import annotations

import argparse
import contextlib
import json

import pytest
import torch

from megatron_paradyse.errors import UserError
from megatron_paradyse.settings import Settings
from megatron_paradyse.train import checkpoint_files, counting, data_files, plugin
from tests.train.harness import train, write_documents

SMALL = ["--num-layers", 1, "--train-iters", 2]
TE, LOCAL = {"transformer_impl": "transformer_engine"}, {"transformer_impl": "local"}
FIXED_64 = "fixed sequences of 64 tokens"
SHUFFLED = "shuffled documents of up to 64 tokens (longer ones: split)"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two iterations of 8 documents each, one layer."""
    folder = tmp_path_factory.mktemp("saved")
    write_documents(folder / "corpus", [20] * 40)
    data = ["--data-path", folder / "corpus", "--split", "100,0,0", "--paradyse"]
    train(folder, *data, *SMALL, "--save", folder, "--save-interval", 2, ranks=1)
    return folder


def test_a_tracker_names_no_checkpoint_whose_files_are_not_listed(saved):
    """A kill between the two would leave one that is written over for not whole."""
    listed = checkpoint_files.folder_of(str(saved), 2) / checkpoint_files.LIST
    tracker = saved / checkpoint_files.TRACKER
    assert listed.stat().st_mtime_ns <= tracker.stat().st_mtime_ns


def test_stock_megatron_takes_its_own_layers_from_a_checkpoint_of_ours(saved, tmp_path):
    flags = ["--mock-data", "--load", saved, "--use-checkpoint-args", "--train-iters", 3]
    run = train(tmp_path, *SMALL[:2], *flags, "--override-opt-param-scheduler", ranks=1)
    assert "Checkpoint did not provide arguments spec" in run.stdout
    assert [record["iteration"] for record in run.records] == [3]


def test_going_on_in_other_samples_is_warned_of_once(saved, tmp_path):
    flags = ["--mock-data", "--load", saved, "--paradyse", "--paradyse-sequences", "fixed"]
    flags += ["--train-iters", 3, "--override-opt-param-scheduler"]
    run = train(tmp_path, *SMALL[:2], *flags, ranks=1)
    said = f"> paradyse: the checkpoint has consumed 8 samples and counted {SHUFFLED}; this run"
    assert run.stdout.count(said) == 1
    anew = train(tmp_path, *SMALL[:2], *flags, "--override-ckpt-iteration", 0, ranks=1)
    assert "samples and counted" not in anew.stdout
    assert [record["iteration"] for record in anew.records] == [1, 2, 3]


@pytest.mark.parametrize(
    ("of_checkpoint", "warned"),
    [
        ({"paradyse": True, "paradyse_samples": SHUFFLED}, False),
        ({"paradyse": True, "paradyse_samples": SHUFFLED.replace("64", "96")}, True),
        ({"paradyse": True, "paradyse_samples": FIXED_64}, True),
        ({}, True),  # of stock Megatron
        ({"paradyse": True}, False),  # of a version that did not tell
    ],
)
def test_a_checkpoint_that_counts_alike_is_not_warned_of(of_checkpoint, warned):
    run = argparse.Namespace(paradyse_samples=SHUFFLED)
    checkpoint = argparse.Namespace(seq_length=64, consumed_train_samples=8, **of_checkpoint)
    assert (counting.warning(run, checkpoint) is not None) is warned
    checkpoint.consumed_train_samples = 0
    assert counting.warning(run, checkpoint) is None
    run.paradyse_samples = FIXED_64
    checkpoint.consumed_train_samples = 8
    if not of_checkpoint:
        assert counting.warning(run, checkpoint) is None


def test_bucketed_documents_of_other_batches_are_other_samples():
    """The order of an epoch is cut into groups of a global batch."""
    settings = Settings(order="bucketed")
    args = argparse.Namespace(paradyse_settings=settings, seq_length=64, global_batch_size=8)
    args.step_batch_size_schedule, args.micro_batch_size, args.data_parallel_size = None, 1, 2
    before = counting.samples_of(args)
    args.global_batch_size, args.decrease_batch_size_if_needed = 17, True  # 16 are trained on
    assert "in groups of 16" in counting.samples_of(args) != before
    args.step_batch_size_schedule = "0:8 64000:12"
    assert "in groups of 4" in counting.samples_of(args)
    args.paradyse_settings = Settings()
    assert counting.samples_of(args) == SHUFFLED


def test_a_checkpoint_that_cannot_be_loaded_is_not_its_own_remedy(tmp_path, monkeypatch):
    plugin.install()
    from megatron_paradyse.train import checkpoints

    for iteration in (2, 4):
        folder = checkpoint_files.folder_of(str(tmp_path), iteration)
        folder.mkdir()
        (folder / "common.pt").write_bytes(b"x")
        checkpoint_files.list_files(folder)
    args = argparse.Namespace(load=str(tmp_path), ckpt_step=None, exit_on_missing_checkpoint=False)
    args.ckpt_convert_format = args.pretrained_checkpoint = args.no_save_optim = (
        args.no_save_rng
    ) = None
    monkeypatch.setattr(checkpoints, "get_args", lambda: args)
    monkeypatch.setattr(checkpoints.checkpointing, "get_loaded_iteration", lambda: 4)

    def load():
        raise AssertionError

    said = "cannot be loaded: AssertionError: load another with --ckpt-step 2$"
    with pytest.raises(UserError, match=said):
        checkpoints._loading(load)()

    def load_strictly():
        raise TypeError("empty() got an unexpected keyword argument 'strides'")

    with pytest.raises(UserError, match="'strides': leave --dist-ckpt-strictness out, with which"):
        checkpoints._loading(load_strictly)()

    def load_too_much():
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):  # the checkpoint is not to blame
        checkpoints._loading(load_too_much)()


@pytest.fixture
def background(tmp_path, monkeypatch):
    """Saves in the background of rank 0 without a GPU: what Megatron hands over, and its folder."""
    plugin.install()
    from megatron_paradyse.train import checkpoints

    folder = checkpoint_files.folder_of(str(tmp_path), 4)
    requests = []
    args = argparse.Namespace(
        save=str(tmp_path), async_save=True, paradyse_settings=None, paradyse_instead_of={}
    )
    monkeypatch.setattr(checkpoints, "get_args", lambda: args)
    monkeypatch.setattr(checkpoints.torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(checkpoints.checkpointing, "schedule_async_save", requests.append)
    return folder, requests


@pytest.mark.parametrize("has_logits", [False, True])
def test_a_save_in_the_background_is_whole_when_all_is_written(has_logits, background):
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

    from megatron_paradyse.train import checkpoints

    folder, requests = background
    named = []

    def iter_finalize_fn():  # which writes the tracker
        named.append(checkpoint_files.problem_of(folder))

    def save(iteration):
        folder.mkdir(exist_ok=True)
        (folder / "0.distcp").write_bytes(b"x")
        then = [lambda: (folder / "metadata.json").write_text("{}"), iter_finalize_fn]
        if has_logits:  # what follows both comes with the second request
            checkpoints.checkpointing.schedule_async_save(AsyncRequest(None, (), []))
        checkpoints.checkpointing.schedule_async_save(AsyncRequest(None, (), then))

    for again in range(2):  # the second time it is written over
        checkpoints._saving(save)(4)
        assert checkpoint_files.unfinished_iterations(str(folder.parent), 0) == [4]
        if again:
            assert "lists no files" in str(checkpoint_files.problem_of(folder))
        for finish in [finish for request in requests for finish in request.finalize_fns]:
            finish()
        assert checkpoint_files.whole_iterations(str(folder.parent)) == [4]
        listed = json.loads((folder / checkpoint_files.LIST).read_text())
        assert listed == {"0.distcp": 1, "metadata.json": 2}
        assert named.pop() is None and not named, "the tracker never names what is not whole"
        requests.clear()
    assert checkpoints.checkpointing.schedule_async_save == requests.append


def test_a_save_in_the_background_that_fails_later_is_one_line(background):
    from megatron_paradyse.train import checkpoints

    def finalize(blocking):
        raise OSError(28, "No space left on device")

    said = "^a checkpoint in the background cannot be written to .*: No space left .*: make room"
    with pytest.raises(UserError, match=said):
        checkpoints._finalizing(finalize)(blocking=False)


def test_what_this_package_sets_is_back_after_a_save_that_fails(monkeypatch):
    plugin.install()
    from megatron_paradyse.train.checkpoints import as_given

    args = argparse.Namespace(
        spec=["ours"],
        tokenizer_type="NullTokenizer",
        paradyse_settings="settings",
        paradyse_instead_of={"spec": None, "tokenizer_type": None},
    )
    before = dict(vars(args))
    with pytest.raises(OSError, match="full"), as_given(args):
        assert (args.spec, args.tokenizer_type) == (None, None)
        assert not hasattr(args, "paradyse_settings")
        raise OSError("full")
    assert vars(args) == before


@pytest.mark.parametrize("of_checkpoint", [None, "NullTokenizer"])
def test_the_vocabulary_of_the_data_is_not_what_a_checkpoint_keeps(of_checkpoint, monkeypatch):
    """It is taken anew at each start; a checkpoint of NullTokenizer does not tell its size."""
    monkeypatch.setattr(data_files.Path, "is_file", lambda path: True)
    metadata = argparse.Namespace(vocab_size=257, eod=256, tokenizer_parameters={})
    monkeypatch.setattr(data_files, "read_metadata", lambda prefix: metadata)
    given = {"tokenizer_type": of_checkpoint, "vocab_size": None, "null_tokenizer_eod_id": None}
    args = argparse.Namespace(eod_mask_loss=False, paradyse_instead_of={}, **given)
    data_files.take_vocabulary(args, ["corpus"])
    assert (args.tokenizer_type, args.vocab_size) == ("NullTokenizer", 257)
    assert args.paradyse_instead_of == given


def test_a_quick_profile_of_a_checkpoints_model_is_refused(monkeypatch, tmp_path):
    """The profile reads no checkpoint, so it would not know the model."""
    plugin.install()
    from megatron_paradyse.train.auto_costs import Search

    search = object.__new__(Search)
    search._file, search._settings = tmp_path / "none.json", Settings()
    search._args = argparse.Namespace(use_checkpoint_args=True)
    said = []
    monkeypatch.setattr(search, "_say", said.append)
    monkeypatch.setattr(search, "_fail", said.append)
    search._way()
    assert said[0].startswith("no costs: a quick profile reads no checkpoint: give the model's ")


@pytest.mark.parametrize(
    ("of_checkpoint", "of_run", "refused"),
    [
        (TE, LOCAL, True),
        (LOCAL, TE, True),
        (LOCAL, LOCAL, False),
        ({}, LOCAL, False),
        (TE | {"dist_ckpt_optim_fully_reshardable": True}, LOCAL, False),
        (TE | {"use_distributed_optimizer": False}, LOCAL, False),
        (TE, LOCAL | {"no_load_optim": True}, False),
    ],
)
def test_states_in_the_order_of_other_layers_are_refused(of_checkpoint, of_run, refused):
    """Megatron loads them for other parameters, and says nothing: losses go astray."""
    both = ({"use_distributed_optimizer": True} | own for own in (of_checkpoint, of_run))
    compare("check_order", *both, said="--transformer-impl" if refused else None)


FOUR_OF_TE = TE | {"num_experts": 4, "use_distributed_optimizer": True}
GROUPED = FOUR_OF_TE | {"moe_grouped_gemm": True}
ONE_OF_RANK = {"expert_model_parallel_size": 4}


@pytest.mark.parametrize(
    ("of_checkpoint", "of_run", "remedy"),
    [
        (GROUPED, FOUR_OF_TE, "give --moe-grouped-gemm"),
        (FOUR_OF_TE, GROUPED, "leave --moe-grouped-gemm out"),
        (GROUPED, GROUPED, None),
        (GROUPED | ONE_OF_RANK, FOUR_OF_TE | ONE_OF_RANK, None),
        (GROUPED | {"num_experts": None}, FOUR_OF_TE | {"num_experts": None}, None),
        (GROUPED | LOCAL, FOUR_OF_TE | LOCAL, None),
        (GROUPED | {"dist_ckpt_optim_fully_reshardable": True}, FOUR_OF_TE, None),
        (GROUPED, FOUR_OF_TE | {"no_load_optim": True}, None),
    ],
)
def test_states_in_the_order_of_grouped_experts_are_refused(of_checkpoint, of_run, remedy):
    """There are as many of them, so that nothing fails: losses go astray, in one case by 16%."""
    said = None if remedy is None else f"which differs: {remedy}, or save it there with"
    compare("check_order", of_checkpoint, of_run, said=said)


def compare(check: str, of_checkpoint: dict, of_run: dict, *, said: str | None) -> None:
    """One of checkpoint_states.py says this; None: nothing."""
    plugin.install()
    from megatron_paradyse.train import checkpoint_states

    same = {"no_load_optim": None, "finetune": False, "load": "saved"}
    checkpoint, run = (argparse.Namespace(**same | own) for own in (of_checkpoint, of_run))
    with contextlib.nullcontext() if said is None else pytest.raises(UserError, match=said):
        getattr(checkpoint_states, check)(run, checkpoint)


ALIKE = {"num_experts": 4, "tensor_model_parallel_size": 2, "expert_model_parallel_size": 1}
ALIKE |= {"expert_tensor_parallel_size": 2}
OVER_FOUR = ALIKE | {"expert_model_parallel_size": 4}
IN_ONE = ALIKE | {"expert_tensor_parallel_size": 1}
DENSE = ALIKE | {"num_experts": None, "expert_tensor_parallel_size": None}


@pytest.mark.parametrize(
    ("of_checkpoint", "of_run", "give"),
    [
        (OVER_FOUR, ALIKE, "--expert-model-parallel-size 4 --expert-tensor-parallel-size 2, or"),
        (ALIKE, OVER_FOUR, "--expert-model-parallel-size 1 --expert-tensor-parallel-size 2, or"),
        (IN_ONE, ALIKE, "--expert-model-parallel-size 1 --expert-tensor-parallel-size 1, or"),
        (OVER_FOUR, IN_ONE, None),
        (ALIKE, ALIKE | {"expert_tensor_parallel_size": None}, None),
        (DENSE, DENSE, None),
        (OVER_FOUR, ALIKE | {"no_load_optim": True}, None),
        (OVER_FOUR, ALIKE | {"finetune": True}, None),
    ],
)
def test_states_of_experts_that_megatron_keeps_elsewhere_are_refused(of_checkpoint, of_run, give):
    """It would say that entries or a group of parameters are missing, and no remedy."""
    said = None if give is None else f"and Megatron cannot load them: give {give}"
    compare("check_expert_states", of_checkpoint, of_run, said=said)


DISTRIBUTED = OVER_FOUR | {"expert_tensor_parallel_size": 1, "use_distributed_optimizer": True}
HALVES = DISTRIBUTED | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("of_checkpoint", "of_run", "refused"),
    [
        (DISTRIBUTED, HALVES, True),
        (HALVES, DISTRIBUTED, True),
        (HALVES, HALVES, False),
        (DISTRIBUTED | {"dist_ckpt_optim_fully_reshardable": True}, HALVES, False),
        (DISTRIBUTED, HALVES | {"use_distributed_optimizer": False}, False),
        (DISTRIBUTED, HALVES | {"no_load_optim": True}, False),
    ],
)
def test_states_of_parts_of_experts_are_not_given_to_other_parts(of_checkpoint, of_run, refused):
    """A rank has as many parameters of one whole expert as of halves of two."""
    said = "of the parts of experts there: give --expert-model-parallel-size . --expert-tensor-"
    compare("check_expert_states", of_checkpoint, of_run, said=said if refused else None)
