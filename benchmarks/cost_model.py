"""How wrong fitted costs are at lengths that were not fitted, measured on CPU ranks.

The profiler measures one model twice, at more lengths than are fitted. The first profile is fitted,
and both models are asked for the other lengths: seconds from fits of 128 to 2,048 tokens, inside
and at twice that range; bytes from fits of 128 to 8,192 tokens, inside and at four times that
range. The true seconds are the mean of both profiles; noise_floor is the median of their
difference at the same points.

--quick measures one strategy once: noise_floor is then null.

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
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import finish, options
from megatron_paradyse.costs.accuracy import (
    INSIDE,
    TWICE,
    Errors,
    measure_accuracy,
    to_json_values,
)
from megatron_paradyse.costs.cost_file import read_cost_file, write_cost_file
from megatron_paradyse.costs.fitting import fit_table
from megatron_paradyse.costs.table import BYTE_QUANTITIES, LAYER, CostTable, Measurement

MODEL = {
    "--num-layers": 4,
    "--hidden-size": 256,
    "--num-attention-heads": 8,
    "--seq-length": 8192,
    "--max-position-embeddings": 32768,
    "--vocab-size": 1024,
    "--attention-dropout": 0,
    "--hidden-dropout": 0,
}
RANKS = 4
KEYS = ("time_median", "time_p95", "time_median_2x", "memory_max", "memory_max_4x")


@dataclasses.dataclass(frozen=True)
class Lengths:
    """timed: for the errors of time. bytes: for those of memory, which ask for far too.

    Each is a pair: lengths that are fitted, lengths that are asked.
    """

    timed: tuple[tuple[int, ...], tuple[int, ...]]
    bytes: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def untimed(self) -> tuple[int, ...]:
        return tuple({*self.bytes[0], *self.bytes[1]} - {*self.timed[0], *self.timed[1]})


FITTED = (128, 168, 216, 272, 352, 456, 584, 752, 968, 1240, 1592, 2048)
ASKED = (144, 240, 400, 664, 1096, 1808)
FULL = Lengths(
    timed=(FITTED, (*ASKED, 3584, 4096)),
    bytes=(
        (*FITTED, 136, 152, 192, 304, 512, 2560, 3200, 4096, 5120, 6400, 8192),
        (*ASKED, 160, 256, 856, 1400, 2304, 3584, 5760, 32768),
    ),
)
QUICK = Lengths(
    timed=((128, 192, 256, 384, 512), (320, 1024)),
    bytes=((128, 192, 256, 384, 512, 136, 160), (320, 144, 1024, 2048)),
)


def main() -> None:
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--folder", help="keep the profiles here, and go on with what is there")
    arguments = parser.parse_args()
    lengths = QUICK if arguments.quick else FULL
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        first = profiled(folder / "profile-first.json", lengths, lengths.untimed, arguments.quick)
        second = first
        if not arguments.quick:
            second = profiled(folder / "profile-second.json", lengths, (), arguments.quick)
        speed = seconds_to_answer(at(first, lengths.bytes[0]), folder / "costs.json")
    timed = measure_accuracy(at(first, lengths.timed[0]), at(mean(first, second), lengths.timed[1]))
    errors = [e for e in timed if e.quantity not in BYTE_QUANTITIES]
    errors += memory_errors(first, *lengths.bytes)
    values = to_json_values(errors)
    result: dict = {"noise_floor": None} | {
        model: {key: summary[key] for key in KEYS} for model, summary in values["summary"].items()
    }
    result |= {f"all_{model}": summary for model, summary in values["summary"].items()}
    if not arguments.quick:
        result |= noise(first, second, lengths.timed)
    result |= speed | {"rows": values["rows"]}
    configuration = {"ranks": RANKS, **dataclasses.asdict(lengths), **MODEL}
    finish("cost_model", result, configuration, arguments)


def at(table: CostTable, lengths: Sequence[int]) -> CostTable:
    return table.only(lambda m: m.seq_length in lengths)


def memory_errors(table: CostTable, fitted: Sequence[int], asked: Sequence[int]) -> list[Errors]:
    """Of bytes; a strategy too large for the longest length asked is asked for a quarter of it.

    It is then fitted up to a sixteenth of it: four times the range all the same.
    """
    far = max(asked)
    table = table.only(lambda m: m.operation != LAYER)
    found = measure_accuracy(at(table, fitted), at(table, asked))
    fits = {
        (m.strategy, m.operation) for m in table.measurements if m.is_ok and m.seq_length == far
    }
    rest = table.only(lambda m: (m.strategy, m.operation) not in fits)
    if rest.measurements:
        fitted = [s for s in fitted if s <= far // 16]
        found += measure_accuracy(at(rest, fitted), at(rest, [far // 4]))
    return [e for e in found if e.quantity in BYTE_QUANTITIES]


def profiled(path: Path, lengths: Lengths, untimed: tuple[int, ...], quick: bool) -> CostTable:
    """The profile at path, once it is complete."""
    timed = (*lengths.timed[0], *lengths.timed[1])
    command = [sys.executable, "-m", "megatron_paradyse", "profile", "--nproc", str(RANKS)]
    command += ["--output", str(path), "--lengths", ",".join(map(str, timed))]
    command += ["--bytes-lengths", ",".join(map(str, untimed or timed))]  # timed: none besides
    if quick:
        command += ["--strategies", "ulysses_z"]
    command += [str(text) for pair in MODEL.items() for text in pair]
    root = str(Path(__file__).resolve().parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    subprocess.run(command, check=True, env=environment, stdout=sys.stderr, timeout=1800)
    print(f"{path.name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    return read_cost_file(path).table


def mean(first: CostTable, second: CostTable) -> CostTable:
    """The first, with the mean seconds of both."""
    again = {_key(m): m for m in second.measurements}

    def of(m: Measurement) -> Measurement:
        other = again.get(_key(m))
        if other is None or not (m.is_timed and other.is_timed):
            return m
        return dataclasses.replace(
            m,
            forward_seconds=(m.forward_seconds + other.forward_seconds) / 2,
            backward_seconds=(m.backward_seconds + other.backward_seconds) / 2,
        )

    return CostTable(first.description, tuple(map(of, first.measurements)), first.constants)


def noise(
    first: CostTable, second: CostTable, lengths: tuple[Sequence[int], Sequence[int]]
) -> dict[str, float]:
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
        if m.seq_length in lengths[1]:
            scope = INSIDE if m.seq_length <= max(lengths[0]) else TWICE
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
