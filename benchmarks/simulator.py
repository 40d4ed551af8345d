"""The simulator against measured seconds: of others on 8 x A100, of this project on one H200.

Simulated seconds (no GPU runs here). Of up to 4 strategies x 4 models x 8K, 32K, 128K, 256K tokens
against the ParaDySe authors' fits on 8 x A100-SXM4-80GB, benchmarks/data/a100_time_fits.csv:
nothing in the simulator was fitted to these. Of 5 strategies at 8K to 256K tokens against the
record of benchmarks/strategies.py, where the device stood in for rank 7 of 8 and nothing was sent:
the host's time per kernel is from one of these rows, which is left out of the errors.

    .venv/bin/python benchmarks/simulator.py --json
"""

from __future__ import annotations

import csv
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import finish, options

ROOT = Path(__file__).resolve().parents[1]
FITS = ROOT / "benchmarks" / "data" / "a100_time_fits.csv"
RECORD = ROOT / "benchmarks" / "results" / "strategies-nvidia-h200.json"
CALIBRATED = ("metp", 8192)  # the host's time per kernel, hardware.py, is from this row of it
NAMES = {
    "MegatronTS": "megatron_ts",
    "UlyssesZ": "ulysses_z",
    "MegatronCZ": "megatron_cz",
    "METP": "metp",
}
LENGTHS = (8192, 32768, 131072, 262144)
LLAMA = ("--ffn-hidden-size", "22016", "--swiglu", "--normalization", "RMSNorm")
# By hidden size: heads of the published models, and MLPs of about 8 h^2 parameters either way.
MODELS = {
    12288: ("--num-attention-heads", "96"),
    8192: ("--num-attention-heads", "64", *LLAMA, "--disable-bias-linear"),
    1024: ("--num-attention-heads", "16"),
    4096: ("--num-attention-heads", "32"),
}
WANTED = {"error_median": 0.20, "pairs_right": 0.80}
LARGE_DEVIATION, CLOSE_PAIR = 0.40, 0.10


def main() -> None:
    arguments = options(__doc__.splitlines()[0]).parse_args()
    lengths = LENGTHS[:2] if arguments.quick else LENGTHS
    rows = _against_fits(lengths)
    errors = [abs(row["error"]) for row in rows]
    right, pairs = _pairs(rows)
    result = {
        "error_median": statistics.median(errors),
        "error_median_by_strategy": _medians(rows, "strategy"),
        "error_median_by_length": _medians(rows, "s"),
        "points": len(rows),
        "large_deviations": [row for row in rows if abs(row["error"]) > LARGE_DEVIATION],
        "pairs": pairs,
        "pairs_right": right / pairs,
        "wanted": WANTED,
        "h200": _against_record(),
        "rows": rows,
    }
    configuration = {
        "source": "simulated",
        "gpu": "a100-80g",
        "ranks": 8,
        "interconnect": "nvlink3",
        "mask": "bidirectional",
        "dtype": "float16",
        "lengths": lengths,
    }
    finish("simulator", result, configuration, arguments)


def _medians(rows: list[dict], key: str) -> dict:
    """Of the errors' sizes, by that key."""
    values = dict.fromkeys(row[key] for row in rows)
    return {v: statistics.median(abs(r["error"]) for r in rows if r[key] == v) for v in values}


def _against_fits(lengths: tuple[int, ...]) -> list[dict]:
    rows: list[dict] = []
    for layers, hidden, fits in _fits():
        simulated = _simulated(hidden, lengths)
        for name, (a, b, c) in fits.items():
            for s in lengths:
                measured, seconds = a * s * s + b * s + c, layers * simulated[NAMES[name], s]
                rows.append(
                    {
                        "hidden_size": hidden,
                        "layers": layers,
                        "strategy": name,
                        "s": s,
                        "fitted_seconds": measured,
                        "simulated_seconds": seconds,
                        "error": seconds / measured - 1,
                    }
                )
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def _against_record() -> dict:
    """Errors of what was measured on one H200, the row that was calibrated on left out."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "benchmarks.simulated_stand_in", str(RECORD)]
        subprocess.run([*command, "h200", str(output)], check=True, cwd=ROOT, timeout=600)
        simulated = json.loads(output.read_text())
    names = ("strategy", "s", "seconds", "seconds_quartiles", "simulated_seconds")
    rows = [{name: row[name] for name in names} for row in simulated]
    for row in rows:
        row["error"] = row["simulated_seconds"] / row["seconds"] - 1
        print(json.dumps(row), file=sys.stderr, flush=True)
    judged = [row for row in rows if (row["strategy"], row["s"]) != CALIBRATED]
    return {
        "record": RECORD.name,
        "calibrated": CALIBRATED,
        "error_median": statistics.median(abs(row["error"]) for row in judged),
        "error_median_by_strategy": _medians(judged, "strategy"),
        "error_median_by_length": _medians(judged, "s"),
        "rows": rows,
    }


def _fits() -> list[tuple[int, int, dict[str, tuple[float, float, float]]]]:
    """(layers, hidden size, coefficients of s^2, s and 1 by strategy)."""
    lines = [line for line in FITS.read_text().splitlines() if not line.startswith("#")]
    found: dict[tuple[int, int], dict] = {}
    for row in csv.DictReader(lines):
        model = int(row["num_layers"]), int(row["hidden_size"])
        coefficients = tuple(float(row[name]) for name in "abc")
        found.setdefault(model, {})[row["strategy"]] = coefficients
    return [(*model, fits) for model, fits in found.items()]


def _simulated(hidden: int, lengths: tuple[int, ...]) -> dict[tuple[str, int], float]:
    """Seconds of a layer, forward and backward, by strategy and length."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "costs.json"
        command = [sys.executable, "-m", "megatron_paradyse", "simulate", "--gpu", "a100-80g"]
        command += ["--ranks", "8", "--mask", "bidirectional", "--dtype", "float16"]
        command += ["-o", str(output), "--lengths", ",".join(map(str, lengths))]
        command += ["--strategies", ",".join(NAMES.values()), "--num-layers", "1"]
        command += ["--hidden-size", str(hidden), *MODELS[hidden], "--vocab-size", "50257"]
        command += ["--attention-dropout", "0", "--hidden-dropout", "0"]
        subprocess.run(command, check=True, cwd=ROOT, stdout=sys.stderr, timeout=600)
        values = json.loads(output.read_text())
    seconds: dict[tuple[str, int], float] = {}
    for m in values["measurements"]:
        if m["strategy"] != "model":
            key = m["strategy"], m["seq_length"]
            both = m["forward_seconds"] + m["backward_seconds"]
            seconds[key] = seconds.get(key, 0.0) + both
    return seconds


def _pairs(rows: list[dict]) -> tuple[int, int]:
    """How many pairs of strategies at one model and length differ clearly, and are in order."""
    right = pairs = 0
    for one, other in itertools.combinations(rows, 2):
        if (one["hidden_size"], one["s"]) != (other["hidden_size"], other["s"]):
            continue
        ratio = one["fitted_seconds"] / other["fitted_seconds"]
        if max(ratio, 1 / ratio) <= 1 + CLOSE_PAIR:
            continue
        pairs += 1
        right += (ratio > 1) == (one["simulated_seconds"] > other["simulated_seconds"])
    return right, pairs


if __name__ == "__main__":
    start = time.monotonic()
    main()
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)
