"""Prompts are read and not learnt: by every way of making microbatches, on every grid."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from tests.train.harness import attempt, run_forked, train, with_defaults, write_documents

LENGTHS = [3, 61, 17, 40, 5, 29, 64, 12]  # one global batch
TP2 = ["--tensor-model-parallel-size", 2, "--sequence-parallel"]
PACKED = ["--paradyse-sequences", "packed", "--paradyse-pack-tokens", 64, "--micro-batch-size", 1]
TOLERANCE = 1e-5  # float32 against float64 over four layers


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Documents of which about a third is learnt, of each at least the last token."""
    prefix = tmp_path_factory.mktemp("data") / "chats"
    write_documents(prefix, LENGTHS)
    learnt = np.random.default_rng(3).random(sum(LENGTHS)) < 1 / 3
    learnt[np.cumsum(LENGTHS) - 1] = True
    prefix.with_suffix(".targets").write_bytes(learnt.astype(np.uint8).tobytes())
    flags = ["--data-path", prefix, "--split", "100,0,0", "--paradyse", "--lr", "1e-3"]
    return [*flags, "--global-batch-size", 8]


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    """One rank, padded microbatches of four. Saves the first of three iterations."""
    folder = tmp_path_factory.mktemp("alone")
    flags = ["--save", folder / "saved", "--save-interval", 1, "--micro-batch-size", 4]
    run = train(folder, *data, *flags, "--train-iters", 3, ranks=1)
    (folder / "saved" / "latest_checkpointed_iteration.txt").write_text("1")
    return run, folder / "saved"


def test_loss_and_gradient_are_of_the_learnt_tokens_alone(data, alone, tmp_path):
    """Against plain PyTorch in float64, which reads the files by itself."""
    result = tmp_path / "plain.json"
    argv = [str(result), str(data[1]), *with_defaults(data)]
    module = "tests.train.compare_learnt"
    code, _, stderr = run_forked(module, argv, ranks=1, folder=tmp_path, timeout_seconds=120)
    assert code == 0, stderr
    plain = json.loads(result.read_text())
    others = plain.pop("loss of others")
    for name, value in plain.items():
        assert alone[0].values(name)[0] == pytest.approx(value, rel=TOLERANCE), name
    assert others != pytest.approx(plain["loss"], rel=50 * TOLERANCE)  # they would be noticed


@pytest.mark.parametrize(
    "ranks, flags",
    [
        (1, ["--micro-batch-size", 1]),
        (2, [*TP2, *PACKED, "--paradyse-policy", "random:2"]),
        (2, [*PACKED, "--paradyse-spread", 2, "--paradyse-policy", "random:3"]),
        (4, [*TP2, "--pipeline-model-parallel-size", 2, "--paradyse-head-tile", 8]),
    ],
    ids=["one-by-one", "packed-tp2", "packed-over-two-replicas", "tp2-pp2-in-tiles"],
)
def test_the_grid_and_packing_change_neither_loss_nor_gradient(ranks, flags, data, alone, tmp_path):
    expected, checkpoint = alone
    run = train(tmp_path, *data, *flags, "--load", checkpoint, "--train-iters", 3, ranks=ranks)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(run.values(name), expected.values(name)[1:], rtol=TOLERANCE)
    assert re.search(r"> train: 8 sequences of .*; 3\d\.\d% of the tokens are learnt", run.stdout)


def test_further_tokens_are_learnt_where_they_are_targets(data, tmp_path):
    """Multi-token prediction: rows equal documents one by one."""
    flags = [*data, "--mtp-num-layers", 1, "--train-iters", 2, "--position-embedding-type", "rope"]
    one_by_one = train(tmp_path / "alone", *flags, "--micro-batch-size", 1, ranks=1)
    rows = train(tmp_path / "rows", *flags, *PACKED, *TP2, ranks=2)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(rows.values(name), one_by_one.values(name), rtol=TOLERANCE)


def test_data_of_which_nothing_is_learnt_are_refused_as_such(tmp_path):
    prefix = tmp_path / "chats"
    write_documents(prefix, LENGTHS)
    prefix.with_suffix(".targets").write_bytes(bytes(sum(LENGTHS)))
    flags = ["--data-path", prefix, "--split", "100,0,0", "--paradyse"]
    run = attempt(tmp_path / "run", *flags, ranks=1)
    assert run.code == 2
    assert "error: the train split has no document with a token to learn: change" in run.stderr
    assert "add data, or give another --data-path" in run.stderr


def test_loaders_that_would_learn_every_token_are_refused(data, tmp_path):
    fixed = attempt(tmp_path / "fixed", *data, "--paradyse-sequences", "fixed", ranks=1)
    assert fixed.code == 2
    assert (
        "chats.targets says that not every token is learnt, and Megatron's loader" in fixed.stderr
    )
    bert = attempt(tmp_path / "bert", *data, entry=("bert",), ranks=1)
    assert bert.code == 2 and "a BERT may learn all: train a GPT" in bert.stderr
