"""Training on packed microbatches: the same documents, losses and counts as one by one."""

from __future__ import annotations

import numpy as np
import pytest

from tests.train.harness import train, write_documents

LENGTHS = np.random.default_rng(5).integers(2, 60, size=80).tolist()
TP2 = ["--tensor-model-parallel-size", 2, "--sequence-parallel"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("data") / "corpus"
    write_documents(prefix, LENGTHS)
    flags = ["--data-path", prefix, "--split", "100,0,0", "--paradyse", "--lr", "1e-3"]
    return [*flags, "--micro-batch-size", 1, "--global-batch-size", 16]


@pytest.fixture(scope="module")
def unpacked(data, tmp_path_factory):
    return train(tmp_path_factory.mktemp("alone"), *data, ranks=1)


def packed(folder, data, *flags, ranks: int):
    return train(folder, *data, "--paradyse-sequences", "packed", *flags, ranks=ranks)


def test_documents_alone_train_as_without_packing(data, unpacked, tmp_path):
    run = packed(tmp_path, data, "--paradyse-pack-tokens", 1, ranks=1)
    for name in ("loss", "grad_norm", "tokens"):
        np.testing.assert_allclose(run.values(name), unpacked.values(name), rtol=1e-6)
