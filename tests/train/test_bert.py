"""A BERT: bidirectional layers, padding, masked tokens, the loss head with and without tiles."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest
import torch

from megatron_paradyse.data.targets import NO_LABEL
from megatron_paradyse.strategies import strategy_names
from megatron_paradyse.train.masking import Masking, mask_tokens
from tests.train.harness import attempt, data_flags, run_forked, train, with_defaults
from tests.train.synthetic_costs import write_costs

TP2 = ["--tensor-model-parallel-size", 2, "--sequence-parallel"]
TP4 = ["--tensor-model-parallel-size", 4, "--sequence-parallel"]
CASES = {"1-whole": (1, []), "4-whole": (4, TP4), "2-tiles": (2, [*TP2, "--paradyse-head-tile", 8])}


@pytest.mark.parametrize("case", CASES)
def test_every_plan_gives_the_losses_and_gradients_of_a_plain_bert(case, tmp_path):
    """Float64 oracle, one sequence padded; on one rank megatron.core's BertModel agrees too."""
    ranks, flags = CASES[case]
    code, stdout, stderr = run_forked(
        "tests.train.compare_bert",
        with_defaults(["--paradyse", "--num-layers", 2, *flags]),
        ranks=ranks,
        folder=tmp_path,
        timeout_seconds=240,
    )
    assert code == 0, stdout[-2000:] + stderr[-4000:]
    assert stdout.count("compared ") == 2 * len(strategy_names()) + 5 + (ranks == 1), stdout


def masked(tokens, lengths, seed=1, share=0.15):
    return mask_tokens(tokens, lengths, Masking(share, 999, 500, seed, iteration=0))


def test_masks_are_of_the_published_shares_and_of_the_tokens_alone():
    tokens = torch.randint(500, (2, 20_000), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([20_000, 3])
    inputs, labels = masked(tokens, lengths)
    predicted = labels != NO_LABEL
    assert predicted.sum(1).tolist() == [3000, 1]
    assert not predicted[1, 3:].any()
    torch.testing.assert_close(labels[predicted], tokens[predicted])
    torch.testing.assert_close(inputs[~predicted], tokens[~predicted])
    became = inputs[0][predicted[0]]
    assert abs((became == 999).double().mean() - 0.8) < 0.03
    assert abs((became == labels[0][predicted[0]]).double().mean() - 0.1) < 0.03
    again, other = masked(tokens, lengths), masked(tokens, lengths, seed=2)
    torch.testing.assert_close(again[0], inputs)
    assert (other[1][0] != labels[0]).any()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    lengths = np.random.default_rng(3).integers(2, 90, size=200).tolist()
    return [*data_flags(tmp_path_factory.mktemp("data"), lengths), "--lr", "1e-3",
            "--paradyse-mask-token", 63, "--micro-batch-size", 2]  # fmt: skip


GRIDS = {
    "tp2": (2, TP2),
    "tp2-dp2": (4, TP2),
    "tp2-pp2": (4, [*TP2, "--pipeline-model-parallel-size", 2]),
}


@pytest.fixture(scope="module")
def one(data, tmp_path_factory):
    """The losses of four iterations on one rank, and its checkpoint of the second."""
    folder = tmp_path_factory.mktemp("one")
    flags = [*data, "--save", folder / "saved", "--save-interval", 2]
    run = train(folder, *flags, ranks=1, entry=("bert",))
    (folder / "saved" / "latest_checkpointed_iteration.txt").write_text("2")
    losses = run.values("loss")
    assert len(losses) == 4 and losses[-1] < losses[0]
    return losses, folder / "saved"


@pytest.mark.parametrize("grid", GRIDS)
def test_a_restart_on_another_grid_with_other_plans_follows(grid, data, one, tmp_path):
    """The same masked tokens on every stage and after a restart; losses to 1e-4."""
    ranks, flags = GRIDS[grid]
    losses, saved = one
    flags = [*data, *flags, "--load", saved, "--paradyse-policy", "random:1"]
    run = train(tmp_path, *flags, ranks=ranks, entry=("bert",))
    np.testing.assert_allclose(run.values("loss"), losses[2:], rtol=1e-4)


PACKED = ["--micro-batch-size", 1, "--paradyse-sequences", "packed", "--paradyse-pack-tokens", 64]
ROWS = {  # two of them over two replicas each
    "tp2-wide": (4, [*TP2, "--paradyse-spread", 2, "--paradyse-policy", "random:4"]),
    "dp4-wide": (4, ["--paradyse-spread", 4, "--paradyse-policy", "fixed:megatron_ts"]),
    "tp2-pp2": (4, [*GRIDS["tp2-pp2"][1], "--paradyse-policy", "random:3"]),
    "one": (1, ["--position-embedding-type", "rope"]),
}


LONG = ["--global-batch-size", 16, "--seq-length", 96, "--train-iters", 3]
LONG += ["--split", "80,20,0", "--eval-iters", 1, "--eval-interval", 3]


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    """By positions: a document a microbatch on one rank, and its checkpoint of iteration 1."""

    @functools.cache
    def run(positions):
        saved = tmp_path_factory.mktemp("alone") / "saved"
        flags = [*data, *LONG, "--position-embedding-type", positions, "--micro-batch-size", 1]
        flags += ["--save", saved, "--save-interval", 1]
        found = train(saved.parent, *flags, ranks=1, entry=("bert",))
        (saved / "latest_checkpointed_iteration.txt").write_text("1")
        return found, saved

    return run


@pytest.mark.parametrize("grid", ROWS)
def test_packed_documents_train_as_they_do_one_by_one(grid, data, alone, tmp_path):
    """The same tokens are masked; some documents are longer than a row, and padded alone."""
    ranks, flags = ROWS[grid]
    expected, saved = alone("rope" if "rope" in flags else "learned_absolute")
    packed = [*data, *LONG, *flags, *PACKED, "--load", saved]
    run = train(tmp_path, *packed, ranks=ranks, entry=("bert",))
    for name in ("loss", "grad_norm", "tokens"):
        np.testing.assert_allclose(run.values(name), expected.values(name)[1:], rtol=1e-5)
    validated = [re.findall(r"validation loss at .*? lm loss value: (\S+)", r.stdout)[0]
                 for r in (run, expected)]  # fmt: skip
    assert float(validated[0]) == pytest.approx(float(validated[1]), rel=1e-5)


REFUSED = {
    "no mask token": (
        ["--paradyse"],
        "the tokenizer has no mask token, of a vocabulary of 64: give",
    ),
    "beyond": (
        ["--paradyse", "--paradyse-mask-token", 72],
        "mask token 72, of a vocabulary of 64: give --paradyse-mask-token",
    ),
    "fixed": (["--paradyse", "--paradyse-sequences", "fixed"], "a BERT: it trains on documents"),
    "a window": (
        ["--paradyse", "--paradyse-mask-token", 5, "--window-size", "8,8"],
        "--window-size 8,8 with a BERT, whose attention is bidirectional: leave --window-size out",
    ),
    "YaRN": (
        ["--paradyse", "--paradyse-mask-token", 5, "--position-embedding-type", "yarn"],
        "--position-embedding-type yarn with a BERT, which Megatron would train without positions",
    ),
    "a GPT": (
        ["--paradyse", "--paradyse-model", "gpt", "--paradyse-mask-token", 5],
        "--paradyse-mask-token 5 has no effect on a GPT",
    ),
    "costs of a GPT": (
        ["--paradyse", "--paradyse-mask-token", 5, "--paradyse-cost-model", "COSTS"],
        "these costs are not of this run: ",
    ),
    "plain": ([], "a BERT without --paradyse, which Megatron has no training of: add --paradyse"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_are_one_line(case, data, tmp_path):
    flags, message = REFUSED[case]
    if "COSTS" in flags:
        flags = [*flags[:-1], write_costs(tmp_path / "costs.json")]
    run = attempt(tmp_path, *data[:2], *flags, ranks=1, entry=("bert",), timeout_seconds=60)
    errors = [line for line in run.stderr.splitlines() if line.startswith("error")]
    assert run.code == 2 and len(errors) == 1 and message in errors[0], run.stderr[-2000:]
