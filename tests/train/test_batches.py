"""Which samples and shapes a batch has, by Megatron's flags."""

from __future__ import annotations

import argparse
import contextlib

import pytest
import torch
from torch.overrides import TorchFunctionMode

from megatron_paradyse.errors import UserError
from megatron_paradyse.settings import Settings
from megatron_paradyse.train import plugin
from tests.train.harness import write_documents


@pytest.fixture(autouse=True)
def installed():
    plugin.install()


@pytest.mark.parametrize(("skip_train", "first"), [(False, 24), (True, 0)])
def test_an_evaluation_alone_begins_at_the_first_sample(skip_train, first, monkeypatch):
    """As Megatron's does, wherever the checkpoint's own evaluations had come to."""
    from megatron_paradyse.train import datasets

    args = argparse.Namespace(
        consumed_train_samples=96,
        consumed_valid_samples=24,
        skip_train=skip_train,
        eval_iters=2,
        full_validation=False,
        phase_transition_iterations=None,
        paradyse_settings=argparse.Namespace(sequences="documents"),
    )
    monkeypatch.setattr(datasets, "get_args", lambda: args)
    monkeypatch.setattr(datasets, "_sources", lambda args: [None] * 3)
    monkeypatch.setattr(datasets, "_stream", lambda *of: "stream")
    monkeypatch.setattr(datasets, "_unpacked", lambda *of, seconds, consumed: [consumed])
    train, valid, test = datasets.document_provider()([None] * 3)
    assert [*(train or [None]), *valid, *test] == [None if skip_train else 96, first, 0]


@pytest.mark.parametrize(
    ("window", "skipped", "expected"),
    [(None, None, None), ((31, 0), None, 32), ((31, 0), [1, 0, 1, 1], None), ((-1, 0), None, None)],
)
def test_rows_are_packed_by_the_window_that_all_layers_have(window, skipped, expected, monkeypatch):
    from megatron_paradyse.train import datasets

    args = argparse.Namespace(
        mtp_num_layers=None,
        **{"num_layers": 4, "hidden_size": 64, "window_size": window, "num_experts": None},
        **{"window_attn_skip_freq": skipped, "no_rope_freq": None, "qk_layernorm": False},
        **{"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "num_workers": 0},
        **{"virtual_pipeline_model_parallel_size": None, "global_batch_size": 8},
        **{"step_batch_size_schedule": None, "micro_batch_size": 1, "data_parallel_size": 1},
        exit_signal_handler=False,
        paradyse_model="gpt",
        position_embedding_type="rope",
        multi_latent_attention=False,
        attention_output_gate=False,
        qk_l2_norm=False,
        paradyse_settings=argparse.Namespace(pack_tokens=64, spread=1),
    )
    for name in ("get_data_parallel_world_size", "get_data_parallel_rank"):
        monkeypatch.setattr(datasets.mpu, name, lambda: 1)
    monkeypatch.setattr(datasets, "is_first_or_last_pipeline_stage", lambda stage: True)
    monkeypatch.setattr(datasets, "packed_shares", lambda shares, **of: shares)
    shares = datasets._packed(args, "train", object(), costs=None, vp_stage=None)
    assert shares._pack.keywords["grid"].window == expected


@pytest.mark.parametrize(("trains", "expected"), [(True, 2), (False, 4)])
def test_fixed_sequences_have_the_batch_size_of_an_evaluation(trains, expected, monkeypatch):
    """Every rank but the first of a group allocates what it receives."""
    from megatron_paradyse.train import gpt

    args = argparse.Namespace(
        micro_batch_size=2,
        eval_micro_batch_size=4,
        seq_length=8,
        create_attention_mask_in_dataloader=False,
        mtp_num_layers=None,
        pipeline_model_parallel_size=1,
    )
    names = ("is_pipeline_first_stage", "is_pipeline_last_stage", "get_tensor_model_parallel_group")
    ranks = {"get_tensor_model_parallel_rank": 1, "get_tensor_model_parallel_src_rank": 0}
    for name, value in (dict.fromkeys(names) | ranks).items():
        monkeypatch.setattr(gpt.mpu, name, lambda value=value: value)
    monkeypatch.setattr(gpt, "get_args", lambda: args)
    monkeypatch.setattr(gpt, "is_first_or_last_pipeline_stage", lambda stage: True)
    monkeypatch.setattr(
        gpt, "get_batch_on_this_tp_rank", lambda batch, **of: {"tokens": of["micro_batch_size"]}
    )
    with torch.set_grad_enabled(trains):
        assert gpt._fixed_batch(None, None)["tokens"] == expected


def on_one_rank(monkeypatch, args, tokenizer, *modules):
    """These modules read microbatches on one rank, without Megatron."""
    from megatron_paradyse.train import batch

    monkeypatch.setattr(torch.distributed, "broadcast", lambda *_, **__: None)
    for module in modules:
        monkeypatch.setattr(module, "get_args", lambda: args)
        monkeypatch.setattr(module, "count_lengths", lambda lengths, stage: None)
        monkeypatch.setattr(module, "is_first_or_last_pipeline_stage", lambda stage: True)
    monkeypatch.setattr(batch, "get_tokenizer", lambda: tokenizer)
    for name, value in {"rank": 0, "world_size": 1, "group": None, "src_rank": 0}.items():
        monkeypatch.setattr(
            batch.mpu, f"get_tensor_model_parallel_{name}", lambda value=value: value
        )


@pytest.mark.parametrize("asked", [False, True])
def test_nothing_is_predicted_from_an_end_of_document_where_it_is_masked(asked, monkeypatch):
    """As Megatron's GPTDataset: a .bin may hold texts that end within a document."""
    from megatron_paradyse.data.packed import PackedMicrobatch, Share
    from megatron_paradyse.train import batch, packed_batch

    args = argparse.Namespace(eod_mask_loss=asked, max_position_embeddings=8, paradyse_model="gpt")
    args.padded_vocab_size = 10
    on_one_rank(monkeypatch, args, argparse.Namespace(eod=9), batch, packed_batch)
    tokens = torch.tensor([[1, 9, 2, 3, 9], [4, 5, 9, 0, 0]])
    masks = [[1.0, 1 - asked, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]]
    read = batch.document_batch(iter([{"tokens": tokens, "lengths": torch.tensor([4, 2])}]))
    assert read["loss_mask"].tolist() == masks
    alone = PackedMicrobatch((4,), None, 4)
    both = torch.stack([tokens[0, :-1], tokens[0, 1:]]).int()
    step = packed_batch.PackedStep(iter([Share((alone,), both)]))
    assert step.read()["loss_mask"].tolist() == masks[:1]


class Copies(TorchFunctionMode):
    """What is copied into tensors of a device, and what the host waits for."""

    def __init__(self):
        self.copied, self.waits = [], []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_:
            self.copied.append((args[1].is_contiguous(), (kwargs or {}).get("non_blocking")))
        if func in (torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.__setitem__):
            self.waits.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_tokens_go_to_the_device_without_waiting(monkeypatch):
    """From the memory that the loader has pinned, in pieces that need no copy before."""
    from megatron_paradyse.data.packed import PackedMicrobatch, Share
    from megatron_paradyse.train import batch, packed_batch

    args = argparse.Namespace(eod_mask_loss=False, max_position_embeddings=8, paradyse_model="gpt")
    args.padded_vocab_size = 10
    on_one_rank(monkeypatch, args, None, batch, packed_batch)
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2, 1]])
    rows = tuple(PackedMicrobatch((length,), None, length) for length in (3, 4))
    step = packed_batch.PackedStep(iter([Share(rows, tokens.int())]))
    with Copies() as seen:
        read = [step.read() for _ in rows]
    assert [one["tokens"].tolist() for one in read] == [[[1, 2, 3]], [[4, 5, 6, 7]]]
    assert [one["labels"].tolist() for one in read] == [[[7, 6, 5]], [[4, 3, 2, 1]]]
    assert seen.copied == [(True, True)] * 4 and not seen.waits
    with Copies() as seen:
        read = batch.document_batch(iter([{"tokens": tokens, "lengths": torch.tensor([6, 6])}]))
    assert read["tokens"].tolist() == tokens[:, :-1].tolist()
    assert seen.copied == [(True, True)] * 2 and not seen.waits


def test_tokens_beyond_the_vocabulary_are_refused(monkeypatch):
    """The vocabulary-parallel embedding would take zeros for them."""
    from megatron_paradyse.data.packed import PackedMicrobatch, Share
    from megatron_paradyse.train import batch, packed_batch

    args = argparse.Namespace(eod_mask_loss=False, max_position_embeddings=8, paradyse_model="gpt")
    on_one_rank(monkeypatch, args, None, batch, packed_batch)
    tokens = torch.tensor([[1, 2, 3, 16, 4]])
    rows = torch.stack([tokens[0, :-1], tokens[0, 1:]]).int()
    share = Share((PackedMicrobatch((4,), None, 4),), rows)
    for args.padded_vocab_size, refused in ((17, False), (16, True)):
        said = "^the data have the token 16, and the vocabulary 16 ids: give the tokenizer or"
        with pytest.raises(UserError, match=said) if refused else contextlib.nullcontext():
            batch.document_batch(iter([{"tokens": tokens, "lengths": torch.tensor([4])}]))
        with pytest.raises(UserError, match=said) if refused else contextlib.nullcontext():
            packed_batch.PackedStep(iter([share]))


def test_a_tokenizer_without_an_end_of_document_masks_none(monkeypatch):
    """No token equals None, and all would be predicted in silence."""
    from megatron_paradyse.train import batch

    args = argparse.Namespace(eod_mask_loss=True, tokenizer_type="HuggingFaceTokenizer")
    on_one_rank(monkeypatch, args, argparse.Namespace(eod=None), batch)
    said = "^--eod-mask-loss with --tokenizer-type HuggingFaceTokenizer, whose tokenizer has no"
    with pytest.raises(UserError, match=said):
        batch.less_eod(torch.ones(1, 2), torch.tensor([[1, 2]]))


def test_a_bert_puts_tokens_of_the_vocabulary_in_place_of_others(monkeypatch):
    """No padding of the embedding, of which there is more on more ranks."""
    from megatron_paradyse.train import batch

    args = argparse.Namespace(
        paradyse_model="bert",
        paradyse_settings=Settings(mask_token=9),
        mask_prob=0.5,
        seed=1,
        vocab_size=None,
        padded_vocab_size=1000,
        max_position_embeddings=4096,
    )
    on_one_rank(monkeypatch, args, argparse.Namespace(vocab_size=10), batch)
    raw = {"tokens": torch.arange(2001)[None] % 9, "lengths": torch.tensor([2000])}
    assert sorted(set(batch.document_batch(iter([raw]))["tokens"].flatten().tolist())) == [
        *range(10)
    ]


def of_documents(order, *, global_batch_size=2, mmap_bin_files=True):
    """The arguments that a stream of documents reads."""
    return argparse.Namespace(
        seq_length=64,
        mmap_bin_files=mmap_bin_files,
        seed=1,
        global_batch_size=global_batch_size,
        step_batch_size_schedule=None,
        micro_batch_size=1,
        data_parallel_size=1,
        paradyse_settings=Settings(order=order),
    )


@pytest.mark.parametrize(("split", "group"), [("train", 4), ("valid", 1)])
def test_training_alone_takes_whole_groups_of_a_blend(split, group, tmp_path, monkeypatch):
    """An evaluation of one batch would be of one data set."""
    from megatron_paradyse.train import datasets

    said: list[str] = []
    monkeypatch.setattr(datasets, "print_rank_0", said.append)
    prefixes = [str(tmp_path / name) for name in "ab"]
    for name in "ab":
        write_documents(tmp_path / name, [20] * 40)
    args = of_documents("bucketed", global_batch_size=4)
    stream = datasets._stream(args, split, (prefixes, [1.0, 1.0], (0.0, 1.0)), 16)
    batches = [[stream._locate(4 * k + i)[0] for i in range(4)] for k in range(4)]
    assert all(len(set(batch)) == (1 if group == 4 else 2) for batch in batches)
    assert ("each global batch is of one data set" in said[0]) == (group == 4)


def test_a_data_set_of_weight_0_is_not_drawn_from(tmp_path):
    """Nor need it have a document in every split."""
    from megatron_paradyse.train import datasets

    for name, lengths in {"none": [1], "some": [20] * 4}.items():
        write_documents(tmp_path / name, lengths)
    prefixes = [str(tmp_path / name) for name in ("none", "some")]
    for order in ("shuffled", "bucketed"):
        source = (prefixes, [0.0, 1.0], (0.0, 1.0))
        stream = datasets._stream(of_documents(order), "train", source, 8)
        assert [stream.length(k) for k in range(8)] == [19] * 8


@pytest.mark.parametrize("mapped", [True, False])
def test_files_of_tokens_are_mapped_into_memory_unless_told(mapped, tmp_path):
    """--no-mmap-bin-files; the tokens are the same."""
    from megatron_paradyse.train import datasets

    write_documents(tmp_path / "corpus", [20, 30])
    args = of_documents("short-to-long", mmap_bin_files=mapped)
    stream = datasets._stream(args, "train", ([str(tmp_path / "corpus")], None, (0.0, 1.0)), 2)
    assert (type(stream._datasets[0]._indexed.bin_reader).__name__ == "_MMapBinReader") is mapped
    assert [len(stream.tokens(i)) for i in range(2)] == [20, 30]


def test_the_detector_of_stragglers_times_reading_and_the_forward_apart(monkeypatch):
    """--log-straggler reports of what was timed; without it the detector does nothing."""
    from megatron.core.utils import StragglerDetector

    from megatron_paradyse.train import gpt

    assert isinstance(gpt.stragglers, StragglerDetector)
    happened = []
    monkeypatch.setattr(
        gpt.stragglers, "start", lambda: happened.append(f"start, data {gpt.stragglers.bdata}")
    )
    monkeypatch.setattr(gpt.stragglers, "stop", lambda: happened.append("stop"))
    batch = dict.fromkeys(gpt.BATCH)
    monkeypatch.setattr(gpt, "get_attr_wrapped_model", lambda model, name: None)
    monkeypatch.setattr(gpt, "read_batch", lambda *of: happened.append("read") or batch)
    timer = argparse.Namespace(start=lambda: None, stop=lambda: None)
    monkeypatch.setattr(gpt, "get_timers", lambda: lambda *of, **how: timer)
    gpt.forward_step(None, lambda *of, **how: happened.append("forward"))
    assert happened[:3] == ["start, data True", "read", "stop"]
    assert happened[3].startswith("start") and happened[4:] == ["forward", "stop"]


def test_logged_losses_of_layers_are_means_over_packed_microbatches(monkeypatch):
    """Megatron divides their sums by the number of documents, and a step had 2 microbatches."""
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    from megatron_paradyse.train import packed_steps

    class Counter:
        num_micro_batches = 8

        def get(self):
            return self.num_micro_batches

    monkeypatch.setattr(packed_steps.calculator, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", Counter())
    monkeypatch.setattr(packed_steps, "PackedStep", lambda shares: [None] * 2)
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", {})
    experts = MoEMetricsTracker()
    monkeypatch.setattr(packed_steps, "get_moe_metrics_tracker", lambda: experts)

    def schedule(*, data_iterator, num_microbatches):
        losses = MTPLossLoggingHelper.tracker.setdefault("loss_values", torch.zeros(2))
        for _ in range(get_num_microbatches()):
            losses += torch.tensor([3.0, 5.0])
            experts.record("load_balancing_loss", torch.tensor(7.0), layer_number=2, num_layers=2)

    for step in (1, 2):  # a step that is run again adds to the first
        packed_steps.run_packed(schedule, data_iterator=None, num_microbatches=8)
        losses = MTPLossLoggingHelper.tracker["loss_values"] / get_num_microbatches()
        assert losses.tolist() == [3.0 * step, 5.0 * step]
        balance = experts.metrics["load_balancing_loss"].values / get_num_microbatches()
        assert balance.tolist() == [0.0, 7.0 * step]
