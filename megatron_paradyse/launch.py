"""Runs an unmodified pretrain_gpt.py of a Megatron-LM checkout with --paradyse added to its flags.

torchrun ... -m megatron_paradyse.launch path/to/pretrain_gpt.py <Megatron flags> --paradyse
"""

from __future__ import annotations

import os
import runpy
import sys

from megatron_paradyse.errors import UserError
from megatron_paradyse.train.plugin import install, show_user_errors_in_one_line


def main() -> None:
    show_user_errors_in_one_line()
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise UserError(
            "no script: torchrun ... -m megatron_paradyse.launch path/to/pretrain_gpt.py <flags>"
        )
    script = sys.argv[1]
    if not os.path.isfile(script):
        raise UserError(
            f"script {script} not found: give pretrain_gpt.py of a Megatron-LM checkout"
        )
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    install()
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
