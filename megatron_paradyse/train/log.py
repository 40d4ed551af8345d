"""Adds lengths and tokens per second to Megatron's line per iteration, and writes the trace."""

from __future__ import annotations

import functools
import json
import sys
import time
from pathlib import Path

import torch
from megatron.core import mpu
from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer, training

from megatron_paradyse.train.batch import meter


class IterationLog:
    """Times train_step and extends, or replaces, the line that training_log prints."""

    def __init__(self, *, style: str, trace: str | None):
        """style: "megatron" appends to Megatron's line; "compact" prints a short one instead."""
        self._style = style
        self._trace = Path(trace) if trace else None
        self._step_seconds = 0.0
        self._interval = _Interval()

    def install(self) -> None:
        """Wrap train_step and training_log where Megatron's training loop looks them up."""
        training.train_step = self._timed(training.train_step)
        training.training_log = self._extended(training.training_log)

    def _timed(self, train_step):
        @functools.wraps(train_step)
        def timed(*args, **kwargs):
            start = time.perf_counter()
            result = train_step(*args, **kwargs)
            self._step_seconds = time.perf_counter() - start
            return result

        return timed

    def _extended(self, training_log):
        @functools.wraps(training_log)
        def extended(loss_dict, total_loss_dict, learning_rate, iteration, *args, **kwargs):
            tokens = kwargs.get("total_real_tokens_in_batch")
            if tokens is None:  # fixed lengths: Megatron's own line says it all
                return training_log(
                    loss_dict, total_loss_dict, learning_rate, iteration, *args, **kwargs
                )
            lengths = _range_over_replicas(meter.take())
            self._interval.add(int(tokens), lengths, self._step_seconds, loss_dict)
            self._record(iteration, loss_dict, int(tokens), lengths)
            print_line = training.print_rank_last
            training.print_rank_last = lambda line: _print_on_last_rank(self._line(line, iteration))
            try:
                return training_log(
                    loss_dict, total_loss_dict, learning_rate, iteration, *args, **kwargs
                )
            finally:
                training.print_rank_last = print_line

        return extended

    def _line(self, megatron_line: str, iteration: int) -> str:
        interval, self._interval = self._interval, _Interval()
        if self._style == "compact":
            return f"iteration {iteration}/{get_args().train_iters} | {interval.compact()}"
        return megatron_line + interval.extension()

    def _record(
        self, iteration: int, loss_dict: dict, tokens: int, lengths: tuple[int, int]
    ) -> None:
        """Scalars for TensorBoard and W&B, and a line of the trace, on the last rank."""
        scalars = {
            "paradyse/tokens": tokens,
            "paradyse/longest-sequence": lengths[1],
            "paradyse/tokens-per-second": tokens / self._step_seconds,
        }
        writer, wandb_writer = get_tensorboard_writer(), get_wandb_writer()
        if writer and iteration % get_args().tensorboard_log_interval == 0:
            for name, value in scalars.items():
                writer.add_scalar(name, value, iteration)
        if wandb_writer:
            wandb_writer.log(scalars, iteration)
        if self._trace and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            record = {
                "iteration": iteration,
                "tokens": tokens,
                "shortest_sequence_tokens": lengths[0],
                "longest_sequence_tokens": lengths[1],
                "seconds": round(self._step_seconds, 6),
                **{name: float(value) for name, value in loss_dict.items()},
            }
            with self._trace.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


def _print_on_last_rank(line: str) -> None:
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        sys.stdout.write(line + "\n")  # one write: ranks share the terminal
        sys.stdout.flush()


class _Interval:
    """What happened since the last printed line."""

    def __init__(self):
        self.iterations = 0
        self.tokens = 0
        self.shortest, self.longest = sys.maxsize, 0
        self.seconds = 0.0
        self.losses: list[float] = []

    def add(self, tokens: int, lengths: tuple[int, int], seconds: float, loss_dict: dict) -> None:
        self.iterations += 1
        self.tokens += tokens
        self.shortest = min(self.shortest, lengths[0])
        self.longest = max(self.longest, lengths[1])
        self.seconds += seconds
        self.losses.extend(float(value) for value in loss_dict.values())

    def extension(self) -> str:
        return (
            f" sequence lengths: {self.shortest} to {self.longest} | tokens: {self.tokens} |"
            f" tokens/s: {self.tokens / self.seconds:.1f} |"
        )

    def compact(self) -> str:
        loss = sum(self.losses) / len(self.losses) if self.losses else float("nan")
        return (
            f"lengths {self.shortest:,} to {self.longest:,}, {self.tokens:,} tokens | "
            f"loss {loss:.4f} | {self.seconds / self.iterations:.2f} s | "
            f"{self.tokens / self.seconds:,.0f} tokens/s"
        )


def _range_over_replicas(lengths: list[int]) -> tuple[int, int]:
    """The shortest and the longest sequence that any replica trained on."""
    shortest, longest = min(lengths), max(lengths)
    if mpu.get_data_parallel_world_size() == 1:
        return shortest, longest
    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    ends = torch.tensor([-shortest, longest], device=device)
    torch.distributed.all_reduce(
        ends, torch.distributed.ReduceOp.MAX, group=mpu.get_data_parallel_group()
    )
    negated, longest = ends.tolist()
    return -negated, longest
