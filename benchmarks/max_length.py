"""The longest sequence that each strategy and ParaDySe can train on 8 x 80 GB, simulated.

The paper's three models at full width, of one node (GPT and LLaMA 8 layers, BERT 24), with 16 and 8
bytes of state per parameter: simulated costs, fitted, and `megatron-paradyse max-length`. One limit
is checked by simulating exactly that length. No GPU runs. Simulating takes about a minute a
model on a free core; --folder keeps the cost files and reuses those that are there.

--real instead: on 4 CPU ranks, the limit of each strategy and of ParaDySe, measured
(`max-length --measure`) beside the predicted one; and trainings of the user's command under the
enforced budget at 0.95 and 1.05 times ParaDySe's predicted limit.

    .venv/bin/python benchmarks/max_length.py --json
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import finish, fitted_costs, names_of, options
from benchmarks.max_length_real import SHAPES, real
from megatron_paradyse.costs.cost_file import read_cost_file, write_cost_file
from megatron_paradyse.costs.offloaded import host_link, offloaded
from megatron_paradyse.planner import evaluate
from megatron_paradyse.planner.from_costs import cost_source, stage_memory
from megatron_paradyse.planner.policies import OptimalPolicy
from megatron_paradyse.preview.longest import Longest, find_longest
from megatron_paradyse.preview.longest_text import longest_values
from megatron_paradyse.preview.peak_parts import peak_parts
from megatron_paradyse.preview.setup import Setup, make_setup
from megatron_paradyse.strategies import RECOMPUTE, base_name, names_of_costs, offloads

# Lengths reach beyond what any plan can train; the bends of the bytes lie between them.
LENGTHS = {
    "gpt": "16K,64K,192K,384K,640K,1M,1536K,2560K",
    "llama": "16K,64K,256K,512K,1M,1536K,2560K,4M",
    "bert": "64K,256K,1M,2M,4M,9M,18M,36M",
}
GOALS = {"gpt": 1 << 20, "llama": 2 << 20, "bert": 9 << 20}
STATE_BYTES = (16, 8)
DEVICE, SIMULATED_RANKS = "a100-80g", 8
SHORT = "8K"
VERIFIED = ("gpt", 16)
COMMAND = [sys.executable, "-m", "megatron_paradyse"]
ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--folder", help="keep the simulated cost files here, and reuse them")
    parser.add_argument(
        "--models", type=names_of(LENGTHS), default=",".join(LENGTHS), help="comma-separated"
    )
    parser.add_argument("--real", action="store_true", help="on 4 CPU ranks instead")
    parser.add_argument("--shape", choices=SHAPES, default="gpt", help="--real: of the model")
    told = "--real: a fitted cost file of the model, not a profile"
    parser.add_argument("--costs", type=fitted_costs, help=told)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        if arguments.real:
            real(Path(temporary), arguments)
            return
        folder = Path(arguments.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        names = arguments.models[: 1 if arguments.quick else None]
        rows = [row for name in names for row in _rows(folder, name, quick=arguments.quick)]
        verify = VERIFIED[0] in names and not arguments.quick
        verified = _verify(folder, *VERIFIED) if verify else None
    _print(rows)
    print(f"simulated at exactly the limit: {json.dumps(verified)}", file=sys.stderr)
    configuration = {"device": DEVICE, "ranks": SIMULATED_RANKS, "lengths": LENGTHS}
    finish("max_length", {"rows": rows, "verified": verified}, configuration, arguments)


def _rows(folder: Path, name: str, *, quick: bool) -> list[dict]:
    rows = []
    for state_bytes in STATE_BYTES:
        costs = _costs(folder, name, state_bytes, quick=quick)
        setup, found = _limits(costs)
        _, without = _limits(costs, offload=False)
        values = longest_values(setup, found)
        best = found.best()
        rows.append(
            {
                "model": name,
                "state_bytes": state_bytes,
                "goal_tokens": GOALS[name],
                "goal_reached": found.paradyse.tokens >= GOALS[name],
                "best_single": best.strategy if best else None,
                "best_single_tokens": best.tokens if best else 0,
                "peak": _parts(setup, found),
                "without_offload": {
                    "paradyse_tokens": without.paradyse.tokens,
                    "paradyse_seconds": without.forecast and without.forecast.seconds,
                    "ratio_to_best_single": without.ratio(),
                },
                **{key: value for key, value in values.items() if key != "costs"},
            }
        )
    return rows


def _parts(setup: Setup, found: Longest) -> dict | None:
    """What ParaDySe's peak consists of at its limit."""
    if found.forecast is None:
        return None
    return dataclasses.asdict(peak_parts(setup, found.forecast))


def _limits(costs: Path, *, offload: bool | None = None) -> tuple[Setup, Longest]:
    setup = make_setup(str(costs), {"policy": "optimal", "offload": offload})
    return setup, find_longest(setup)


def _costs(folder: Path, name: str, state_bytes: int, *, quick: bool) -> Path:
    """The fitted cost file; of the second state size only the static bytes are simulated anew."""
    name_of_file = f"{name}-{state_bytes}{'-quick' if quick else ''}"
    path = folder / f"{name_of_file}.json"
    if path.is_file():
        return path
    lengths = ",".join(LENGTHS[name].split(",")[:: 3 if quick else 1])
    raw = folder / f"{name_of_file}-raw.json"
    if state_bytes == STATE_BYTES[0]:
        _simulate(raw, name, state_bytes, lengths)
        fit = [*COMMAND, "fit", str(raw), "-o", str(path)]
        subprocess.run(fit, check=True, timeout=600, stdout=sys.stderr)
        return path
    first = read_cost_file(_costs(folder, name, STATE_BYTES[0], quick=quick))
    _simulate(raw, name, state_bytes, SHORT, "megatron_ts")
    constants = read_cost_file(raw).table.constants  # with the short length's buffer, as they say
    table = dataclasses.replace(first.table, constants=constants)
    write_cost_file(path, table, first.require_model())
    return path


def _simulate(
    output: Path, name: str, state_bytes: int, lengths: str, strategies: str | None = None
) -> None:
    command = [*COMMAND, "simulate", "--gpu", DEVICE, "--ranks", str(SIMULATED_RANKS)]
    command += ["--model", name, "--state-bytes", str(state_bytes), "--lengths", lengths]
    command += ["--strategies", strategies] if strategies else []
    subprocess.run(
        [*command, "-o", str(output)], check=True, timeout=3600, stdout=sys.stderr, cwd=ROOT
    )


def _verify(folder: Path, name: str, state_bytes: int) -> dict:
    """ParaDySe's plan at its limit: its peak by fitted costs, and by costs simulated there."""
    setup, found = _limits(_costs(folder, name, state_bytes, quick=False))
    outcome, tokens = found.paradyse.outcome, found.paradyse.tokens
    assert outcome is not None
    used = {n for c in outcome.plan.layers.values() for n in (c.attention, c.mlp)}
    names = sorted({part for name in used for part in names_of_costs(name)})
    raw = folder / f"{name}-{state_bytes}-at-{tokens}.json"
    if not raw.is_file():
        _simulate(raw, name, state_bytes, str(tokens), ",".join(names))
    table = read_cost_file(raw).table
    costs = {(m.strategy, m.operation): m.costs for m in table.measurements}

    def to_host(recomputed):
        link = host_link(table)
        assert link is not None, "simulated costs have it"
        return offloaded(recomputed, link)

    def costs_of(strategy, operation, s, b):
        if offloads(strategy):
            return to_host(costs[base_name(strategy) + RECOMPUTE, operation])
        return costs[strategy, operation]

    source, memory = cost_source(costs_of, to_host), stage_memory(costs_of, setup.stage)
    policy = OptimalPolicy(tuple(sorted({*used, *names})), source, memory)
    simulated = evaluate(policy.problem(setup.layers, 1, tokens, False), outcome.plan)
    assert simulated is not None
    return {
        "model": name,
        "tokens": tokens,
        "plan": outcome.plan.runs(),
        "fitted_peak_bytes": outcome.peak_bytes,
        "simulated_peak_bytes": simulated.peak_bytes,
        "peak_error": outcome.peak_bytes / simulated.peak_bytes - 1,
        "fitted_seconds": outcome.seconds,
        "simulated_seconds": simulated.seconds,
    }


def _print(rows: list[dict]) -> None:
    header = (
        "| model | bytes of state | ParaDySe | best single strategy | ratio | without +offload | "
        "without +recompute"
    )
    print(f"{header} | goal |", file=sys.stderr)
    for row in rows:
        print(
            f"| {row['model']} | {row['state_bytes']} | {row['paradyse']['tokens']:,} | "
            f"{row['best_single']}, {row['best_single_tokens']:,} | "
            f"{row['ratio_to_best_single']:.3f} | "
            f"{row['without_offload']['paradyse_tokens']:,} | "
            f"{row['ratio_to_best_single_without_recompute']:.2f} | {row['goal_tokens']:,} |",
            file=sys.stderr,
        )


if __name__ == "__main__":
    start = time.monotonic()
    main()
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)
