"""What lines per iteration say of documents."""

from __future__ import annotations

import argparse

import pytest

from megatron_paradyse.errors import UserError
from megatron_paradyse.train import plugin


@pytest.mark.parametrize(
    ("interval", "expected"), [(1, [1, 1.5, 7]), (3, [1, 1.5, 10 / 3]), (2, [1, 1.5, 7])]
)
def test_operations_are_those_of_the_iterations_whose_seconds_they_are_divided_by(
    interval, expected, monkeypatch
):
    """Megatron's clock runs on after the line of the first iteration."""
    plugin.install()
    from megatron.training import training

    from megatron_paradyse.train import log

    args = argparse.Namespace(
        log_interval=interval, paradyse_settings=argparse.Namespace(sequences="documents")
    )
    monkeypatch.setattr(log, "get_args", lambda: args)
    monkeypatch.setattr(log.mpu, "get_data_parallel_world_size", lambda: 1)
    monkeypatch.setattr(
        training,
        "num_floating_point_operations",
        lambda args, batch_size, **of: of["total_real_tokens_in_batch"],
    )
    told = []
    monkeypatch.setattr(
        training,
        "training_log",
        lambda *of, **how: told.append(training.num_floating_point_operations(args, 4, **how)),
    )
    for name in ("train_step", "evaluate"):
        monkeypatch.setattr(training, name, lambda: None)
    log_of().install()
    for number, tokens in enumerate([1, 2, 7], start=1):
        lengths = {"seqlen_squared_sum_in_batch": 1, "total_real_tokens_in_batch": tokens}
        first = number == 1
        training.training_log({}, {}, 0.0, number, is_first_iteration=first, **lengths)
    assert told == pytest.approx(expected)


def log_of(style: str = "megatron", **given):
    """An IterationLog that nothing is told to but what is given."""
    plugin.install()
    from megatron_paradyse.train import log

    nothing = argparse.Namespace(take=list, add=lambda microbatches: None)
    parts = {"telemetry": nothing, "trace": None, "summary": nothing, "circumstances": dict}
    parts |= {"peak_by_file": lambda planned: None, "after": lambda *of: None}
    return log.IterationLog(style=style, **(parts | given))


def test_a_line_is_of_all_iterations_since_the_one_before():
    iterations = log_of()
    iterations._interval.add(300, (100, 200), 0.5, {"lm loss": 2.0})
    iterations._interval.add(700, (50, 150), 1.5, {"lm loss": 3.0})
    means = "lengths 50 to 200, 1,000 tokens | loss 2.5000 | 1.00 s | 500 tokens/s"
    assert iterations._interval.compact() == means
    told = " sequence lengths: 50 to 200 | tokens: 1000 | tokens/s: 500.0 |"
    assert iterations._line("Megatron's |", 2) == f"Megatron's |{told}"
    iterations._interval.add(64, (64, 64), 0.5, {"lm loss": 2.0})
    assert iterations._line("", 3).endswith("64 to 64 | tokens: 64 | tokens/s: 128.0 |")


@pytest.mark.parametrize("style", ["compact", "megatron"])
def test_the_short_line_is_there_for_sequences_of_one_length_too(style, monkeypatch, capsys):
    """It was passed over with --paradyse-sequences fixed."""
    iterations = log_of(style)
    from megatron.training import training

    from megatron_paradyse.train import log

    args = argparse.Namespace(log_interval=1, train_iters=9, seq_length=64, micro_batch_size=2)
    args.paradyse_settings, args.data_parallel_size = argparse.Namespace(sequences="fixed"), 2
    monkeypatch.setattr(log, "get_args", lambda: args)
    monkeypatch.setattr(log, "get_num_microbatches", lambda: 4)
    monkeypatch.setattr(log, "get_tensorboard_writer", lambda: None)
    monkeypatch.setattr(log, "get_wandb_writer", lambda: None)
    monkeypatch.setattr(log.torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(log.torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(training, "print_rank_last", print)
    iterations._step_seconds = 0.5
    extended = iterations._extended(lambda *of, **how: training.print_rank_last("Megatron's"))
    for number in (1, 2):
        extended({"lm loss": 2.0}, {}, 0.0, number, total_real_tokens_in_batch=None)
    said = "| length 64, 1,024 tokens | loss 2.0000 | 0.50 s | 2,048 tokens/s"
    short = [f"iteration {number}/9 {said}" for number in (1, 2)]
    told = capsys.readouterr().out.splitlines()
    assert told == (short if style == "compact" else ["Megatron's"] * 2)


def test_scalars_of_an_iteration_are_its_microbatches_together(monkeypatch):
    iterations = log_of()
    from megatron_paradyse.hook import Planned
    from megatron_paradyse.plan import uniform_plan
    from megatron_paradyse.train import log
    from megatron_paradyse.train.telemetry import Microbatch

    written = {}
    writer = argparse.Namespace(add_scalar=lambda name, value, at: written.update({name: value}))
    monkeypatch.setattr(log, "get_tensorboard_writer", lambda: writer)
    monkeypatch.setattr(log, "get_wandb_writer", lambda: None)
    monkeypatch.setattr(log, "get_args", lambda: argparse.Namespace(tensorboard_log_interval=2))
    planned = Planned(1, 0, 1, 64, uniform_plan((1,), "metp"), 2e-6, 1.5)
    microbatches = [
        Microbatch(planned, switched=True, marks=[0.0, 1.0, 5.0, 5.5]),
        Microbatch(planned, switched=False, marks=[1.0, 2.0, 3.0, 5.0]),
    ]
    clock = argparse.Namespace(perf_counter=iter([10.0, 10.5]).__next__)
    monkeypatch.setattr(log, "time", clock)
    iterations._timed(lambda: [None, 0, 0, False, 0])()
    values = {"tokens": 90, "longest_sequence_tokens": 64}
    iterations._write_scalars(1, values, microbatches)
    assert not written  # by --tensorboard-log-interval
    iterations._write_scalars(2, values, microbatches)
    assert written == pytest.approx(
        {
            "paradyse/switches": 1,
            "paradyse/planner-microseconds": 4,
            "paradyse/tokens": 90,
            "paradyse/tokens-per-second": 180,
            "paradyse/longest-sequence": 64,
            "paradyse/predicted-layer-seconds": 3,
            "paradyse/layer-seconds": 4.5,
        }
    )


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("Unexpected result nan (message='found NaN')"), "the loss is not a number"),
        (RuntimeError("shapes differ"), "shapes differ"),
    ],
)
def test_a_step_that_fails_says_a_line_where_it_is_known(error, said, monkeypatch):
    iterations = log_of()
    from megatron_paradyse.train import unexpected

    args = argparse.Namespace(curr_iteration=6, check_for_spiky_loss=False)
    monkeypatch.setattr(unexpected, "get_args", lambda: args)

    def step():
        raise error

    known = said not in str(error)
    with pytest.raises(UserError if known else RuntimeError, match=said):
        iterations._timed(step)()


@pytest.mark.parametrize("reason", ["Unexpected result nan (message='found NaN')", "another"])
def test_a_loss_of_an_evaluation_that_is_no_number_is_one_line(reason, monkeypatch):
    plugin.install()
    from megatron_paradyse.train import log, unexpected

    def evaluate():
        raise RuntimeError(reason)

    args = argparse.Namespace(curr_iteration=6, check_for_spiky_loss=False)
    monkeypatch.setattr(unexpected, "get_args", lambda: args)
    said = r"^the loss is not a number in the evaluation after iteration 7 \(found NaN\): "
    known = reason != "another"
    with pytest.raises(UserError if known else RuntimeError, match=said if known else reason):
        log._in_one_line(evaluate)()


@pytest.mark.parametrize(
    ("tokens", "lengths", "begins"),
    [
        (300, (100, 200), "lengths 100 to 200, 300 tokens | loss 2.0000 | 0.50 s"),
        (2048, (1024, 1024), "length 1,024, 2,048 tokens | loss"),
        (1, (1, 1), "length 1, 1 token | loss"),
    ],
)
def test_one_length_is_no_range(tokens, lengths, begins):
    plugin.install()
    from megatron_paradyse.train.log import _Interval

    interval = _Interval()
    interval.add(tokens, lengths, 0.5, {"lm loss": 2.0})
    assert interval.compact().startswith(begins)


@pytest.mark.parametrize(
    ("others", "ends"), [(0, "; 1 x b"), (1, "; 1 more plan"), (2, "2 more plans")]
)
def test_plans_beyond_two_are_counted(others, ends):
    plugin.install()
    from megatron_paradyse.train.log import _Interval

    interval = _Interval()
    interval.add(64, (64, 64), 0.5, {"lm loss": 2.0})
    interval.plans.update("aab" + "cd"[:others])
    assert interval.compact().endswith(ends)


def test_what_ran_out_of_memory_is_told_where_its_trace_cannot_be(tmp_path, monkeypatch):
    """A full disk was all that the job ended with, and the next start learnt nothing."""
    plugin.install()
    from megatron_paradyse.hook import Planned
    from megatron_paradyse.plan import uniform_plan
    from megatron_paradyse.train import memory_record, trace
    from megatron_paradyse.train.telemetry import Microbatch

    for name in ("data_parallel", "pipeline_model_parallel"):
        monkeypatch.setattr(trace.mpu, f"get_{name}_world_size", lambda: 1)
    monkeypatch.setattr(memory_record, "get_args", lambda: argparse.Namespace(save=str(tmp_path)))
    monkeypatch.setattr(memory_record, "grid", lambda: ["a device", 1, 1])
    planned = Planned(6, 0, 1, 64, uniform_plan((1, 2), "metp"), 1e-6, 1.0, 1 << 20)
    telemetry = argparse.Namespace(
        current=Microbatch(planned, switched=False), live_peak_bytes=lambda: 1 << 21
    )
    iterations = log_of(telemetry=telemetry, trace=trace.Trace("/dev/full"))
    said = str(iterations._out_of_memory(MemoryError("2 MiB")))
    assert said.startswith("out of memory at iteration 7, s=64, b=1, plan 1-2 metp, predicted peak")
    assert said.endswith(": 2 MiB: start again with this --save, which lowers the budget")
    assert (tmp_path / memory_record.NAME).read_text().count('"peak_bytes": 2097152') == 1
