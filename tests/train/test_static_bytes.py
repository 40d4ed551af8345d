"""What a rank holds always is counted where it trains, whatever grid the costs were measured on."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from torch import optim

from megatron_paradyse.planner.pipeline import held_besides
from megatron_paradyse.train.static_bytes import static_bytes
from megatron_paradyse.units import bytes_text
from tests.train.harness import LLAMA, run_forked, with_defaults, write_documents
from tests.train.synthetic_costs import write_costs

TP2 = ["--tensor-model-parallel-size", 2, "--sequence-parallel"]
PP2 = ["--pipeline-model-parallel-size", 2, "--micro-batch-size", 1]
SHARED = ["--use-distributed-optimizer"]
WIDE = ["--hidden-size", 128, "--num-layers", 4]
GRIDS = {
    "replicas that share the optimizer's states, evaluated": [
        *(*TP2, *SHARED, "--bf16", "--grad-reduce-in-bf16"),  # a step then has copies in float32
        *("--eval-iters", 1, "--eval-interval", 1, "--split", "50,50,0"),
    ],
    "stages of replicas that share": [*PP2, *SHARED, "--bf16"],
    "interleaved stages, momentum": [
        *(*TP2, *PP2, "--num-layers-per-virtual-pipeline-stage", 1, *LLAMA, "--optimizer", "sgd"),
    ],
}


LEFT_BYTES = 60_000  # of inputs and losses, when an iteration has ended


def held(folder, costs, flags, *, ranks=4, length=40) -> tuple[list[dict], str]:
    """Of each rank, trained by cost within a budget, and what was said."""
    prefix, output = folder / "corpus", folder / "held"
    write_documents(prefix, [length] * 40)
    given = ["--data-path", prefix, "--split", "100,0,0", "--paradyse", "--train-iters", 3]
    given += ["--paradyse-policy", "optimal", "--paradyse-cost-model", costs]
    given += ["--paradyse-accept-costs", "--paradyse-memory-budget", "300MB", *WIDE]
    code, stdout, stderr = run_forked(
        "tests.train.holding",
        [str(output), *with_defaults([*given, *flags])],
        ranks=ranks,
        folder=folder,
        timeout_seconds=200,
    )
    assert code == 0, stderr[-4000:]
    return [json.loads(path.read_text()) for path in sorted(folder.glob("held-*.json"))], stdout


@pytest.mark.parametrize("grid", GRIDS)
def test_what_a_rank_holds_is_told_before_the_first_iteration(grid, tmp_path):
    """With the states that the optimizer makes later; the cost file's 100 MB have no part in it.

    An evaluation holds no more.
    """
    costs, flags = write_costs(tmp_path / "costs.json"), GRIDS[grid]
    found, stdout = held(tmp_path, costs, flags)
    for rank in found:
        assert len(rank["held"]) == 3
        assert rank["held"] == pytest.approx([rank["told"]] * 3, abs=LEFT_BYTES)
    stages = [found[:2], found[2:]] if "--pipeline-model-parallel-size" in flags else [found]
    most = ", ".join(bytes_text(max(rank["told"] for rank in one)) for one in stages)
    assert f"> paradyse: parameters, gradients and optimizer hold {most} of a rank's" in stdout


def test_where_nothing_trains_no_gradients_are_to_come(tmp_path):
    flags = [*TP2, "--skip-train", "--split", "0,50,50", "--eval-iters", 1]
    found, _ = held(tmp_path, write_costs(tmp_path / "costs.json"), flags, ranks=2)
    for rank in found:
        assert rank["held"] == []
        assert rank["parameters"] <= rank["told"] < rank["parameters"] + LEFT_BYTES


def test_the_last_stage_holds_the_gradient_of_the_input_before(tmp_path):
    """Beside one microbatch in flight; on the first stage, as many as there are in flight."""
    costs, length = write_costs(tmp_path / "costs.json", scale_bytes=0.1), 1024
    x = length * 128 * 4  # of a layer's input
    peaks = []
    for batch in (1, 4):
        flags = [*PP2, "--global-batch-size", batch, "--paradyse-strategies", "metp+recompute"]
        flags += ["--seq-length", length, "--train-iters", 2]
        found, _ = held(tmp_path / str(batch), costs, flags, ranks=2, length=length)
        peaks.append([max(rank["peaks"]) for rank in found])
    more = peaks[1][1] - peaks[0][1]
    assert more == pytest.approx(held_besides(1, 2, 4) * x, abs=LEFT_BYTES)
    assert held_besides(1, 2, 1) == held_besides(0, 2, 4) == 0


OPTIMIZERS = {
    "RMSprop": optim.RMSprop,
    "RMSprop, centered": partial(optim.RMSprop, centered=True, momentum=0.9),
    "Adadelta": optim.Adadelta,
    "Rprop": optim.Rprop,
    "Adagrad": optim.Adagrad,
    "ASGD": optim.ASGD,
    "Adafactor": optim.Adafactor,
    "NAdam": optim.NAdam,
    "SGD": optim.SGD,
    "SGD, momentum": partial(optim.SGD, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_pytorchs_optimizer_makes_is_told_before_it_is_made(name):
    """And the gradients of its parameters, which no chunk has: of a module around one, say."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = [(96, 64), (2, 48, 32), (512,)]
    parameters = [torch.nn.Parameter(torch.ones(shape, device=device)) for shape in shapes]
    optimizer = OPTIMIZERS[name](parameters)
    told = static_bytes([], optimizer, None)
    sum(parameter.square().sum() for parameter in parameters).backward()
    optimizer.step()
    held = [*parameters, *(parameter.grad for parameter in parameters)]
    held += [one for state in optimizer.state.values() for one in state.values()]
    counts = 100  # of steps, a few numbers each
    assert told == pytest.approx(sum(tensor.nbytes for tensor in held), abs=counts)
