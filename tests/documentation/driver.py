"""A process that has Megatron imported, for what needs it: driver JOBS RESULTS, both JSON files.

A job is {"kind", "words", "ranks"}: "parse" parses and checks the flags of a training as each of so
many ranks would, "profile" those that a profile makes of its own, "command" runs the command line.
Its result is "" or what was wrong.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text())
    results = Path(sys.argv[2])
    os.chdir(results.parent)
    results.write_text(json.dumps([_result(job) for job in jobs]))


def _result(job: dict) -> str:
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            {"parse": _parse, "profile": _profile, "command": _command}[job["kind"]](job)
    except SystemExit as end:
        return "" if end.code in (0, None) else said.getvalue()[-2000:]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _parse(job: dict) -> None:
    from megatron.training import arguments

    os.environ |= {"RANK": "0", "WORLD_SIZE": str(job["ranks"])}
    sys.argv = ["pretrain_gpt.py", *job["words"]]
    args = arguments.parse_args()
    arguments.validate_args(args, {"tokenizer_type": "GPT2BPETokenizer"})
    assert args.paradyse, "a training of this documentation has --paradyse"


def _profile(job: dict) -> None:
    from megatron_paradyse.profiler.flags import megatron_flags

    words = megatron_flags(job["words"], model_path=job["model"], ranks=job["ranks"])
    _parse({**job, "words": words})


def _command(job: dict) -> None:
    from megatron_paradyse.cli import cli

    cli(job["words"], prog_name="megatron-paradyse")
