"""Adds lengths, plans and tokens per second to Megatron's line per iteration."""

from __future__ import annotations

import functools
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer, training

from megatron_paradyse.errors import UserError, say_error
from megatron_paradyse.hook import Planned
from megatron_paradyse.packing.row import of_each
from megatron_paradyse.planner.policies import CostPolicy
from megatron_paradyse.settings import FIXED
from megatron_paradyse.train.batch import meter
from megatron_paradyse.train.ending import is_out_of_memory
from megatron_paradyse.train.memory_record import keep_beside_checkpoints
from megatron_paradyse.train.summary import Summary
from megatron_paradyse.train.telemetry import Microbatch, Telemetry
from megatron_paradyse.train.trace import Trace, out_of_memory_record
from megatron_paradyse.train.unexpected import ended_by_check, not_a_number
from megatron_paradyse.units import bytes_text, counted

COMPACT = "compact"  # of --paradyse-log
MOST_PLANS = 2  # on a line


class IterationLog:
    """Times train_step and extends, or replaces, the line that training_log prints."""

    def __init__(
        self,
        *,
        style: str,
        telemetry: Telemetry,
        trace: Trace | None,
        summary: Summary,
        circumstances: Callable[[], dict[str, Any]],
        peak_by_file: Callable[[Planned], int | None],
        after: Callable[[int, list[Microbatch]], None],
    ):
        """style: "megatron" appends to Megatron's line; "compact" prints a short one instead.

        circumstances: of a plan that ran out of memory, for its record. peak_by_file: what the
        costs predict without corrections, of a microbatch whose plan has a predicted peak. after:
        called with every iteration's number and microbatches, on all ranks.
        """
        self._style, self._after = style, after
        self._circumstances, self._peak_by_file = circumstances, peak_by_file
        self._telemetry, self._trace, self._summary = telemetry, trace, summary
        self._step_seconds = 0.0
        self._interval = _Interval()
        self._operations: list[float] = []  # of iterations since Megatron's clock began anew

    def install(self) -> None:
        """Wrap train_step and training_log where Megatron's training loop looks them up."""
        training.train_step = self._timed(training.train_step)
        training.training_log = self._extended(training.training_log)
        training.evaluate = _in_one_line(training.evaluate)

    def _timed(self, train_step):
        @functools.wraps(train_step)
        def timed(*args, **kwargs):
            start = time.perf_counter()
            try:
                result = train_step(*args, **kwargs)
            except (RuntimeError, MemoryError) as error:
                if is_out_of_memory(error):
                    raise self._out_of_memory(error) from error
                if "Unexpected result" not in str(error):
                    raise
                raise UserError(not_a_number(str(error))) from error
            self._step_seconds = time.perf_counter() - start
            should_exit, code = result[3], result[4]
            if should_exit:
                self._ends(code)
            return result

        return timed

    def _ends(self, code: int) -> None:
        """Tell of an iteration after which Megatron ends the job: it makes no step, and no line."""
        if torch.distributed.get_rank() == 0:
            say_error(ended_by_check(code))
        microbatches = self._telemetry.take()
        self._summary.add(microbatches)
        if self._trace is not None:
            values = {"seconds": round(self._step_seconds, 6), "exit_code": code}
            self._trace.iteration(get_args().curr_iteration + 1, microbatches, values)

    def _extended(self, training_log):
        @functools.wraps(training_log)
        def extended(loss_dict, total_loss_dict, learning_rate, iteration, *args, **kwargs):
            microbatches = self._telemetry.take()
            self._summary.add(microbatches)
            self._interval.add_plans(microbatches)
            values: dict[str, Any] = {"seconds": round(self._step_seconds, 6)}
            values |= {name: float(value) for name, value in loss_dict.items()}
            tokens = kwargs.get("total_real_tokens_in_batch")
            replaced = self._style == COMPACT
            if get_args().paradyse_settings.sequences == FIXED:
                tokens = None  # Megatron's own line says it all
                if replaced:
                    self._interval.add(*_fixed_tokens(), self._step_seconds, loss_dict)
            else:
                replaced = tokens is not None
            if tokens is not None:
                lengths = _range_over_replicas(meter.take())
                self._interval.add(int(tokens), lengths, self._step_seconds, loss_dict)
                values |= _length_values(int(tokens), lengths)
            if self._trace is not None:
                self._trace.iteration(iteration, microbatches, values)
            self._after(iteration, microbatches)
            self._write_scalars(iteration, values, microbatches)
            print_line, operations = (
                training.print_rank_last,
                training.num_floating_point_operations,
            )
            if replaced:
                training.print_rank_last = self._print_line(iteration)
            if tokens is not None:
                training.num_floating_point_operations = self._mean_operations(operations, kwargs)
            try:
                return training_log(
                    loss_dict, total_loss_dict, learning_rate, iteration, *args, **kwargs
                )
            finally:
                training.print_rank_last = print_line
                training.num_floating_point_operations = operations
                printed = iteration % get_args().log_interval == 0
                if printed and not kwargs.get("is_first_iteration"):
                    self._operations.clear()

        return extended

    def _mean_operations(self, of_iteration: Callable[..., float], lengths: dict):
        """Of the iterations since the last line, whose mean seconds Megatron divides by.

        It would take those of the last one, as if all had its lengths.
        """
        names = ("seqlen_squared_sum_in_batch", "total_real_tokens_in_batch")
        counted = {name: lengths[name] for name in names}
        self._operations.append(of_iteration(get_args(), None, **counted))
        mean = sum(self._operations) / len(self._operations)
        return lambda *args, **kwargs: mean

    def _print_line(self, iteration: int) -> Callable[[str], None]:
        return lambda line: _print_on_last_rank(self._line(line, iteration))

    def _line(self, megatron_line: str, iteration: int) -> str:
        interval, self._interval = self._interval, _Interval()
        if self._style == COMPACT:
            return f"iteration {iteration}/{get_args().train_iters} | {interval.compact()}"
        return megatron_line + interval.extension()

    def _write_scalars(self, iteration: int, values: dict, microbatches: list[Microbatch]) -> None:
        """For TensorBoard and W&B, on the rank that has the writers."""
        writer, wandb_writer = get_tensorboard_writer(), get_wandb_writer()
        if not writer and not wandb_writer:
            return
        scalars: dict[str, float] = {"paradyse/switches": sum(m.switched for m in microbatches)}
        planned = [m.planned for m in microbatches]
        scalars["paradyse/planner-microseconds"] = sum(p.planner_seconds for p in planned) * 1e6
        if "tokens" in values:
            scalars["paradyse/tokens"] = values["tokens"]
            scalars["paradyse/longest-sequence"] = values["longest_sequence_tokens"]
            scalars["paradyse/tokens-per-second"] = values["tokens"] / self._step_seconds
        predicted = [p.seconds for p in planned if p.seconds is not None]
        if predicted and len(predicted) == len(planned):
            scalars["paradyse/predicted-layer-seconds"] = sum(predicted)
            scalars["paradyse/layer-seconds"] = sum(m.seconds or 0 for m in microbatches)
        if writer and iteration % get_args().tensorboard_log_interval == 0:
            for name, value in scalars.items():
                writer.add_scalar(name, value, iteration)
        if wandb_writer:
            wandb_writer.log(scalars, iteration)

    def _out_of_memory(self, error: Exception) -> UserError:
        """What did not fit, for the user and for the trace."""
        microbatch = self._telemetry.current
        reason = " ".join(str(error).split())[:300]
        if microbatch is None or microbatch.seconds is not None:
            return UserError(f"out of memory between microbatches: {reason}: use more ranks")
        planned, predicted = microbatch.planned, ""
        if planned.peak_bytes is not None:
            predicted = f", predicted peak {bytes_text(planned.peak_bytes)}"
        alive = self._telemetry.live_peak_bytes()
        by_file = self._peak_by_file(planned) if predicted else None
        record = out_of_memory_record(
            microbatch, self._circumstances(), alive=alive, peak_by_file=by_file
        )
        kept = []
        if self._trace is not None and self._trace.out_of_memory(record):
            kept.append("--paradyse-trace")
        if predicted and keep_beside_checkpoints(record):
            kept.append("--save")
        remedy = "use --paradyse-policy optimal, a strategy that needs less, or more ranks"
        if predicted and _is_above_budget(planned, by_file):
            remedy = "no plan fits it: use more ranks, more memory or a shorter --seq-length"
        elif predicted and kept:
            remedy = f"start again with this {' or '.join(kept)}, which lowers the budget"
        elif predicted:
            remedy = "raise --paradyse-memory-margin, or lower --paradyse-memory-budget"
        return UserError(
            f"out of memory at iteration {planned.iteration + 1}, s={planned.seq_length}"
            f"{of_each(planned.row)}, b={planned.batch_size}, plan {planned.plan.runs()}"
            f"{predicted}: {reason}: {remedy}"
        )


def _is_above_budget(planned: Planned, peak_by_file: int | None) -> bool:
    """Whether the plan was one of least peak that did not fit, by the file's own numbers too."""
    peak = planned.peak_bytes
    if peak is None or not isinstance(planned.policy, CostPolicy):
        return False
    return not planned.policy.has_room(min(peak, peak_by_file or peak))


def _in_one_line(evaluate):
    """Megatron's evaluation, which checks its losses too."""

    @functools.wraps(evaluate)
    def evaluate_in_one_line(*args, **kwargs):
        try:
            return evaluate(*args, **kwargs)
        except RuntimeError as error:
            if "Unexpected result" not in str(error):
                raise
            raise UserError(not_a_number(str(error), where="in the evaluation after")) from error

    return evaluate_in_one_line


def _fixed_tokens() -> tuple[int, tuple[int, int]]:
    """Of an iteration on Megatron's own data: all tokens, and the length of every sequence."""
    args = get_args()
    samples = get_num_microbatches() * args.micro_batch_size * args.data_parallel_size
    return samples * args.seq_length, (args.seq_length, args.seq_length)


def _length_values(tokens: int, lengths: tuple[int, int]) -> dict[str, int]:
    return {
        "tokens": tokens,
        "shortest_sequence_tokens": lengths[0],
        "longest_sequence_tokens": lengths[1],
    }


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
        self.plans: Counter[str] = Counter()

    def add_plans(self, microbatches: list[Microbatch]) -> None:
        self.plans.update(microbatch.planned.plan.runs() for microbatch in microbatches)

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
            f" tokens/s: {self.tokens / self.seconds:.1f} |{self._plans()[3:]}"
        )

    def compact(self) -> str:
        loss = sum(self.losses) / len(self.losses) if self.losses else float("nan")
        lengths = f"lengths {self.shortest:,} to {self.longest:,}"
        if self.shortest == self.longest:
            lengths = f"length {self.longest:,}"
        return (
            f"{lengths}, {counted(self.tokens, 'token')} | "
            f"loss {loss:.4f} | {self.seconds / self.iterations:.2f} s | "
            f"{self.tokens / self.seconds:,.0f} tokens/s{self._plans()}"
        )

    def _plans(self) -> str:
        """The plans of this rank's microbatches, the most frequent first."""
        if not self.plans:
            return ""
        shown = self.plans.most_common(MOST_PLANS)
        texts = [text if len(self.plans) == 1 else f"{n} x {text}" for text, n in shown]
        more = len(self.plans) - len(shown)
        return f" | {'; '.join(texts)}" + (f"; {counted(more, 'more plan')}" if more else "")


def _range_over_replicas(lengths: list[int]) -> tuple[int, int]:
    """The shortest and the longest sequence that any replica trained on."""
    shortest, longest = min(lengths, default=sys.maxsize), max(lengths, default=0)
    if mpu.get_data_parallel_world_size() == 1:
        return shortest, longest
    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    ends = torch.tensor([-shortest, longest], device=device)
    torch.distributed.all_reduce(
        ends, torch.distributed.ReduceOp.MAX, group=mpu.get_data_parallel_group()
    )
    negated, longest = ends.tolist()
    return -negated, longest
