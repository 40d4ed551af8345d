"""Adds lengths and tokens per second to Megatron's line per iteration, and writes the trace."""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path

import torch
from megatron.core import mpu
from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer, training

from megatron_paradyse.train.batch import meter


class IterationLog:
    """Times train_step and extends what training_log prints."""

    def __init__(self, trace: str | None):
        self._trace = Path(trace) if trace else None
        self._seconds = 0.0
        self._tokens = 0.0
        self._longest = 0
        self._logged = (0.0, 0.0, 0)

    def install(self) -> None:
        """Wrap train_step and training_log where Megatron's training loop looks them up."""
        training.train_step = self._timed(training.train_step)
        training.training_log = self._extended(training.training_log)

    def _timed(self, train_step):
        @functools.wraps(train_step)
        def timed(*args, **kwargs):
            start = time.perf_counter()
            result = train_step(*args, **kwargs)
            self._last_seconds = time.perf_counter() - start
            self._seconds += self._last_seconds
            return result

        return timed

    def _extended(self, training_log):
        @functools.wraps(training_log)
        def extended(loss_dict, total_loss_dict, learning_rate, iteration, *args, **kwargs):
            tokens = kwargs.get("total_real_tokens_in_batch")
            if tokens is None:
                return training_log(
                    loss_dict, total_loss_dict, learning_rate, iteration, *args, **kwargs
                )
            longest = _longest_over_replicas(meter.take())
            self._tokens += tokens
            self._longest = max(self._longest, longest)
            self._record(iteration, loss_dict, tokens, longest)
            print_line = training.print_rank_last
            training.print_rank_last = lambda line: print_line(self._extend(line))
            try:
                return training_log(
                    loss_dict, total_loss_dict, learning_rate, iteration, *args, **kwargs
                )
            finally:
                training.print_rank_last = print_line

        return extended

    def _extend(self, line: str) -> str:
        rate = self._tokens / self._seconds if self._seconds else 0.0
        line += f" longest sequence: {self._longest} | tokens: {int(self._tokens)} |"
        line += f" tokens/s: {rate:.1f} |"
        self._seconds, self._tokens, self._longest = 0.0, 0.0, 0
        return line

    def _record(self, iteration: int, loss_dict: dict, tokens: float, longest: int) -> None:
        """Scalars for TensorBoard and W&B, and a line of the trace, on the last rank."""
        scalars = {
            "paradyse/tokens": tokens,
            "paradyse/longest-sequence": longest,
            "paradyse/tokens-per-second": tokens / self._last_seconds,
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
                "tokens": int(tokens),
                "longest_sequence_tokens": longest,
                "seconds": round(self._last_seconds, 6),
                **{name: float(value) for name, value in loss_dict.items()},
            }
            with self._trace.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


def _longest_over_replicas(lengths: list[int]) -> int:
    longest = max(lengths, default=0)
    if mpu.get_data_parallel_world_size() == 1:
        return longest
    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    value = torch.tensor(longest, device=device)
    torch.distributed.all_reduce(
        value, torch.distributed.ReduceOp.MAX, group=mpu.get_data_parallel_group()
    )
    return int(value)
