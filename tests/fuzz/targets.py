"""What is fuzzed: every parser of files that somebody else may have written.

parse(folder, content) hands content to a parser as it comes to it in use: as a file of folder, or
as flags. A UserError is an answer; any other exception is a finding.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_paradyse.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
MAX_INPUT_BYTES = 1 << 16


@dataclass(frozen=True)
class Target:
    """seeds(folder): inputs to begin with; folder is empty and may be used."""

    parse: Callable[[Path, bytes], object]
    seeds: Callable[[Path], list[bytes]]


def _file(folder: Path, name: str, content: bytes) -> str:
    path = folder / name
    path.write_bytes(content)
    return str(path)


def _costs(folder: Path, content: bytes) -> None:
    from megatron_paradyse.costs.cost_file import read_cost_file

    file = read_cost_file(_file(folder, "costs.json", content))
    file.require_model()


def _plan(folder: Path, content: bytes) -> None:
    from megatron_paradyse.plan_file import load_plan_file

    load_plan_file(_file(folder, "plan.yaml", content)).plan(range(1, 5))


def _plan_text(folder: Path, content: bytes) -> None:
    from megatron_paradyse.plan import parse_runs

    parse_runs(content.decode("utf-8", errors="replace")).runs()


def _settings(folder: Path, content: bytes) -> None:
    from megatron_paradyse.settings import make_settings

    make_settings({}, _file(folder, "paradyse.yaml", content))


def _run(folder: Path, content: bytes) -> None:
    from megatron_paradyse.train_command import read_run

    read_run(_file(folder, "run.yaml", content)).as_line()


def _flags(folder: Path, content: bytes) -> None:
    """Flags apart by newlines, as a launcher hands them over."""
    import argparse

    from megatron_paradyse.errors import did_you_mean
    from megatron_paradyse.settings import FIELDS, WITHOUT_FLAG, make_settings

    texts = content.decode("utf-8", errors="replace").split("\n")
    parser = argparse.ArgumentParser(exit_on_error=False, add_help=False)
    for name, field in FIELDS.items():
        if name not in WITHOUT_FLAG:
            kind = field.metadata["kind"].flag_type
            parser.add_argument(f"--{name.replace('_', '-')}", type=kind)
    try:
        values, rest = parser.parse_known_args([text for text in texts if text])
    except (argparse.ArgumentError, SystemExit) as error:
        raise UserError(str(error)) from error
    did_you_mean(rest[0] if rest else "", FIELDS)
    make_settings(vars(values), None)


def _trace(folder: Path, content: bytes) -> None:
    from megatron_paradyse.report.trace_file import read_trace, warning_lines

    list(warning_lines(read_trace(_file(folder, "trace.jsonl", content))))


def _index(folder: Path, content: bytes) -> None:
    from megatron_paradyse.data.index import read_index

    _file(folder, "data.idx", content)
    index = read_index(folder / "data")
    int(index.sequence_lengths.sum())


def _metadata(folder: Path, content: bytes) -> None:
    from megatron_paradyse.data.metadata import read_metadata

    read_metadata(_file(folder, "data.json", content)).to_json()


def _fasta(folder: Path, content: bytes) -> None:
    from megatron_paradyse.data.fasta import FastaSource

    path = _file(folder, "genome.fa", content)
    for source in (FastaSource([path], block_bytes=64), FastaSource([path], split_bases=7)):
        for chunk in source.chunks():
            assert len(chunk.data) <= len(content)


def _jsonl(folder: Path, content: bytes) -> None:
    from megatron_paradyse.data.sources import JsonlSource

    source = JsonlSource([_file(folder, "texts.jsonl", content)], max_line_bytes=1 << 14)
    for chunk in source.chunks():
        assert len(chunk.data) <= 3 * len(content)


def _gzip(folder: Path, content: bytes) -> None:
    from megatron_paradyse.data.sources import JsonlSource

    source = JsonlSource([_file(folder, "texts.jsonl.gz", content)], max_line_bytes=1 << 14)
    for chunk in source.chunks():
        assert len(chunk.data) <= 1 << 16


def _device(folder: Path, content: bytes) -> None:
    from megatron_paradyse.simulator.hardware import find_device

    find_device(_file(folder, "gpu.yaml", content))


def _network(folder: Path, content: bytes) -> None:
    from megatron_paradyse.simulator.network import read_network

    read_network(_file(folder, "network.json", content), 4)


def _trials(folder: Path, content: bytes) -> None:
    from megatron_paradyse.preview.measured import read_trials

    read_trials(_file(folder, "trials.json", content))


def _note(folder: Path, content: bytes) -> None:
    from megatron_paradyse.profiler.agree import note_path, take_note

    note_path(folder / "raw.json").write_bytes(content)
    take_note(folder / "raw.json")


def _checkpoint(folder: Path, content: bytes) -> None:
    """A tracker in the first line, and the list of a checkpoint's files in the others."""
    from megatron_paradyse.train.checkpoint_files import LIST, TRACKER, iteration_to_load

    (folder / "iter_0000007").mkdir(exist_ok=True)
    tracker, _, files = content.partition(b"\n")
    _file(folder, TRACKER, tracker)
    _file(folder, "iter_0000007/common.pt", b"0123456789")
    _file(folder, f"iter_0000007/{LIST}", files)
    for wanted in (None, 7):
        iteration_to_load(str(folder), wanted)


def _cost_seeds(folder: Path) -> list[bytes]:
    from megatron_paradyse.costs.cost_file import read_cost_file, write_cost_file
    from tests.train.synthetic_costs import write_costs

    path = write_costs(folder / "seed.json")
    file = read_cost_file(path)
    write_cost_file(folder / "table.json", file.table)
    tiled = json.loads(path.read_text())
    for fit in tiled["model"]["operations"]:
        fit["fits"]["backward_peak_bytes"]["in_tiles"] = {"tokens": 65536, "pieces": [[1, 0, 2, 0]]}
    bent = json.loads(path.read_text())
    for fit in bent["model"]["operations"]:
        fit["fits"]["forward_seconds"]["beyond"] = {"from": 9363, "pieces": [[1, 0, 2, 0]]}
    table = (folder / "table.json").read_bytes()
    files = [json.dumps(values).encode() for values in (tiled, bent)]
    return [path.read_bytes(), *files, table, b'{"schema_version": 1}']


def _trace_seeds(folder: Path) -> list[bytes]:
    from tests.report.samples import records

    lines = [json.dumps(record) for record in records(3)]
    return ["\n".join(lines).encode(), *(line.encode() for line in lines[:3]), b'{"kind": "x"}\n']


def _index_seeds(folder: Path) -> list[bytes]:
    from megatron_paradyse.data.index import HEADER, MAGIC

    lengths = np.array([3, 5], dtype="<i4").tobytes()
    places = np.array([0, 3], dtype="<i8").tobytes()
    documents = np.array([0, 1, 2], dtype="<i8").tobytes()
    whole = HEADER.pack(MAGIC, 1, 1, 2, 3) + lengths + places + documents
    return [whole, whole[:-3], HEADER.pack(MAGIC, 1, 1, 1 << 60, 1 << 60)]


def _metadata_seeds(folder: Path) -> list[bytes]:
    from megatron_paradyse.data.metadata import DatasetMetadata

    metadata = DatasetMetadata(
        tokenizer="bytes",
        tokenizer_parameters={},
        vocab_size=257,
        eod=256,
        append_eod=True,
        dtype="uint16",
        num_documents=2,
        num_tokens=8,
        max_document_tokens=5,
        num_empty_documents=0,
        source="tree",
        source_parameters={},
    )
    return [metadata.to_json().encode()]


def _network_seeds(folder: Path) -> list[bytes]:
    from megatron_paradyse.simulator.network import find_network, write_network

    write_network(str(folder / "seed.json"), find_network("nvlink3", 4))
    return [(folder / "seed.json").read_bytes()]


def _trials_seeds(folder: Path) -> list[bytes]:
    from megatron_paradyse.preview.measured import About, Trial, TrialFile

    file = TrialFile(str(folder / "seed.json"), About("a", 9, 0, 1, 4, 2, False, "cpu", "2", "no"))
    for tokens in (64, 128):
        file.add(Trial("metp", tokens, "fits", "1-4 metp", "2026-11-22", 5, 6, 7))
    file.save()
    return [(folder / "seed.json").read_bytes()]


def _gzip_seeds(folder: Path) -> list[bytes]:
    import gzip

    return [gzip.compress(b'{"text": "abc"}\n'), gzip.compress(b"\n" * 10_000)]


def _read(*patterns: str) -> Callable[[Path], list[bytes]]:
    return lambda folder: [
        path.read_bytes() for pattern in patterns for path in sorted(ROOT.glob(pattern))
    ]


def _given(*texts: str) -> Callable[[Path], list[bytes]]:
    return lambda folder: [text.encode() for text in texts]


_LEVELS = (
    f"&{c} [{', '.join([f'*{p}'] * 9)}]" for p, c in zip("abcdefghi", "bcdefghij", strict=True)
)
_BOMB = f"log: [&a [x, x, x], {', '.join(_LEVELS)}]\n"  # 3 x 9^9 values
TARGETS: dict[str, Target] = {
    "costs": Target(_costs, _cost_seeds),
    "plan": Target(_plan, _read("configs/plans/*.yaml")),
    "plan-text": Target(_plan_text, _given("1-3 megatron_ts, 4 ulysses_z/metp+recompute")),
    "settings": Target(
        _settings,
        lambda f: [
            *_read("configs/*.yaml")(f),
            *_given(_BOMB)(f),
        ],
    ),
    "run": Target(
        _run,
        lambda f: [
            *_read("configs/train-demo.yaml")(f),
            *_given(_BOMB.replace("log", "megatron"))(f),
        ],
    ),
    "flags": Target(
        _flags,
        _given(
            "--policy\noptimal\n--memory-budget\n76GiB\n--smoothing\n0.1",
            "--head-tile\n4K\n--strategies\nmetp,ulysses_z\n--watchdog-seconds\n60\n--order\nx",
        ),
    ),
    "trace": Target(_trace, _trace_seeds),
    "index": Target(_index, _index_seeds),
    "metadata": Target(_metadata, _metadata_seeds),
    "fasta": Target(_fasta, _given(">a\nACGT\nNNAC\n>b\nacgu\n", ">x\r\nAC\r\n;c\nGT")),
    "jsonl": Target(_jsonl, _given('{"text": "a"}\n\n{"text": "\\ud83d\\ude00"}\n', "[1]\n")),
    "gzip": Target(_gzip, _gzip_seeds),
    "device": Target(_device, _given("like: a100-80g\nmemory_bytes: 40GiB\n")),
    "network": Target(_network, _network_seeds),
    "trials": Target(_trials, _trials_seeds),
    "note": Target(_note, _given('{"point": ["metp", "mlp", 64, 1], "status": "oom"}')),
    "checkpoint": Target(
        _checkpoint, _given('7\n{"common.pt": 10}', "release", 'x\n{"common.pt": 10, "../x": 3}')
    ),
}
