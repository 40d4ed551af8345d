"""How wrong fitted costs are at lengths that were not fitted, measured on CPU ranks.

The profiler measures one model twice, with more lengths than are fitted. The first profile is
fitted, at its lengths of 128 to 2,048 tokens; both models are asked for the others: inside that
range, at about twice its end, and (bytes only) at four times its end. The true seconds there are
the mean of both profiles; noise_floor is the median of their difference at the same points.

    .venv/bin/python benchmarks/cost_model.py --json [--folder DIR, to go on after an interruption]
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import finish, options
from megatron_paradyse.costs.accuracy import INSIDE, TWICE, measure_accuracy, to_json_values
from megatron_paradyse.costs.cost_file import read_cost_file, write_cost_file
from megatron_paradyse.costs.fitting import fit_table
from megatron_paradyse.costs.table import CostTable, Measurement
from megatron_paradyse.profiler.lengths import lengths_between

MODEL = {
    "--num-layers": 4,
    "--hidden-size": 256,
    "--num-attention-heads": 8,
    "--seq-length": 8192,
    "--max-position-embeddings": 8192,
    "--vocab-size": 1024,
    "--attention-dropout": 0,
    "--hidden-dropout": 0,
}
RANKS = 4
KEYS = ("time_median", "time_p95", "time_median_2x", "memory_max", "memory_max_4x")


@dataclasses.dataclass(frozen=True)
class Lengths:
    """fitted and asked are timed; asked_bytes are not, nor are more fitted ones between fitted."""

    fitted: tuple[int, ...]
    asked: tuple[int, ...]
    asked_bytes: tuple[int, ...]

    @property
    def fitted_bytes(self) -> tuple[int, ...]:
        between = lengths_between(self.fitted, p=RANKS)
        return tuple(s for s in between if s not in (*self.asked, *self.asked_bytes))


FULL = Lengths(
    fitted=(128, 168, 216, 272, 352, 456, 584, 752, 968, 1240, 1592, 2048),
    asked=(144, 240, 400, 664, 1096, 1808, 3584, 4096),
    asked_bytes=(152, 192, 304, 512, 856, 1400, 8192),
)
QUICK = Lengths(fitted=(128, 192, 256, 384, 512), asked=(320, 1024), asked_bytes=(160, 2048))


def main() -> None:
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--folder", help="keep the profiles here, and go on with what is there")
    arguments = parser.parse_args()
    lengths = QUICK if arguments.quick else FULL
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        untimed = (*lengths.fitted_bytes, *lengths.asked_bytes)
        tables = [
            profiled(folder / f"profile-{name}.json", lengths, others, arguments.quick)
            for name, others in (("first", untimed), ("second", ()))
        ]
        speed = seconds_to_answer(fitted_part(tables[0], lengths), folder / "costs.json")
    errors = measure_accuracy(fitted_part(tables[0], lengths), asked_part(*tables, lengths))
    values = to_json_values(errors)
    result = {
        model: {key: summary[key] for key in KEYS} for model, summary in values["summary"].items()
    }
    result |= {f"all_{model}": summary for model, summary in values["summary"].items()}
    result |= noise(*tables, lengths) | speed | {"rows": values["rows"]}
    configuration = {"ranks": RANKS, **dataclasses.asdict(lengths), **MODEL}
    finish("cost_model", result, configuration, arguments)


def profiled(path: Path, lengths: Lengths, untimed: tuple[int, ...], quick: bool) -> CostTable:
    """The profile at path, once it is complete."""
    timed = (*lengths.fitted, *lengths.asked)
    command = [sys.executable, "-m", "megatron_paradyse", "profile", "--nproc", str(RANKS)]
    command += ["--output", str(path), "--lengths", ",".join(map(str, timed))]
    command += ["--bytes-lengths", ",".join(map(str, untimed))]
    if quick:
        command += ["--strategies", "ulysses_z,metp"]
    command += [str(text) for pair in MODEL.items() for text in pair]
    root = str(Path(__file__).resolve().parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    subprocess.run(command, check=True, env=environment, stdout=sys.stderr, timeout=1800)
    print(f"{path.name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    return read_cost_file(path).table


def fitted_part(table: CostTable, lengths: Lengths) -> CostTable:
    chosen = {*lengths.fitted, *lengths.fitted_bytes}
    return table.only(lambda m: m.seq_length in chosen)


def asked_part(first: CostTable, second: CostTable, lengths: Lengths) -> CostTable:
    """The lengths asked for; seconds are the mean of both profiles."""
    again = {_key(m): m for m in second.measurements}
    asked = {*lengths.asked, *lengths.asked_bytes}

    def mean(m: Measurement) -> Measurement:
        other = again.get(_key(m))
        if other is None or not (m.is_timed and other.is_timed):
            return m
        return dataclasses.replace(
            m,
            forward_seconds=(m.forward_seconds + other.forward_seconds) / 2,
            backward_seconds=(m.backward_seconds + other.backward_seconds) / 2,
        )

    chosen = tuple(mean(m) for m in first.measurements if m.seq_length in asked)
    return CostTable(first.description, chosen, first.constants)


def noise(first: CostTable, second: CostTable, lengths: Lengths) -> dict[str, float]:
    """Relative differences of the two profiles where they are asked; of bytes, the largest."""
    again = {_key(m): m for m in second.measurements if m.is_timed and m.operation != "layer"}
    differences: dict[str, list[float]] = {INSIDE: [], TWICE: []}
    bytes_differ = 0.0
    for m in first.measurements:
        other = again.get(_key(m))
        if not m.is_timed or other is None:
            continue
        mine = (m.kept_bytes, m.forward_bytes, m.backward_bytes)
        theirs = (other.kept_bytes, other.forward_bytes, other.backward_bytes)
        for a, b in zip(mine, theirs, strict=True):
            bytes_differ = max(bytes_differ, abs(a - b) / max(a, b, 1))
        if m.seq_length in lengths.asked:
            scope = INSIDE if m.seq_length <= lengths.fitted[-1] else TWICE
            middle = (m.time_seconds + other.time_seconds) / 2
            differences[scope].append(abs(m.time_seconds - other.time_seconds) / middle)
    return {
        "noise_floor": statistics.median(differences[INSIDE]),
        "noise_p95": sorted(differences[INSIDE])[int(0.95 * (len(differences[INSIDE]) - 1))],
        "noise_floor_2x": statistics.median(differences[TWICE]),
        "bytes_differ_max": bytes_differ,
    }


def _key(m: Measurement) -> tuple[str, str, int, int]:
    return m.strategy, m.operation, m.seq_length, m.batch_size


def seconds_to_answer(table: CostTable, path: Path) -> dict[str, float]:
    """Loading a file with the hybrid model; then all strategies at a length not asked before."""
    write_cost_file(path, table, fit_table(table))
    loading, answering = [], []
    for _ in range(20):
        start = time.perf_counter()
        model = read_cost_file(path).require_model()
        loading.append(time.perf_counter() - start)
    for s in range(1000, 3000):
        start = time.perf_counter()
        model.all_operations(s)
        answering.append(time.perf_counter() - start)
    return {
        "predict_microseconds": statistics.median(answering) * 1e6,
        "load_milliseconds": statistics.median(loading) * 1e3,
    }


if __name__ == "__main__":
    main()
