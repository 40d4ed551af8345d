"""What `megatron-paradyse max-length --measure` does with its options."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_paradyse.errors import UserError
from megatron_paradyse.preview.longest import Longest
from megatron_paradyse.preview.setup import Setup
from megatron_paradyse.whole_file import check_output


@dataclass(frozen=True)
class How:
    """The options, as they were given."""

    output: str
    nproc: int | None
    stand_in: bool
    model: str | None
    resolution: float
    most_seconds: float | None
    only: Sequence[str] | None


def run_measurement(
    how: How, setup: Setup, found: Longest, flags: Sequence[str], tell: Callable[[], None]
) -> None:
    """Make the trials; returns when they are in the file. As one of the ranks it never returns."""
    from megatron_paradyse.preview.trials import Options, run_trials
    from megatron_paradyse.profiler.start import as_rank, launched, ranks_there, start_ranks
    from megatron_paradyse.simulator.models import model_flags
    from megatron_paradyse.train_command import take_environment

    check_output(how.output)
    take_environment(how.model)
    p, needed = setup.description.p, setup.description.ranks
    ranks = ranks_there(how.nproc)
    if how.stand_in and ranks:
        raise UserError("--stand-in is one process: leave out --nproc and torchrun")
    if not (how.stand_in or ranks):
        raise UserError(
            f"give --nproc {needed} to start {needed} ranks here, start it under torchrun, or give "
            "--stand-in"
        )
    if ranks and ranks != needed:
        raise UserError(f"the costs are of {needed} ranks, not of {ranks}: give --nproc {needed}")
    d = setup.description
    megatron = model_flags(
        how.model,
        [*flags, "--num-layers", str(setup.policies.num_layers)],
        ranks=p,
        dtype=d.dtype,
        alone=how.stand_in,
    )
    options = Options(how.output, how.resolution, how.most_seconds, how.stand_in, how.only)

    def work(report: Callable[[dict], None]) -> None:
        run_trials(options, setup, found, megatron, report)

    if how.stand_in:
        from megatron_paradyse.simulator.run import quiet

        with quiet():
            work(lambda event: print(event["text"], file=sys.stderr, flush=True))
        return
    if launched():
        as_rank(work, tell)
    start_ranks(sys.argv[1:], ranks=ranks, output=Path(how.output))
