"""Global batches that cannot run are refused before the first of them, not as each is reached."""

from __future__ import annotations

import argparse
import itertools
import re

import numpy as np
import pytest

from megatron_paradyse.errors import UserError
from megatron_paradyse.settings import PACKED, Settings
from megatron_paradyse.train import plugin
from tests.train.harness import attempt, data_flags, train

SCHEDULE = "--step-batch-size-schedule"


@pytest.fixture(autouse=True)
def installed():
    plugin.install()


def run_of(**more):
    """Arguments of a run of 2 replicas, as Megatron has validated them."""
    of = {"rampup_batch_size": None, "step_batch_size_schedule": None, "seq_length": 64}
    of |= {"global_batch_size": 8, "micro_batch_size": 2, "consumed_train_samples": 0}
    of |= {"eval_global_batch_size": 8, "eval_micro_batch_size": 2, "eval_iters": 1}
    of |= {"skip_train": False, "decrease_batch_size_if_needed": False, "data_parallel_size": 2}
    of |= {"train_samples": None}
    of |= {"pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None}
    of |= {"microbatch_group_size_per_vp_stage": None, "paradyse_settings": Settings()}
    return argparse.Namespace(**of | more)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("0:2 128", "Invalid schedule entry"),
        ("0:2 x:4", "could not convert"),
        ("0:2 inf:4", "cannot convert float infinity"),
        ("640:2 1280:4", "first schedule entry must have threshold 0"),
        ("0:2 10:4", "strictly increasing"),  # 10 tokens are no document of 64
        ("0:0 128:2", "must be positive"),
        (" ", "at least one entry"),
        ("0:4 256:2", "let them grow"),
    ],
)
def test_a_schedule_that_cannot_be_followed_is_one_line(given, why):
    from megatron_paradyse.train.batch_sizes import check_schedule_of_sizes

    with pytest.raises(UserError, match=f"^{SCHEDULE} '{given}': .*{why}"):
        check_schedule_of_sizes(run_of(step_batch_size_schedule=given))
    check_schedule_of_sizes(run_of(step_batch_size_schedule="0:4 256:4, 1B:0.032K"))
    check_schedule_of_sizes(run_of())


def test_a_schedule_of_batches_that_may_be_made_smaller_is_one_line():
    """Megatron has a traceback for it."""
    from megatron_paradyse.train.batch_sizes import check_schedule_of_sizes

    args = run_of(step_batch_size_schedule="0:4", decrease_batch_size_if_needed=True)
    with pytest.raises(UserError, match=f"^{SCHEDULE} '0:4' with --decrease-batch-size-if-needed"):
        check_schedule_of_sizes(args)


@pytest.mark.parametrize("begun", [0, 1, 3, 9])
@pytest.mark.parametrize("given", ["0:4", "0:2 192:4 640:6", "0:6 64:8 704:10 768:12"])
def test_batches_start_where_megatron_counts_them(given, begun):
    """From the first, or from where a run stopped after so many; sizes also change within one."""
    from megatron.core.num_microbatches_calculator import (
        StepBatchsizeNumMicroBatchesCalculator as Calculator,
    )

    from megatron_paradyse.train.batch_sizes import batch_sizes

    calculator = Calculator(2, 1, False, 1, given, 64)
    expected, sizes, consumed = [], [], 0
    for _ in range(12):
        calculator.update(consumed, consistency_check=True)
        expected.append(consumed)
        sizes.append(2 * calculator.get())
        consumed += sizes[-1]
    made = batch_sizes(run_of(step_batch_size_schedule=given))
    assert [*itertools.islice(made.starts(expected[begun]), 12 - begun)] == expected[begun:]
    assert [*made.starts(expected[begun], expected[-1])] == expected[begun:-1]
    assert [made.at(first) for first in expected] == sizes
    assert [made.count(expected[begun], at) for at in expected[begun:]] == [*range(12 - begun)]


def test_a_batch_that_is_made_smaller_is_a_multiple_of_what_replicas_take_at_once():
    from megatron_paradyse.train.batch_sizes import batch_sizes

    made = batch_sizes(run_of(global_batch_size=11, decrease_batch_size_if_needed=True))
    assert [*made.starts(8, 24)] == [8, 16] and made.at(8) == 8


INTERLEAVED = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
PACKED_STAGES = {**INTERLEAVED, "micro_batch_size": 1, "eval_micro_batch_size": 1}
PACKED_STAGES["paradyse_settings"] = Settings(sequences=PACKED)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"global_batch_size": 6}, "--global-batch-size: 6 .* multiple of 4$"),
        ({"global_batch_size": 3, "decrease_batch_size_if_needed": True}, ": 3 .* multiple of 4$"),
        ({"eval_global_batch_size": 6}, "--eval-global-batch-size: 6 .* multiple of 4$"),
        ({**INTERLEAVED, "global_batch_size": 4}, "--global-batch-size: 4 .* multiple of 8$"),
        ({**INTERLEAVED, "global_batch_size": 12}, "--global-batch-size: 12 .* multiple of 8$"),
        ({**INTERLEAVED, "eval_global_batch_size": 4}, "--eval-global-.*: 4 .* multiple of 8$"),
        ({**INTERLEAVED, "microbatch_group_size_per_vp_stage": 3}, ": 8 .* multiple of 12$"),
        ({**PACKED_STAGES, "global_batch_size": 2}, ": 2 .* multiple of 4$"),
        ({**PACKED_STAGES, "eval_global_batch_size": 6}, "--eval-global-.*: 6 .* multiple of 4$"),
    ],
)
def test_a_batch_that_does_not_come_out_is_refused(more, said):
    from megatron_paradyse.train.batch_sizes import check_one_size

    with pytest.raises(UserError, match=said):
        check_one_size(run_of(**more))


@pytest.mark.parametrize(
    "more",
    [
        INTERLEAVED,
        {**INTERLEAVED, "global_batch_size": 20, "microbatch_group_size_per_vp_stage": 3}
        | {"eval_global_batch_size": 12},
        {**PACKED_STAGES, "global_batch_size": 4},
        {"global_batch_size": 6, "decrease_batch_size_if_needed": True},
        {"global_batch_size": 6, "skip_train": True},
        {"eval_global_batch_size": 6, "eval_iters": 0},
        {"global_batch_size": 6, "step_batch_size_schedule": "0:8"},
    ],
)
def test_what_megatron_runs_is_not_refused(more):
    """Three microbatches at a time and two at the end; as many packed ones as documents."""
    from megatron_paradyse.train.batch_sizes import check_one_size

    check_one_size(run_of(**more))


@pytest.mark.parametrize(("consumed", "size"), [(0, 6), (3, 6), (4, 10), (19, 10), (20, None)])
def test_sizes_that_are_past_may_have_run_on_fewer_replicas(consumed, size):
    from megatron_paradyse.train.batch_sizes import check_sizes_ahead

    given = f"0:6 {4 * 64}:10 {20 * 64}:12"
    args = run_of(step_batch_size_schedule=given, consumed_train_samples=consumed)
    if size is None:
        check_sizes_ahead(args)
        return
    with pytest.raises(UserError, match=f"^{SCHEDULE}: {size} samples .* multiple of 4$"):
        check_sizes_ahead(args)


@pytest.mark.parametrize("given", ["0:2 256:3", "0:1 256:4"])
def test_training_does_not_begin_with_a_schedule_that_would_end_it(given, tmp_path):
    """Nor where Megatron's own words for its first batch would be a traceback."""
    flags = ["--paradyse", "--paradyse-sequences", "fixed", "--mock-data", "--micro-batch-size", 2]
    run = attempt(tmp_path, *flags, SCHEDULE, given, ranks=1)
    assert run.code == 2 and run.stderr.count("error") == 1 and "Traceback" not in run.stderr
    assert f"error: {SCHEDULE}: " in run.stderr and not run.records


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    lengths = np.random.default_rng(7).integers(2, 60, size=120).tolist()
    return [*data_flags(tmp_path_factory.mktemp("data"), lengths), "--lr", "1e-3",
            "--micro-batch-size", 1, "--seq-length", 64]  # fmt: skip


PACKED_ROWS = ["--paradyse-sequences", "packed", "--paradyse-pack-tokens", 64]
MODELS = {"module": [], "bert": ["--paradyse-mask-token", 63]}


@pytest.mark.parametrize("entry", MODELS)
def test_packed_batches_grow_as_documents_one_by_one_do(entry, data, tmp_path):
    """From a checkpoint of one rank, before the size grows."""
    saved, more = tmp_path / "saved", [*data, *MODELS[entry], SCHEDULE, f"0:4 {12 * 64}:8"]
    more += ["--train-samples", 36]
    save = ["--save", saved, "--save-interval", 2]
    alone = train(tmp_path / "alone", *more, *save, ranks=1, entry=(entry,))
    (saved / "latest_checkpointed_iteration.txt").write_text("2")
    grid = ["--tensor-model-parallel-size", 2, "--sequence-parallel", "--num-workers", 1]
    packed = [*more, *PACKED_ROWS, *grid, "--load", saved]
    run = train(tmp_path / "packed", *packed, ranks=4, entry=(entry,))
    for name in ("loss", "grad_norm", "tokens"):
        np.testing.assert_allclose(run.values(name), alone.values(name)[2:], rtol=1e-5)
    counts = [int(count) for count in re.findall(r"consumed samples: +(\d+)", run.stdout)]
    assert counts == [12, 20, 28, 36]


def test_packed_batches_are_made_smaller_as_megatron_does(data, tmp_path):
    """Of 9 documents on two replicas 8 are trained on, and the ninth is the next batch's first."""
    data = [*data, "--lr-decay-style", "constant"]  # else it ends after 4 x 9 documents, or 4 x 8
    eight = train(tmp_path / "eight", *data, "--global-batch-size", 8, ranks=1)
    nine = ["--global-batch-size", 9, "--decrease-batch-size-if-needed", *PACKED_ROWS]
    run = train(tmp_path / "nine", *data, *nine, "--eval-global-batch-size", 8, ranks=2)
    for name in ("loss", "grad_norm", "tokens"):
        np.testing.assert_allclose(run.values(name), eight.values(name), rtol=1e-5)
