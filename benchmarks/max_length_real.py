"""benchmarks/max_length.py --real: whether what is predicted to fit runs on 4 CPU ranks."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from benchmarks.common import finish
from benchmarks.dynamic_workload import MODEL, PROFILED, RANKS, profile_and_fit
from megatron_paradyse.data.writer import DatasetWriter
from megatron_paradyse.strategies import OFFLOAD, RECOMPUTE, strategy_names

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
# Named, since of costs of a CPU plans offload only what is.
STRATEGIES = ",".join(f"{n}{how}" for n in strategy_names() for how in ("", RECOMPUTE, OFFLOAD))
FACTORS = (0.95, 1.05)
ENFORCED = {"ParaDySe": "optimal"}
ROOT = Path(__file__).resolve().parents[1]


def real(folder: Path, arguments) -> None:
    """Predicted limits without a margin, against what the ranks really need."""
    flags = [str(text) for pair in MODEL.items() for text in pair] + SHAPES[arguments.shape]
    costs = arguments.costs or profile_and_fit(folder, flags, PROFILED, False)
    command = [sys.executable, "-m", "megatron_paradyse", "max-length", costs, "--json"]
    command += ["--memory-budget", BUDGET, "--memory-margin", "0", "--nproc", str(RANKS)]
    command += ["--measure", str(folder / "trials.json")]
    command += ["--strategies", "megatron_ts,colossal_z" if arguments.quick else STRATEGIES]
    run = subprocess.run([*command, *flags], check=True, timeout=3400, stdout=subprocess.PIPE)
    measured = json.loads(run.stdout)["measured"]
    limits = measured["limits"]
    predicted = {limit["strategy"]: limit["predicted"] for limit in limits}
    result = {
        **measured,
        "largest_error": max(abs(limit["error"]) for limit in limits),
        "pairs_in_order": _in_order(limits),
        "enforced": [] if arguments.quick else _enforced(folder, predicted, costs, flags),
    }
    shape = arguments.shape
    configuration = {"ranks": RANKS, "budget": BUDGET, "margin": 0, "shape": shape, **MODEL}
    name = "max_length_real" if shape == "gpt" else f"max_length_real_{shape}"
    finish(name, result, configuration, arguments)


def _in_order(limits: list[dict]) -> float:
    """The share of pairs that the predictions tell apart whose measured limits have that order."""
    pairs = [
        (a["predicted"] - b["predicted"], a["tokens"] - b["tokens"])
        for a, b in itertools.combinations(limits, 2)
    ]
    told = [(x, y) for x, y in pairs if x]
    return sum(x * y >= 0 for x, y in told) / max(1, len(told))


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
    command += ["--nproc-per-node", str(RANKS), "-m", f"megatron_paradyse.{module}"]
    told = flags.index("--vocab-size")  # by the data, which need no tokenizer then
    command += flags[:told] + flags[told + 2 :]
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
        command += ["--paradyse-memory-margin", "0", "--paradyse-strategies", STRATEGIES]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=900, env=environment, check=False
    )
    lines = (run.stdout + run.stderr).splitlines()
    error = next((line for line in lines if line.startswith("error")), "")
    finished, out_of_memory = run.returncode == 0, "out of memory" in error
    if not (finished or out_of_memory):
        raise RuntimeError(f"it tells nothing of memory: {error or lines[-20:]}")
    return {"finished": finished, "out_of_memory": out_of_memory, "error": error[:300]}
