"""Bad input: one line that names the value and the remedy, exit code not 0, no rank left over."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from tests.train.harness import attempt, data_flags, run_bounded, train_under_torchrun

TP2 = ["--tensor-model-parallel-size", 2, "--sequence-parallel"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return data_flags(tmp_path_factory.mktemp("data"), [20] * 10 + [200])


CASES = {
    "unknown flag": (["--paradise"], "unknown flag --paradise: did you mean --paradyse?"),
    "tp and heads": (
        ["--tensor-model-parallel-size", 2, "--sequence-parallel", "--num-attention-heads", 7],
        "--num-attention-heads 7 is not divisible by --tensor-model-parallel-size 2: "
        "use --tensor-model-parallel-size 1",
    ),
    "sequence parallel off": (
        ["--tensor-model-parallel-size", 2],
        "--paradyse with --tensor-model-parallel-size 2 needs --sequence-parallel: add it",
    ),
    "fewer ranks than tp": (
        ["--tensor-model-parallel-size", 4, "--sequence-parallel"],
        "the number of ranks, 2, is no multiple of --tensor-model-parallel-size 4 times "
        "--pipeline-model-parallel-size 1: start 4 or a multiple (--nproc-per-node of torchrun, "
        "--nproc of a profile), or change these flags",
    ),
    "no files of a tokenizer": (
        [*TP2, "--tokenizer-type", "HuggingFaceTokenizer"],
        "the tokenizer HuggingFaceTokenizer cannot be built (AssertionError: Tokenizer path must "
        "be specified.): give data that 'megatron-paradyse data prepare' wrote",
    ),
    "missing data": (
        [*TP2, "--data-path", "/nowhere/corpus"],
        "data file /nowhere/corpus.idx not found: give the prefix",
    ),
    "too long": (
        [*TP2, "--paradyse-long-documents", "refuse"],
        "corpus has 200 tokens, --seq-length 64 takes 65: raise --seq-length",
    ),
    "budget of nothing": (
        [*TP2, "--paradyse-memory-budget", "5"],
        "just asked for (not in a training step): give more memory or a smaller model",
    ),
    "no share": ([*TP2, "--split", "0,0,0"], "--split 0,0,0: give the shares of training"),
    "shares in words": ([*TP2, "--split", "all"], "--split all: give the shares of training"),
    "a share below 0": ([*TP2, "--split", "90,-5,5"], "--split 90,-5,5: give the shares of"),
    "no iteration": ([*TP2, "--train-iters", 0], "--train-iters 0 trains nothing: give 1 or more"),
    "no length": ([*TP2, "--seq-length", "-64"], "--seq-length -64: give the longest sequence"),
    "policy": ([*TP2, "--paradyse-policy", "fixed:megatron"], "no strategy named 'megatron': use"),
    "packed only": (
        [*TP2, "--paradyse-policy", "fixed:local_z"],
        "local_z runs packed documents only: give --paradyse-sequences packed",
    ),
    "no offload without a choice": (
        [*TP2, "--paradyse-no-offload"],
        "--paradyse-no-offload has no effect with --paradyse-policy fixed:megatron_ts",
    ),
    "packed only, drawn": (
        [*TP2, "--paradyse-policy", "random:1", "--paradyse-strategies", "local_z,metp"],
        "local_z runs packed documents only: give --paradyse-sequences packed",
    ),
    "no effect": (
        [*TP2, "--paradyse-smoothing", "0.1"],
        "--paradyse-smoothing has no effect with --paradyse-policy fixed:megatron_ts",
    ),
    "strategies of no choice": (
        [*TP2, "--paradyse-strategies", "metp"],
        "--paradyse-strategies has no effect with --paradyse-policy fixed:megatron_ts, which names",
    ),
    "all logits wanted": (
        [*TP2, "--config-logger-dir", "/tmp/logits"],
        "--config-logger-dir writes all logits, which the loss head in tiles never has: leave it "
        "out, or give --paradyse-head-tile off",
    ),
    "budget of nothing packed": (
        [*TP2, "--paradyse-pack-tokens", "4K"],
        "--paradyse-pack-tokens 4096 with --paradyse-sequences documents: leave it out, or give "
        "--paradyse-sequences packed",
    ),
    "no budget to pack by": (
        [*TP2, "--paradyse-sequences", "packed"],
        "--paradyse-sequences packed with --paradyse-policy fixed:megatron_ts, which predicts no "
        "seconds: give --paradyse-pack-tokens, such as 64K",
    ),
    "packed rows and a batch": (
        [*TP2, "--paradyse-sequences", "packed", "--paradyse-pack-tokens", "4K"],
        "--micro-batch-size 2 with --paradyse-sequences packed, whose microbatches are one row "
        "each: give --micro-batch-size 1",
    ),
    "vocabulary of other data": (
        [*TP2, "--vocab-size", 10, "--make-vocab-size-divisible-by", 1],
        ", and the vocabulary 10 ids: give the tokenizer or the --vocab-size that they were",
    ),
    "warm-up": (
        [*TP2, "--lr-warmup-iters", 4],
        "--lr-warmup-iters 4 with a learning rate of 4 iters: give fewer, or more --train-iters or "
        "--lr-decay-iters",
    ),
    "megatron's own check of layers": (
        [*TP2, "--position-embedding-type", "rope", "--no-rope-freq", 3],
        "Megatron refuses these flags: no_rope_freq=3 should be divisible by num_layers=4",
    ),
    "megatron's own check": (
        [*TP2, "--lr", "1e-3", "--min-lr", "1"],
        "): --min-lr 1.0, --lr 0.001",
    ),
    "megatron's division by zero": (
        [*TP2, "--num-attention-heads", 0],
        "Megatron refuses these flags: assert args.hidden_size % args.num_attention_heads == 0",
    ),
}


UNDER_TORCHRUN = ("too long",)  # where process groups exist and every rank has an error


@pytest.mark.parametrize("case", CASES)
def test_training_refuses_with_one_line_and_leaves_no_rank(case, data, tmp_path):
    flags, message = CASES[case]
    if case in UNDER_TORCHRUN:
        run = train_under_torchrun(*data, *flags, ranks=2, timeout_seconds=120)
    else:
        run = attempt(tmp_path, *data, *flags, ranks=2)
    assert run.code not in (0, 124)  # 124: a rank was left, and ended at the limit
    errors = [line for line in run.stderr.splitlines() if line.startswith("error")]
    assert len(errors) == 1 and message in errors[0], run.stderr[-3000:]
    # torchrun, in its own process, reports by a traceback that a rank failed; no rank prints one
    files = re.findall(r'File "([^"]+)", line', run.stderr + run.stdout)
    assert all("torch/distributed/" in file or file == "<frozen runpy>" for file in files)


def test_no_data_are_said_before_costs_are_measured(tmp_path):
    run = attempt(tmp_path, "--paradyse", "--paradyse-policy", "optimal", ranks=1)
    errors = [line for line in run.stderr.splitlines() if line.startswith("error")]
    assert run.code == 2 and len(errors) == 1 and "no data: give --data-path PREFIX" in errors[0]
    assert "measuring" not in run.stdout


def test_unknown_yaml_key_is_named_with_its_line(data, tmp_path):
    config = tmp_path / "paradyse.yaml"
    config.write_text("policy: fixed:megatron_ts\npolizy: fixed:metp\n")
    code, stderr = start(tmp_path, *data, "--paradyse-config", config, ranks=1)
    assert code not in (0, 124)
    assert f"{config}:2: unknown key 'polizy': did you mean policy? known are" in stderr


def test_debug_shows_the_traceback(data, tmp_path):
    code, stderr = start(tmp_path, *data, "--paradise", "--paradyse-debug", ranks=1)
    assert code not in (0, 124)
    assert "Traceback" in stderr and "UserError" in stderr


OF_ANOTHER_RUN = {
    "schedule": (
        {"--train-iters": 3},
        "for total number of iterations do not match: give --override-opt-param-scheduler",
    ),
    "heads": (
        {"--num-attention-heads": 4},
        "not equal to the input argument value (4): give the flags that it was trained with",
    ),
    "shape": (
        {"--ffn-hidden-size": 128},
        "for key decoder.layers.mlp.linear_fc1.weight: give the flags that it was trained with",
    ),
}


@pytest.fixture(scope="module")
def saved(data, tmp_path_factory):
    """A checkpoint of one layer and two iterations."""
    folder = tmp_path_factory.mktemp("saved")
    flags = ["--num-layers", 1, "--train-iters", 2, "--ffn-hidden-size", 64, "--save", folder]
    code, stderr = start(folder, *data, *flags, "--save-interval", 2, ranks=1)
    assert code == 0, stderr[-3000:]
    return folder


@pytest.mark.parametrize("case", OF_ANOTHER_RUN)
def test_a_checkpoint_of_another_run_is_not_taken_for_a_broken_one(case, data, saved, tmp_path):
    flags, message = OF_ANOTHER_RUN[case]
    same = {"--num-layers": 1, "--train-iters": 2, "--ffn-hidden-size": 64, "--load": saved}
    given = [text for pair in (same | flags).items() for text in pair]
    code, stderr = start(tmp_path, *data, *given, ranks=1)
    errors = [line for line in stderr.splitlines() if line.startswith("error")]
    assert code == 2 and len(errors) == 1 and message in errors[0], stderr[-3000:]


def test_another_learning_rate_than_the_checkpoint_s_is_told_with_what_helps(data, saved, tmp_path):
    """Megatron looks groups of parameters up by it, and says which it did not find."""
    same = [*data, "--num-layers", 1, "--train-iters", 2, "--ffn-hidden-size", 64, "--lr", 3e-4]
    same += ["--override-opt-param-scheduler", "--load"]
    remedy = "give the --lr and --min-lr that it was trained with"
    code, stderr = start(tmp_path / "plain", *same, saved, ranks=1)
    assert code == 2 and f"in loaded checkpoint: {remedy}" in stderr, stderr[-3000:]
    dist = tmp_path / "dist"
    saving = ["--finetune", "--no-load-optim", DISTRIBUTED, "--save-interval", 2, "--save", dist]
    assert start(tmp_path / "save", *same, saved, *saving, ranks=1)[0] == 0
    code, stderr = start(tmp_path / "other", *same, dist, DISTRIBUTED, "--lr", 2e-4, ranks=1)
    assert code == 2 and f"False): {remedy}" in stderr, stderr[-3000:]


DISTRIBUTED, RESHARDABLE = "--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"


def test_states_of_another_optimizer_or_grid_are_told_with_what_helps(data, saved, tmp_path):
    def runs(name, *flags, ranks=1, load=saved):
        same = [*data, "--num-layers", 1, "--train-iters", 2, "--ffn-hidden-size", 64]
        return start(tmp_path / name, *same, "--load", load, *flags, ranks=ranks)

    def refused(said, *of, **options):
        code, stderr = runs(*of, **options)
        assert code == 2 and f"{said}, or --no-load-optim" in stderr, stderr[-3000:]
        errors = [line for line in stderr.splitlines() if line.startswith("error")]
        assert len(errors) == 1 and "Please" not in errors[0]

    own = "give the optimizer that it was trained with (--optimizer, --use-distributed-optimizer)"
    refused(own, "distributed", DISTRIBUTED)
    refused(own, "distributed-tp2", DISTRIBUTED, *TP2, ranks=2)
    dist, whole = tmp_path / "dist", tmp_path / "whole"
    without = ["--no-load-optim", "--finetune", DISTRIBUTED, "--save-interval", 2, "--save", dist]
    assert runs("save", *without)[0] == 0
    refused(own, "plain", load=dist)
    grid = f"load it on the grid that it was trained on and save it with {RESHARDABLE}"
    refused(grid, "tp2", DISTRIBUTED, *TP2, ranks=2, load=dist)
    more = [DISTRIBUTED, RESHARDABLE, "--override-opt-param-scheduler"]
    again = ["--train-iters", 4, "--save-interval", 2, "--save", whole]
    assert runs("resave", *more, *again, load=dist)[0] == 0
    assert runs("loaded", *more, *TP2, "--train-iters", 5, ranks=2, load=whole)[0] == 0


def start(folder, *flags, ranks):
    """The exit code and stderr of a training on forked ranks."""
    run = attempt(folder, *flags, ranks=ranks)
    return run.code, run.stderr


HELPER = """
import multiprocessing, sys
from megatron_paradyse.errors import UserError
from megatron_paradyse.train.uncaught import show_user_errors_in_one_line

if __name__ == "__main__":
    show_user_errors_in_one_line()
    helper = multiprocessing.get_context("spawn").Manager()  # as Megatron's checkpoints have one
    print(helper._process.pid, flush=True)
    raise UserError("enough: stop")
"""


def test_an_error_leaves_no_helper_process(tmp_path):
    script = tmp_path / "helper.py"
    script.write_text(HELPER)
    code, stdout, stderr = run_bounded([sys.executable, str(script)], timeout_seconds=60)
    assert code == 2 and stderr.strip() == "error: enough: stop"
    deadline = time.monotonic() + 10
    while Path(f"/proc/{int(stdout)}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{int(stdout)}").exists()
