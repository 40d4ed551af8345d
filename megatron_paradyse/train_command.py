"""`megatron-paradyse train RUN.yaml`: the torchrun command that a YAML file describes.

nproc_per_node: 4            # and other options of torchrun
environment: {OMP_NUM_THREADS: 1}
script: pretrain_gpt.py      # of a Megatron-LM checkout; default: this package's own
megatron: {num-layers: 4}    # flags without dashes: true gives the flag alone, a list values
paradyse: {policy: optimal}  # settings of configs/example.yaml
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from megatron_paradyse import setting_kinds as kinds
from megatron_paradyse.option_types import PASS_ON

# Options of torchrun, in the order in which they are given to it, and what they take.
_TEXT, _PORT, _COUNT = kinds.TEXT, kinds.whole(0, 65535), kinds.whole(0, 1 << 20)
LAUNCH_KEYS = {
    "nnodes": kinds.NODES,
    "nproc_per_node": kinds.whole(1, 1 << 20, "auto", "cpu", "gpu", "xpu"),
    "node_rank": _COUNT,
    "rdzv_backend": _TEXT,
    "rdzv_endpoint": _TEXT,
    "rdzv_id": kinds.SCALAR,
    "rdzv_conf": _TEXT,
    "master_addr": _TEXT,
    "master_port": _PORT,
    "local_addr": _TEXT,
    "max_restarts": _COUNT,
    "monitor_interval": kinds.SCALAR,
    "start_method": kinds.choice("spawn", "fork", "forkserver"),
    "log_dir": _TEXT,
    "redirects": kinds.SCALAR,
    "tee": kinds.SCALAR,
}
ELSEWHERE = ("node_rank", "rdzv_backend", "rdzv_endpoint", "master_addr", "master_port")
MEETING_KEYS = ("rdzv_endpoint", "master_addr")  # or torchrun's variables of these names
OWN_KEYS = ("environment", "script", "megatron", "paradyse")
VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"


@dataclass(frozen=True)
class Launch:
    """What is run: a command and the environment that it has besides this process's own."""

    command: list[str]
    environment: dict[str, str]

    def as_line(self) -> str:
        """For a shell."""
        assignments = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*assignments, shlex.join(self.command)])


@click.command(
    context_settings=PASS_ON,
    epilog="Example: megatron-paradyse train configs/train-demo.yaml --dry-run -- --train-iters 2",
)
@click.argument("run", metavar="RUN.yaml")
@click.option("--dry-run", is_flag=True, help="Print the command and end.")
@click.option("--json", "as_json", is_flag=True, help="--dry-run: print it as JSON for machines.")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[-- MEGATRON FLAGS]...")
def train(run: str, dry_run: bool, as_json: bool, flags: tuple[str, ...]) -> None:
    """Start torchrun as RUN.yaml says, after printing the command; further flags win."""
    if as_json and not dry_run:
        raise click.UsageError("--json is of --dry-run: a training prints what Megatron prints")
    launch = read_run(run, flags)
    click.echo(json.dumps(vars(launch)) if as_json else launch.as_line())
    if dry_run:
        return
    sys.stdout.flush()
    os.execve(launch.command[0], launch.command, {**os.environ, **launch.environment})


def read_run(path: str, more_flags: Sequence[str] = ()) -> Launch:
    """The launch that a file describes; UserError with the line of what is wrong."""
    import yaml

    from megatron_paradyse.errors import UserError
    from megatron_paradyse.flag_file import text_of
    from megatron_paradyse.yaml_file import compose_yaml, entry_of

    root = compose_yaml(path)
    entry = entry_of(path, root, "a run", (*LAUNCH_KEYS, *OWN_KEYS))
    assert isinstance(root, yaml.MappingNode)
    nodes = {key.value: value for key, value in root.value}
    if "nproc_per_node" not in nodes:
        raise UserError(f"{path}: nproc_per_node is missing: give the number of ranks of a node")
    command = [sys.executable, "-m", "torch.distributed.run"]
    if not any(key in nodes for key in ELSEWHERE) and entry.values.get("nnodes", 1) == 1:
        command.append("--standalone")
    for key, kind in LAUNCH_KEYS.items():
        if key in nodes:
            text = text_of(path, key, nodes[key])  # PyYAML makes 64 of 1:4
            kind.check(text, f"{path}, line {entry.lines[key]}: {key}")
            command += [f"--{key.replace('_', '-')}", text]
    environment = _environment(path, nodes.get("environment"))
    if "nnodes" in nodes:
        nnodes = text_of(path, "nnodes", nodes["nnodes"])
        variables = [name for name in (*os.environ, *environment) if name.startswith("PET_")]
        known = {*nodes, *(name.removeprefix("PET_").lower() for name in variables)}
        _check_meeting(f"{path}, line {entry.lines['nnodes']}", nnodes, known)
    if "script" in nodes:
        command += ["-m", "megatron_paradyse.launch", entry.text("script")]
    else:
        command += ["-m", "megatron_paradyse.pretrain_gpt"]
    if "megatron" in nodes:
        command += _megatron_flags(path, nodes["megatron"])
    if "paradyse" in nodes:
        command += _paradyse_flags(path, nodes["paradyse"])
    return Launch([*command, *more_flags], environment)


def _check_meeting(place: str, nnodes: str, known: set[str]) -> None:
    """UserError where several nodes are not told where to meet: each would wait for the others."""
    from megatron_paradyse.errors import UserError

    if nnodes.rpartition(":")[2] != "1" and not known & {*MEETING_KEYS}:
        raise UserError(
            f"{place}: nnodes: {nnodes} nodes are not told where to meet: give rdzv_backend: c10d "
            "and rdzv_endpoint: HOST:29400, of one of them"
        )


def _megatron_flags(path: str, node: Any) -> list[str]:
    """Megatron's flags; those of ours have a place of their own."""
    from megatron_paradyse.errors import UserError
    from megatron_paradyse.flag_file import flags_of, items_of

    for key, _ in items_of(path, "megatron", node):
        if str(key.value).lstrip("-").startswith("paradyse"):
            line = key.start_mark.line + 1
            raise UserError(
                f"{path}, line {line}: {key.value} belongs under paradyse, without 'paradyse-'"
            )
    return flags_of(path, "megatron", node)


def _paradyse_flags(path: str, node: Any) -> list[str]:
    """The settings as flags; those that have none are read from the file itself."""
    from megatron_paradyse.settings import WITHOUT_FLAG, Settings, settings_of

    flags = ["--paradyse"]
    settings = settings_of(path, node)
    if any(name in settings for name in WITHOUT_FLAG):
        flags += ["--paradyse-config", path]
    for name, value in settings.items():
        is_switch = isinstance(value, bool)
        if name in WITHOUT_FLAG or value is None:
            continue
        if is_switch and value == getattr(Settings, name):
            continue
        no = "no-" if value is False else ""
        flags.append(f"--paradyse-{no}{name.replace('_', '-')}")
        if not is_switch:
            flags.append(",".join(value) if isinstance(value, tuple) else str(value))
    return flags


def _environment(path: str, node: Any) -> dict[str, str]:
    from megatron_paradyse.errors import UserError
    from megatron_paradyse.flag_file import items_of, text_of

    found: dict[str, str] = {}
    for key, value in items_of(path, "environment", node) if node is not None else ():
        place = f"{path}, line {key.start_mark.line + 1}"
        if not re.fullmatch(VARIABLE, str(key.value)):
            raise UserError(f"{place}: {key.value!r:.40} is no name of a variable")
        if key.value in found:
            raise UserError(f"{place}: {key.value} is there twice: keep one")
        found[key.value] = text_of(path, key.value, value)
    return found


def take_environment(path: str | None) -> None:
    """Set what a --model file for `train` says of the environment: here, for ranks started here.

    Of a file of flags alone, of a model's name or of no file, nothing.
    """
    import yaml

    from megatron_paradyse.flag_file import items_of
    from megatron_paradyse.yaml_file import compose_yaml

    if path is None or not os.path.isfile(path):
        return
    root = compose_yaml(path, "--model")
    if isinstance(root, yaml.MappingNode):
        nodes = {key.value: node for key, node in items_of(path, "a model", root)}
        if "megatron" in nodes:
            os.environ.update(_environment(path, nodes.get("environment")))
