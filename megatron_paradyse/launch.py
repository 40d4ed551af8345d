"""Runs an unmodified pretrain_gpt.py of a Megatron-LM checkout with --paradyse added to its flags.

Without a flag of this package the script runs as if it were started by itself.

torchrun ... -m megatron_paradyse.launch path/to/pretrain_gpt.py <Megatron flags> --paradyse
"""

from __future__ import annotations

import os
import runpy
import sys

from megatron_paradyse.errors import UserError
from megatron_paradyse.train.plugin import install_if_asked_for
from megatron_paradyse.train.uncaught import show_user_errors_in_one_line


def main() -> None:
    problem = _problem(sys.argv[1:])
    if problem is not None:
        show_user_errors_in_one_line()
        raise UserError(problem)
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    install_if_asked_for()
    runpy.run_path(script, run_name="__main__")


def _problem(words: list[str]) -> str | None:
    if not words or words[0].startswith("-"):
        return "no script: torchrun ... -m megatron_paradyse.launch path/to/pretrain_gpt.py <flags>"
    if not os.path.isfile(words[0]):
        return f"script {words[0]} not found: give pretrain_gpt.py of a Megatron-LM checkout"
    return None


if __name__ == "__main__":
    main()
