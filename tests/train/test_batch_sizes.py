"""Global batches that cannot run are refused before the first of them, not as each is reached."""

from __future__ import annotations

import argparse

import pytest

from megatron_paradyse.errors import UserError
from megatron_paradyse.settings import PACKED, Settings
from megatron_paradyse.train import plugin
from tests.train.harness import attempt

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


INTERLEAVED = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
PACKED_STAGES = {**INTERLEAVED, "micro_batch_size": 1, "eval_micro_batch_size": 1}
PACKED_STAGES["paradyse_settings"] = Settings(sequences=PACKED)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"global_batch_size": 6}, "--global-batch-size: 6 .* multiple of 4$"),
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
