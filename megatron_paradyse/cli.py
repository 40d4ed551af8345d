"""The command `megatron-paradyse`: finds subcommands, turns errors into one line.

Nothing here imports a subcommand before it is asked for, so that `--help` answers at once and
never loads torch. A new subcommand is one line in COMMANDS.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from megatron_paradyse import __version__
from megatron_paradyse.errors import UserError, did_you_mean
from megatron_paradyse.units import printable

USAGE_EXIT_CODE = 2
ERROR_EXIT_CODE = 1
INTERRUPTED_EXIT_CODE = 130
SIGNALLED_EXIT_CODE = 128  # and the number of the signal

# name -> (module:attribute, one line for --help)
COMMANDS = {
    "data": ("megatron_paradyse.data.commands:data", "Prepare, inspect and synthesize data sets."),
    "profile": (
        "megatron_paradyse.profiler.commands:profile",
        "Measure what every strategy costs on this machine.",
    ),
    "simulate": (
        "megatron_paradyse.simulator.commands:simulate",
        "Estimate what every strategy costs on a GPU that is not here.",
    ),
    "fit": ("megatron_paradyse.costs.commands:fit", "Fit cost models to a profile."),
    "accuracy": (
        "megatron_paradyse.costs.commands:accuracy",
        "Say how wrong the cost models are.",
    ),
    "plan": (
        "megatron_paradyse.preview.commands:plan",
        "Tell which plan training would choose, and why.",
    ),
    "max-length": (
        "megatron_paradyse.preview.commands:max_length",
        "Tell the longest sequence that each strategy can train.",
    ),
    "train": (
        "megatron_paradyse.train_command:train",
        "Start a training that a YAML file describes.",
    ),
    "schema": (
        "megatron_paradyse.schema_command:schema",
        "Print the JSON Schema of YAML files, for editors.",
    ),
    "report": ("megatron_paradyse.report.commands:report", "Draw a training from its trace."),
    "bench": (
        "megatron_paradyse.bench_command:bench",
        "List the benchmarks of a checkout, or run them.",
    ),
    "doctor": (
        "megatron_paradyse.doctor.commands:doctor",
        "Say what this machine lacks for training.",
    ),
}


class LazyGroup(click.Group):
    """A group that imports a subcommand only when it runs or shows its own help."""

    def __init__(self, *args: Any, lazy: dict[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.lazy, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        module, attribute = self.lazy[cmd_name][0].split(":")
        return getattr(importlib.import_module(module), attribute)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = did_you_mean(args[0], self.list_commands(ctx))
            if not near or args[0].startswith("-"):
                raise
            message = f"{error.message.rstrip('.')}: {near.rstrip()}"
            raise click.UsageError(message, ctx) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in self.lazy.items()])


class RootGroup(LazyGroup):
    """The outermost group: every failure ends as one line on stderr and an exit code."""

    def main(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        state = {"debug": False}
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # a file's name may be no text
        try:
            result = super().main(args, prog_name, standalone_mode=False, obj=state, **extra)
        except Exception as error:
            if not standalone_mode:
                raise
            if state["debug"]:
                traceback.print_exc()
            self._fail(error)
        except KeyboardInterrupt:
            if state["debug"]:
                traceback.print_exc()
            _exit_with_line("interrupted", INTERRUPTED_EXIT_CODE)
        if standalone_mode:
            sys.exit(result if isinstance(result, int) else 0)
        return result

    @staticmethod
    def _fail(error: Exception) -> NoReturn:
        if isinstance(error, click.exceptions.NoArgsIsHelpError):
            error.show()
            sys.exit(USAGE_EXIT_CODE)
        if isinstance(error, click.UsageError):
            command = error.ctx.command_path if error.ctx else "megatron-paradyse"
            message = f"{error.format_message().rstrip('.')} (see {command} --help)"
            _exit_with_line(message, USAGE_EXIT_CODE)
        if isinstance(error, click.exceptions.Abort):
            _exit_with_line("interrupted", INTERRUPTED_EXIT_CODE)
        if isinstance(error, click.ClickException):
            _exit_with_line(error.format_message(), error.exit_code)
        if isinstance(error, OSError) and error.errno == errno.EPIPE:
            # The reader of our output went away: keep the interpreter from complaining about it.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(ERROR_EXIT_CODE)
        if isinstance(error, OSError):
            place = f"{error.filename}: " if error.filename else ""
            _exit_with_line(f"{place}{error.strerror or error}", ERROR_EXIT_CODE)
        if isinstance(error, UserError):
            _exit_with_line(str(error), ERROR_EXIT_CODE)
        _exit_with_line(
            f"internal error, {type(error).__name__}: {error} "
            "(megatron-paradyse --debug ... shows where)",
            ERROR_EXIT_CODE,
        )


def _exit_with_line(message: str, code: int) -> NoReturn:
    """One line on stderr, whatever the message holds: control characters are escaped."""
    click.echo(f"error: {printable(' '.join(message.split()))}", err=True)
    sys.exit(code)


def _set_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if ctx.obj is not None:
        ctx.obj["debug"] = value


@click.group(
    cls=RootGroup,
    lazy=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: megatron-paradyse data prepare my_code/ --output-prefix data/my_code",
)
@click.option(
    "--debug",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_set_debug,
    help="Show the traceback of an error.",
)
@click.version_option(__version__, "--version", prog_name="megatron-paradyse")
def cli() -> None:
    """Train transformers with Megatron-LM on sequences of very different lengths."""


def _terminate(signum: int, frame: object) -> NoReturn:
    # An exception, so that unfinished files are removed on the way out; timeout sends it twice.
    signal.signal(signum, signal.SIG_IGN)
    _exit_with_line("terminated", SIGNALLED_EXIT_CODE + signum)


def main() -> NoReturn:
    """Run the command line of this process."""
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # of a terminal that closes, less nohup
        signal.signal(signal.SIGHUP, _terminate)
    cli(prog_name="megatron-paradyse")
    raise AssertionError("click leaves by SystemExit")
