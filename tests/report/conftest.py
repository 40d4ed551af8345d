"""One report for all tests that look at it."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from megatron_paradyse.cli import cli
from tests.report.samples import RUN, fitted, iteration, microbatch, records, write_trace


@pytest.fixture(scope="session")
def costs(tmp_path_factory):
    return fitted(tmp_path_factory.mktemp("costs"))


@pytest.fixture(scope="session")
def made(tmp_path_factory, costs):
    """A report of two starts with memory that ran out, with costs: its folder and its JSON."""
    folder = tmp_path_factory.mktemp("report")
    run = {**RUN, "costs": {**RUN["costs"], "fingerprint": costs.fingerprint}}
    failed = {**microbatch(9), "kind": "out_of_memory", "memory_margin": 0.03}
    trace = write_trace(folder / "trace.jsonl", [*records(8, run=run), failed, run, iteration(9)])
    arguments = [str(trace), "--costs", costs.path, "-o", str(folder / "page.html"), "--json"]
    result = CliRunner().invoke(cli, ["report", *arguments])
    assert result.exit_code == 0, result.output
    return folder, json.loads(result.stdout)
