"""The copy of an embedding's several sequences, where costs are of one."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from megatron_paradyse.costs.accuracy import measure_accuracy
from megatron_paradyse.costs.embedding_copy import embedding_copy
from megatron_paradyse.costs.fit_values import read_model, write_model
from megatron_paradyse.costs.fitting import fit_table
from megatron_paradyse.costs.table import Constants, CostTable, Measurement
from tests.costs.synthetic import DESCRIPTION
from tests.simulator.small_models import GPT, simulated

TOKEN = 256 * 4  # bytes of h values


@pytest.mark.parametrize(
    ("changes", "bytes_per_token", "most_tokens"),
    [
        ({"head_tile": "4096"}, TOKEN * 3 / 4, 4096),
        ({"head_tile": "off"}, TOKEN * 3 / 4, math.inf),
        ({"head_tile": "4096", "dtype": "bfloat16"}, TOKEN * 3 / 8, 4096),
        ({"head_tile": "4096", "p": 1}, TOKEN, math.inf),  # no ranks, no tiles
    ],
)
def test_a_copy_is_of_all_tokens_but_the_ranks_share(changes, bytes_per_token, most_tokens):
    copy = embedding_copy(dataclasses.replace(DESCRIPTION, **changes))
    assert (copy.bytes_per_token, copy.most_tokens) == (bytes_per_token, most_tokens)
    assert copy(64, 1) == 0
    assert copy(64, 2) == 128 * bytes_per_token
    assert copy(4096, 2) == (0 if most_tokens == 4096 else 8192 * bytes_per_token)


@pytest.mark.parametrize("operation", ["embedding", "prediction"])
@pytest.mark.parametrize("batch_sizes", [(1,), (1, 2)])
def test_only_costs_of_one_sequence_need_it_and_files_tell_it_again(operation, batch_sizes):
    points = [
        Measurement("model", operation, s, b, "ok", 1e-3, 1e-3, 4.0 * s * b, 1024.0 * s * b)
        for s in (64, 128, 256)
        for b in batch_sizes
    ]
    description = dataclasses.replace(DESCRIPTION, head_tile="4096")
    table = CostTable(description, tuple(points), Constants(0.0, 0.0))
    model = fit_table(table)
    copied = 0 if 2 in batch_sizes else 256 * TOKEN * 3 / 4
    values = json.loads(json.dumps(write_model(model)))
    for one in (model, read_model(values, table)):
        found = one.predict("model", operation, "forward_bytes", 128, 2)
        assert found == pytest.approx(256 * 1024 + copied)
        assert one.predict("model", operation, "forward_bytes", 256) == pytest.approx(256 * 1024)


def test_accuracy_asks_for_two_sequences_as_a_model_of_the_file_does():
    """It left the copy out, and told an error of 43% where there is none."""
    description = dataclasses.replace(DESCRIPTION, head_tile="4096")

    def table_of(b: int) -> CostTable:
        forward = b * (1024.0 + (b - 1) * TOKEN * 3 / 4)
        points = [
            Measurement("model", "embedding", s, b, "ok", 1e-3, 1e-3, 4.0 * s * b, forward * s)
            for s in (64, 128, 256, 512)
        ]
        return CostTable(description, tuple(points), Constants(0.0, 0.0))

    found = {e.quantity: e.errors for e in measure_accuracy(table_of(1), table_of(2), ("hybrid",))}
    assert found["forward_bytes"] == pytest.approx([0.0] * 4, abs=1e-9)


def test_the_embedding_of_two_sequences_follows_from_that_of_one(tmp_path):
    """With learnt positions, and all tokens in one tile."""
    more = {"lengths": (64, 128, 256), "batch_sizes": (1, 2), "strategies": ("megatron_ts",)}
    table = simulated(tmp_path, GPT[:-2], 2, **more)
    of_one = tuple(m for m in table.measurements if m.batch_size == 1)
    model = fit_table(dataclasses.replace(table, measurements=of_one))
    for m in table.measurements:
        if (m.operation, m.batch_size) == ("embedding", 2):
            found = model.operation("model", "embedding", m.seq_length, 2)
            assert found.kept_bytes + found.forward_bytes == pytest.approx(
                m.kept_bytes + m.forward_bytes, rel=0.02
            )
