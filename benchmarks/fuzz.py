"""Fuzzes every parser of files: coverage-guided, and by properties near good inputs.

Each target of tests/fuzz/targets.py runs in a process of its own with bounded memory (1 GiB more
than its imports take), watched for what a parser must not do: unpickle, start processes, open
sockets, write or remove outside its folder. atheris steers the bytes by the branches that they
reach; hypothesis changes the structure of good files. A finding is an exception that is no
UserError, an input that takes over 2 s, or one of those deeds.

    .venv/bin/python benchmarks/fuzz.py --json
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import finish, options
from tests.fuzz.targets import MAX_INPUT_BYTES, TARGETS

FULL = (1_000_000, 1_400)  # bytes and property cases, of each target
QUICK = (20_000, 20)
LIMIT_SECONDS = 400


def main() -> None:
    arguments = options(__doc__.splitlines()[0]).parse_args()
    wanted_bytes, cases = QUICK if arguments.quick else FULL
    rows = []
    for name in TARGETS:
        rows.append(run(name, wanted_bytes, cases))
        print(json.dumps(rows[-1]), file=sys.stderr)
    result = {
        "fuzzed_bytes": sum(row["bytes"] for row in rows),
        "inputs": sum(row["inputs"] for row in rows),
        "property_cases": sum(row["cases"] for row in rows),
        "findings": sum(len(row["findings"]) for row in rows),
        "targets": rows,
    }
    configuration = {"bytes_per_target": wanted_bytes, "cases_per_target": cases}
    finish("fuzz", result, configuration | {"max_input_bytes": MAX_INPUT_BYTES}, arguments)


def run(name: str, wanted_bytes: int, cases: int) -> dict:
    """Both ways for one target; a process that ends otherwise than well is a finding."""
    row = {"target": name, "bytes": 0, "inputs": 0, "cases": 0, "findings": []}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for way, count in (("guided", wanted_bytes), ("properties", cases)):
            result = Path(folder) / f"{way}.json"
            command = [sys.executable, "-m", "benchmarks.fuzz_target", name, way, str(count)]
            command += [str(result), folder]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
                )
                said = done.stderr[-300:] if done.returncode else ""
            except subprocess.TimeoutExpired:
                said = f"no end within {LIMIT_SECONDS} s"
            found = json.loads(result.read_text()) if result.exists() else {"findings": []}
            if said:
                found["findings"].append(f"{way}: the process ended: {said}")
            for key, value in found.items():
                row[key] += value
    return row


if __name__ == "__main__":
    main()
