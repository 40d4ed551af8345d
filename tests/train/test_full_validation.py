"""--full-validation: each evaluation reads every sample of every validation set once."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from tests.train.harness import attempt, run_forked, train, with_defaults, write_documents

SETS = {"short": [3, 17, 5, 9, 30, 2, 11], "long": [61, 40, 64, 12, 29, 8, 50, 33, 21, 7, 45]}
TP2 = ["--tensor-model-parallel-size", 2, "--sequence-parallel"]
PACKED = ["--paradyse-sequences", "packed", "--paradyse-pack-tokens", 64, "--micro-batch-size", 1]
WHOLE = ["--full-validation", "--multiple-validation-sets", "--eval-interval", 1]
TOLERANCE = 1e-5  # float32 against float64 over four layers


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two validation sets, of neither of which documents fill global batches of 8."""
    folder = tmp_path_factory.mktemp("data")
    write_documents(folder / "train", [20] * 16)
    for seed, (name, lengths) in enumerate(SETS.items()):
        write_documents(folder / name, lengths)
        learnt = np.random.default_rng(seed).random(sum(lengths)) < 1 / 3
        learnt[np.cumsum(lengths) - 1] = True
        (folder / f"{name}.targets").write_bytes(learnt.astype(np.uint8).tobytes())
    paths = ["--train-data-path", folder / "train", "--test-data-path", folder / "train"]
    flags = [*paths, "--lr", 0, "--min-lr", 0, "--train-iters", 3, "--paradyse"]
    return [*flags, "--valid-data-path", *(folder / name for name in SETS)]


@pytest.fixture(scope="module")
def expected(data, tmp_path_factory):
    """By plain PyTorch in float64, which reads the files by itself."""
    folder, losses = tmp_path_factory.mktemp("plain"), []
    for prefix in data[-2:]:
        result = folder / f"{prefix.name}.json"
        argv = [str(result), str(prefix), *with_defaults(data)]
        module = "tests.train.compare_learnt"
        code, _, stderr = run_forked(module, argv, ranks=1, folder=folder, timeout_seconds=120)
        assert code == 0, stderr
        losses.append(json.loads(result.read_text())["loss"])
    return losses


@pytest.fixture(scope="module")
def saved(data, tmp_path_factory):
    """Of one rank, for every grid; its weights are those that it began with."""
    folder = tmp_path_factory.mktemp("saved")
    train(folder, *data, "--save", folder, "--save-interval", 1, ranks=1)
    (folder / "latest_checkpointed_iteration.txt").write_text("1")
    return folder


@pytest.mark.parametrize(
    "ranks, flags",
    [
        (1, []),
        (1, ["--eval-micro-batch-size", 1, "--eval-global-batch-size", 4, "--num-workers", 1]),
        (2, [*TP2, *PACKED, "--paradyse-policy", "random:2", "--num-workers", 1]),
        (2, [*PACKED, "--paradyse-spread", 2, "--paradyse-policy", "random:3"]),
        (4, [*TP2, "--pipeline-model-parallel-size", 2, "--paradyse-head-tile", 8]),
    ],
    ids=["one-rank", "other-batches", "packed-tp2", "packed-over-two-replicas", "tp2-pp2-in-tiles"],
)
def test_every_evaluation_is_of_all_tokens_of_a_set(ranks, flags, data, expected, saved, tmp_path):
    run = train(tmp_path, *data, *WHOLE, *flags, "--load", saved, ranks=ranks)
    found = re.findall(r"validation-(\d) loss at .*? lm loss value: (\S+)", run.stdout)
    assert [number for number, _ in found[:4]] == list("0101")  # and once more at the end
    losses = np.array([float(loss) for _, loss in found]).reshape(-1, 2)
    np.testing.assert_allclose(losses, np.broadcast_to(expected, losses.shape), rtol=TOLERANCE)
    assert "> paradyse: the test split is left out: Megatron cannot" in run.stdout


def test_evaluations_change_nothing_of_the_training(data, tmp_path):
    """Of dropout, say, whose random numbers a loader may take."""
    flags = [*data, "--lr", "1e-2", "--hidden-dropout", 0.1]
    with_them = train(tmp_path / "with", *flags, *WHOLE, ranks=1)
    without = train(tmp_path / "without", *flags, ranks=1)
    for name in ("loss", "grad_norm"):
        assert with_them.values(name).tolist() == without.values(name).tolist()


def test_one_flag_is_enough_and_sets_have_names(data, tmp_path):
    flags = [*WHOLE[:1], "--eval-interval", 2, "--validation-set-names", "brief", "wordy"]
    run = train(tmp_path, *data, *flags, ranks=1)
    assert re.search(r"validation-brief loss at .*\n(.*\n)* validation-wordy loss", run.stdout)
    assert f"> paradyse: validation-wordy is all of {data[-1]}, at each evaluation" in run.stdout


INTERLEAVED = ["--pipeline-model-parallel-size", 2, "--num-layers-per-virtual-pipeline-stage", 1]
REFUSED = {
    "sets alone": (1, WHOLE[1:], "--multiple-validation-sets needs --full-validation in Megatron"),
    "interleaved": (2, [*WHOLE, *INTERLEAVED], "--full-validation with interleaved pipeline stage"),
    "names": (
        1,
        [*WHOLE, "--validation-set-names", "one"],
        "--validation-set-names gives 1 name to 2 data sets: give one to each",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_evaluated_whole_is_refused(case, data, tmp_path):
    ranks, flags, said = REFUSED[case]
    run = attempt(tmp_path, *data, *flags, ranks=ranks)
    assert run.code == 2 and f"error: {said}" in run.stderr


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """Its flags, and the loss of its 11 documents in one batch, whose masks are alike each time."""
    folder = tmp_path_factory.mktemp("bert")
    write_documents(folder / "train", [20] * 16)
    write_documents(folder / "valid", SETS["long"])
    flags = ["--train-data-path", folder / "train", "--valid-data-path", folder / "valid"]
    flags += ["--test-data-path", folder / "valid", "--train-iters", 1, "--paradyse"]
    flags += ["--paradyse-mask-token", 1, "--lr", 0, "--min-lr", 0, "--micro-batch-size", 1]
    batch = ["--eval-iters", 1, "--eval-global-batch-size", 11, "--eval-interval", 1]
    save = ["--save", folder / "saved", "--save-interval", 1]
    run = train(folder, *flags, *batch, *save, ranks=1, entry=("bert",))
    (expected,) = set(re.findall(r"validation loss at .*? lm loss value: (\S+)", run.stdout))
    more = ["--load", folder / "saved", "--finetune", "--eval-global-batch-size", 4]
    return [*flags, *more, *WHOLE], float(expected)


@pytest.mark.parametrize(
    "ranks, flags",
    [(1, []), (4, [*TP2, *PACKED]), (4, [*TP2, "--pipeline-model-parallel-size", 2])],
    ids=["one-rank", "packed-tp2-dp2", "tp2-pp2"],
)
def test_a_bert_predicts_the_masked_tokens_of_a_whole_set(ranks, flags, bert, tmp_path):
    """Nothing of what fills its last batch."""
    of_all, expected = bert
    run = train(tmp_path, *of_all, *flags, ranks=ranks, entry=("bert",))
    found = re.findall(r"validation-0 loss at .*? lm loss value: (\S+)", run.stdout)
    assert found and [float(loss) for loss in found] == pytest.approx([expected] * len(found), 1e-5)
