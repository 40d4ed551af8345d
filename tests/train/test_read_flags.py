"""What flags of Megatron mean for a run with --paradyse, where they are not refused."""

from __future__ import annotations

import argparse

import pytest

from megatron_paradyse.errors import UserError, errors_said
from megatron_paradyse.profiler.flags import megatron_flags
from megatron_paradyse.train import plugin
from tests.train.harness import write_documents
from tests.train.parsing import parsed, validated


@pytest.mark.parametrize(
    ("given", "kept"), [("8,0", (8, 0)), ("(8,-1)", (8, 0)), ("(8,3)", (8, 0)), ("(-1,0)", None)]
)
def test_a_window_is_what_transformer_engine_makes_of_it(given, kept, monkeypatch, tmp_path):
    """Causal whatever the second number; a negative one hides nothing."""
    write_documents(tmp_path / "corpus", [20] * 10)
    args = parsed(monkeypatch, "--window-size", given)
    args.data_path = [str(tmp_path / "corpus")]
    assert validated(args).window_size == kept


@pytest.mark.parametrize("interval", [None, 0])
@pytest.mark.parametrize("flag", ["--skip-train", "--full-validation"])
def test_where_no_evaluation_goes_by_an_interval_megatron_has_one(
    flag, interval, monkeypatch, tmp_path
):
    """It divides the iteration of a checkpoint by it; later starts learn what was given."""
    write_documents(tmp_path / "corpus", [20] * 10)
    args = parsed(monkeypatch, flag)
    args.eval_interval, args.data_path = interval, [str(tmp_path / "corpus")]
    assert 10**9 // validated(args).eval_interval == 0
    assert args.paradyse_instead_of["eval_interval"] is interval


def test_megatrons_data_are_made_as_all_its_flags_say(monkeypatch, tmp_path):
    """Every field of the configuration of its datasets that a flag of the same meaning sets."""
    plugin.install()
    from megatron_paradyse.train import gpt

    counts = tmp_path / "counts.json"
    counts.write_text('{"corpus": [8, 8]}')
    flags = ["--multiple-validation-sets", "--full-validation", "--allow-ambiguous-pad-tokens"]
    flags += ["--dataloader-fast-cache-load", "--dataloader-defer-npy-index-mmap"]
    flags += ["--object-storage-cache-path", "there", "--data-cache-path", "here"]
    args = parsed(monkeypatch, *flags, "--per-dataset-sequences-path", counts)
    args.data_parallel_size = 1
    monkeypatch.setattr(gpt, "build_tokenizer", lambda args: argparse.Namespace(vocab_size=64))
    blends = [(["corpus"], None), (["one", "other"], None), None]
    config = gpt._dataset_config(args, None, blends)
    assert config.multiple_validation_sets and config.full_validation
    assert config.allow_ambiguous_pad_tokens and config.object_storage_cache_path == "there"
    assert config.fast_cache_load and config.defer_npy_index_mmap
    assert config.sequences_per_dataset == {"corpus": [8, 8]}
    counts.unlink()
    with pytest.raises(UserError, match=r"^--per-dataset-sequences-path .*: give the JSON file"):
        gpt._dataset_config(args, None, blends)


def test_a_profile_leaves_out_schedules_of_learning_rate_batches_and_stages():
    schedules = ["--lr-warmup-iters", "2000", "--lr-decay-samples", "4000000"]
    schedules += ["--lr-warmup-samples=20000", "--step-batch-size-schedule", "0:1 64:2"]
    schedules += ["--phase-transition-iterations", "2,4", "--train-samples", "32"]
    schedules += ["--pipeline-model-parallel-layout", "E|tt|tt|L"]
    schedules += ["--decoder-first-pipeline-num-layers", "1"]
    schedules += ["--eval-global-batch-size", "2", "--eval-micro-batch-size", "2"]
    schedules += ["--lr-decay-style", "WSD", "--lr-wsd-decay-samples", "8", "--lr-warmup-init=1e-5"]
    schedules += ["--init-model-with-meta-device", "--moe-use-upcycling"]  # of checkpoints
    schedules += ["--overlap-param-gather-with-optimizer-step"]
    schedules += ["--num-distributed-optimizer-instances", "2"]
    plain = ["--num-layers", "4", "--vocab-size", "64", "--no-rope-freq", "[0,0,0,1]"]
    kept = megatron_flags([*plain, *schedules], model_path=None, ranks=1)
    assert kept == megatron_flags(plain, model_path=None, ranks=1)


@pytest.mark.parametrize("begin", ["error: ", "error (rank 3): "])
def test_the_words_of_a_failed_profile_are_found(begin):
    line = f"{begin}no room: error: full"
    assert errors_said([f"an {line}", line]) == ["no room: error: full"]


@pytest.mark.parametrize("schedule", ["0:4 1B:32 2B:16", "0:4,1B:0.032K, 2B:16", None])
def test_microbatches_in_flight_are_those_of_the_largest_batch(schedule):
    plugin.install()
    from megatron_paradyse.train import choosing

    args = argparse.Namespace(
        step_batch_size_schedule=schedule,
        seq_length=64,
        global_batch_size=4 if schedule else 32,
        micro_batch_size=2,
        data_parallel_size=2,
    )
    assert choosing._most_microbatches(args) == 8


@pytest.mark.parametrize(
    ("granularity", "method", "layers", "expected"),
    [
        (None, None, None, [False, False]),
        ("selective", None, None, [False, False]),
        ("full", "uniform", 1, [True, True]),
        ("full", "block", 1, [True, False]),
    ],
)
def test_a_plan_recomputes_what_megatron_does_not(granularity, method, layers, expected):
    plugin.install()
    from megatron_paradyse.hook import _recomputed_by_megatron

    config = argparse.Namespace(
        recompute_granularity=granularity, recompute_method=method, recompute_num_layers=layers
    )
    assert [_recomputed_by_megatron(config, place) for place in range(2)] == expected
