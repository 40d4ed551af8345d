"""benchmarks/max_length.py --real: whether what is predicted to fit runs on 4 CPU ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from benchmarks.common import finish, spawn
from benchmarks.dynamic_workload import MODEL, PROFILED, RANKS, profile_and_fit
from megatron_paradyse.data.writer import DatasetWriter
from megatron_paradyse.preview.longest import find_longest
from megatron_paradyse.preview.setup import make_setup

BUDGET = "80MiB"
# What the paper's models have besides the sizes, which here are the demo's.
SHAPES = {
    "gpt": [],
    "llama": [
        *("--swiglu", "--ffn-hidden-size", "688", "--normalization", "RMSNorm"),
        *("--position-embedding-type", "rope", "--disable-bias-linear"),
        "--untie-embeddings-and-output-weights",
    ],
    "bert": ["--paradyse-model", "bert"],
}
FACTORS = (0.95, 1.05)
ENFORCED = {"ParaDySe": "optimal"}
ROOT = Path(__file__).resolve().parents[1]


def real(folder: Path, arguments) -> None:
    """Predicted limits without a margin, against what the ranks really need."""
    flags = [str(text) for pair in MODEL.items() for text in pair] + SHAPES[arguments.shape]
    costs = arguments.costs or profile_and_fit(folder, flags, PROFILED, False)
    given = {"policy": "optimal", "memory_budget": BUDGET, "memory_margin": 0.0}
    found = find_longest(make_setup(costs, given))
    limits = {limit.strategy: limit.tokens for limit in (found.paradyse, *found.single)}
    if arguments.quick:
        limits = {name: limits[name] for name in ("megatron_ts", "colossal_z")}
    output = folder / "result.json"
    task = {"limits": limits, "factors": FACTORS, "costs": costs, "budget": BUDGET}
    os.environ["MAX_LENGTH"] = json.dumps({**task, "output": str(output)})
    spawn("benchmarks.max_length_rank", flags, ranks=RANKS, timeout_seconds=3000)
    rows = json.loads(output.read_text())
    enforced = [] if arguments.quick else _enforced(folder, limits, costs, flags)
    result = {
        "rows": rows,
        "right": sum(row["fits"] == (row["factor"] < 1) for row in rows),
        "enforced": enforced,
    }
    shape = arguments.shape
    configuration = {"ranks": RANKS, "budget": BUDGET, "margin": 0, "shape": shape, **MODEL}
    name = "max_length_real" if shape == "gpt" else f"max_length_real_{shape}"
    finish(name, result, configuration, arguments)


def _enforced(folder: Path, limits: dict[str, int], costs: str, flags: list[str]) -> list[dict]:
    """Two iterations of the user's command under --paradyse-memory-budget, and how they ended."""
    rows = []
    for name, policy in ENFORCED.items():
        for factor in FACTORS:
            tokens = int(factor * limits[name]) // (2 * RANKS) * (2 * RANKS)
            rows.append(
                {"strategy": name, "factor": factor, "tokens": tokens}
                | _train(folder / f"{tokens}", policy, tokens, costs, flags)
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def _train(data: Path, policy: str, tokens: int, costs: str, flags: list[str]) -> dict:
    """On one document of that many tokens; its last one is a label only."""
    vocab_size = int(MODEL["--vocab-size"]) - 1  # the last one is a BERT's mask token
    with DatasetWriter(str(data), vocab_size + 1) as writer:
        writer.add_tokens(np.random.default_rng(0).integers(vocab_size, size=tokens + 1))
        writer.end_document()
        writer.commit(
            tokenizer="none",
            tokenizer_parameters={},
            vocab_size=vocab_size + 1,
            eod=None,
            append_eod=False,
            num_empty_documents=0,
            source="synthetic",
            source_parameters={},
        )
    module = "pretrain_bert" if "bert" in flags else "pretrain_gpt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(RANKS), "-m", f"megatron_paradyse.{module}", *flags]
    command += ["--seq-length", str(tokens), "--micro-batch-size", "1", "--global-batch-size", "1"]
    if tokens > int(MODEL["--max-position-embeddings"]):  # RoPE, which has no table of parameters
        command += ["--max-position-embeddings", str(tokens)]
    command += ["--tensor-model-parallel-size", str(RANKS), "--sequence-parallel"]
    command += ["--data-path", str(data), "--split", "1,0,0", "--train-iters", "2", "--lr", "1e-4"]
    command += ["--eval-iters", "0", "--eval-interval", "100", "--num-workers", "0", "--paradyse"]
    command += ["--paradyse-mask-token", str(vocab_size)] if "bert" in flags else []
    command += ["--paradyse-policy", policy]
    command += ["--paradyse-memory-budget", BUDGET, "--log-interval", "1"]
    if not policy.startswith("fixed"):
        command += ["--paradyse-cost-model", costs, "--paradyse-accept-costs"]
        command += ["--paradyse-memory-margin", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=900, env=environment, check=False
    )
    lines = (run.stdout + run.stderr).splitlines()
    error = next((line for line in lines if line.startswith("error")), "")
    return {
        "finished": run.returncode == 0,
        "out_of_memory": "out of memory" in error,
        "error": error[:300],
    }
