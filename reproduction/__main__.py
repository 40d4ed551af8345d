"""One result of the paper: `python -m reproduction NAME [options]`, as scripts/*.sh call it.

--simulate runs here; a real run is reproduction.measured's, with the same options. Figures and
RESULTS.md are drawn from the CSV files afterwards.
"""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys

from megatron_paradyse.errors import UserError
from reproduction.options import parser

NAMES = ("figure2", "table5", "table3", "case_study", "peer")
NEVER_MEASURED = ("table3", "peer")  # lengths and schedules: the same numbers at any scale


def main(given: list[str]) -> None:
    if not given or given[0] not in NAMES:
        raise SystemExit(f"python -m reproduction {{{','.join(NAMES)}}} [options]")
    name, *options = given
    module = importlib.import_module(f"reproduction.{name}")
    reader = parser((module.__doc__ or name).splitlines()[0])
    reader.prog = f"reproduction {name}"
    if hasattr(module, "add_options"):
        module.add_options(reader)
    arguments = reader.parse_args(options)
    # That nothing fits is a result here, not a warning.
    logging.getLogger("megatron_paradyse.planner.policies").setLevel(logging.ERROR)
    failed: int | str | None = None
    try:
        if arguments.simulate or name in NEVER_MEASURED:
            module.run(arguments)
        else:
            command = [sys.executable, "-m", "reproduction.measured", name, *options]
            failed = subprocess.run(command, check=False).returncode
    except UserError as error:
        raise SystemExit(f"error: {error}") from error
    except SystemExit as error:
        failed = error.code  # a check that failed: what it is about is drawn all the same
    from reproduction import figures, results

    figures.draw_all(arguments.output)
    results.write(arguments.output)
    sys.exit(failed)


if __name__ == "__main__":
    main(sys.argv[1:])
