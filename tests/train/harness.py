"""Runs real Megatron trainings on CPU ranks, each with a time limit."""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]

MODEL = {
    "--num-layers": 4,
    "--hidden-size": 64,
    "--num-attention-heads": 8,
    "--seq-length": 64,
    "--max-position-embeddings": 4096,
    "--micro-batch-size": 2,
    "--global-batch-size": 4,
    "--train-iters": 4,
    "--lr": "1e-2",
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": 64,
    "--make-vocab-size-divisible-by": 8,
    "--log-interval": 1,
    "--eval-iters": 0,
    "--eval-interval": 100,
    "--num-workers": 0,
    "--attention-dropout": 0,
    "--hidden-dropout": 0,
    "--clip-grad": 1.0,
}
IN_PLACE_OF = {
    "--train-samples": "--train-iters",
    "--step-batch-size-schedule": "--global-batch-size",
}
LLAMA = [
    *("--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope"),
    *("--group-query-attention", "--num-query-groups", "4", "--disable-bias-linear"),
    "--untie-embeddings-and-output-weights",
]

LATENT = [
    *("--multi-latent-attention", "--q-lora-rank", "24", "--kv-lora-rank", "16"),
    *("--qk-head-dim", "12", "--qk-pos-emb-head-dim", "8", "--v-head-dim", "16", "--qk-layernorm"),
    *("--position-embedding-type", "rope", "--no-rope-fusion", "--disable-bias-linear"),
    *("--swiglu", "--normalization", "RMSNorm", "--untie-embeddings-and-output-weights"),
]


@dataclass
class Run:
    """What a training printed and measured."""

    code: int
    stdout: str
    stderr: str
    records: list[dict]

    def values(self, name: str) -> np.ndarray:
        return np.array([record[name] for record in self.records], dtype=np.float64)


def estimates(lines: list[str]) -> list[str]:
    """Of the summary of a training: what each strategy alone would have taken."""
    (first,) = [i for i, line in enumerate(lines) if line.startswith("  estimated by the cost")]
    return list(itertools.takewhile(lambda line: line.startswith("  "), lines[first + 1 :]))


def train(
    folder: Path,
    *flags: object,
    ranks: int,
    entry: tuple[str, ...] = ("module",),
    timeout_seconds: float = 240,
) -> Run:
    """As attempt(); asserts a good end."""
    run = attempt(folder, *flags, ranks=ranks, entry=entry, timeout_seconds=timeout_seconds)
    crash = run.stderr.partition("Fatal Python error")[2][:3000]
    assert run.code == 0, (
        f"exit code {run.code}\n{crash}\n{run.stdout[-3000:]}\n{run.stderr[-6000:]}"
    )
    return run


def attempt(
    folder: Path,
    *flags: object,
    ranks: int,
    entry: tuple[str, ...] = ("module",),
    timeout_seconds: float = 120,
) -> Run:
    """Train on forked ranks, with MODEL's flags overridden by `flags`, whatever comes of it.

    Its code is 124 where it was ended at its limit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / "record.json"
    record.unlink(missing_ok=True)
    argv = [str(record), *entry, *with_defaults(flags)]
    code, stdout, stderr = run_forked(
        "tests.train.driver", argv, ranks=ranks, folder=folder, timeout_seconds=timeout_seconds
    )
    records = json.loads(record.read_text()) if record.exists() else []
    return Run(code, stdout, stderr, records)


def train_under_torchrun(*flags: object, ranks: int, timeout_seconds: float) -> Run:
    """Train as a user starts it, and return whatever came of it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "megatron_paradyse.pretrain_gpt"]
    result = run_bounded([*command, *with_defaults(flags)], timeout_seconds=timeout_seconds)
    return Run(*result, records=[])


def with_defaults(flags: tuple[object, ...] | list[object]) -> list[str]:
    """MODEL's flags, less those that are given, and the given ones; a plain policy unless given."""
    given = [str(flag) for flag in flags]
    chosen = {"--paradyse-policy", "--paradyse-config", "--paradyse-cost-model"} & {*given}
    if "--paradyse" in given and not chosen:
        given += ["--paradyse-policy", "fixed:megatron_ts"]
    left_out = {*given, *(default for flag, default in IN_PLACE_OF.items() if flag in given)}
    defaults = [text for k, v in MODEL.items() if k not in left_out for text in (k, str(v))]
    return defaults + given


def run_forked(
    module: str, argv: list[str], *, ranks: int, folder: Path, timeout_seconds: float
) -> tuple[int, str, str]:
    """Run module.main() on ranks forked from a process that has Megatron imported."""
    answer, stdout, stderr = _ask(module, argv, ranks, folder, timeout_seconds)
    assert isinstance(answer, int)
    return answer, stdout, stderr


def run_each(
    module: str, argv: list[str], *, ranks: int, folder: Path, timeout_seconds: float
) -> tuple[list[int | None], str, str]:
    """As run_forked, but no rank's end ends another: their exit codes, None for one that hung."""
    answer, stdout, stderr = _ask(module, argv, ranks, folder, timeout_seconds, each=True)
    assert isinstance(answer, list)
    return answer, stdout, stderr


def _ask(
    module: str,
    argv: list[str],
    ranks: int,
    folder: Path,
    timeout_seconds: float,
    each: bool = False,
) -> tuple[int | list[int | None], str, str]:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("stdout", "stderr"):
        (folder / name).unlink(missing_ok=True)
    request = {
        "ranks": ranks,
        "module": module,
        "argv": argv,
        "folder": str(folder),
        "timeout_seconds": timeout_seconds,
        "each": each,
    }
    server = _fork_server()
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    assert answer, "the fork server died"
    texts = [(folder / name).read_text(errors="replace") for name in ("stdout", "stderr")]
    return json.loads(answer), *texts


@functools.cache
def _fork_server() -> subprocess.Popen:
    """One for the whole test session; it ends when its stdin closes with this process."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.train.forkserver"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=_environment(),
        cwd=ROOT,
        start_new_session=True,
    )
    while True:
        line = server.stdout.readline()
        assert line, "the fork server did not start"
        if line.strip() == "ready":
            return server


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    # Whether there is a GPU is asked before ranks are forked: not of CUDA, which would refuse them.
    own |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    return {**os.environ, **own, "MEGATRON_PARADYSE_CACHE": _cache_folder().name}


@functools.cache
def _cache_folder() -> tempfile.TemporaryDirectory:
    """Costs that trainings of this test session make for themselves."""
    return tempfile.TemporaryDirectory()


def run_bounded(command: list[str], *, timeout_seconds: float) -> tuple[int, str, str]:
    """Run a command in a process group of its own, which is ended with it or at the limit."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(),
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        raise AssertionError(
            f"no end within {timeout_seconds} s\n{stdout[-2000:]}\n{stderr[-4000:]}"
        ) from None
    return process.returncode, stdout, stderr


def write_documents(prefix: Path, lengths: list[int], *, vocab_size: int = 63, seed: int = 0):
    """A Megatron data set of documents of the given token counts, learnable by a small model."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    builder = IndexedDatasetBuilder(str(prefix) + ".bin", dtype=np.uint8)
    for length in lengths:
        start, step = random.integers(vocab_size), random.integers(1, 4)
        tokens = (start + step * np.arange(length)) % vocab_size
        builder.add_document(torch.from_numpy(tokens), [length])
    builder.finalize(str(prefix) + ".idx")


def data_flags(folder: Path, lengths: list[int], split: str = "100,0,0") -> list[object]:
    """The flags of a training on documents of these token counts, which are written there."""
    write_documents(folder / "corpus", lengths)
    return ["--data-path", folder / "corpus", "--split", split, "--paradyse"]
