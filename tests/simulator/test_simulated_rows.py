"""Packed rows as a GPU runs them, simulated: documents side by side are one call of its kernel."""

from __future__ import annotations

import pytest

from megatron_paradyse.costs.cost_file import read_cost_file
from megatron_paradyse.costs.row_accuracy import DERIVED, measure_row_accuracy
from tests.train.harness import run_forked

FLAGS = ["--num-layers", 2, "--hidden-size", 128, "--num-attention-heads", 8, "--swiglu",
         "--group-query-attention", "--num-query-groups", 4, "--position-embedding-type", "rope",
         "--disable-bias-linear", "--vocab-size", 512]  # fmt: skip


TWO = ["--strategies", "ulysses_z,megatron_cz"]
OPTIONS = {
    "joined": ["--attention-dropout", 0],
    "windows": [*TWO, "--attention-dropout", 0, "--window-size", "256,0"],  # joined where shorter
    "dropout": [*TWO, "--attention-dropout", 0.1],  # one by one, in tiles that memory never holds
}


@pytest.fixture(scope="module", params=OPTIONS)
def errors(request, tmp_path_factory):
    """Of rows of 2 to 32 documents, on 4 ranks."""
    path = tmp_path_factory.mktemp("costs") / "raw.json"
    simulate = ["simulate", "--gpu", "h100-80g", "--ranks", 4, "--lengths", "1K,2K,4K", "--packed"]
    argv = [*simulate, "-o", path, *FLAGS, *OPTIONS[request.param]]
    code, _, stderr = run_forked(
        "megatron_paradyse.__main__",
        [str(text) for text in argv],
        ranks=1,
        folder=path.parent,
        timeout_seconds=240,
    )
    assert code == 0, stderr
    return [one for one in measure_row_accuracy(read_cost_file(path).table) if one.form == DERIVED]


def test_no_rank_holds_more_than_predicted(errors):
    """Each document adds rows to what the kernel's backward sums in."""
    assert max(error.documents for error in errors) == 32
    assert {"ulysses_z", "megatron_cz", "local_z"} <= {error.strategy for error in errors}
    for error in errors:
        assert -0.002 < error.peak_bytes < 1, error  # of 256 tokens of a rank, most of all
