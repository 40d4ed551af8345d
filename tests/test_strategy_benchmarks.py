"""The benchmarks of strategies, edges and placement run, and print the keys that reports read."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
KEYS = {
    "edges": {"rows"},
    "gpu_dropout": {"both_over_none", "sizes"},
    "gpu_ring": {"ratio_to_single_call", "sizes"},
    "placement": {
        "imbalance_max",
        "windowed_imbalance_max",
        "bytes_ratio_max",
        "padding_max",
        "solve_cpu_seconds_max",
    },
    "parity": {"cases", "failures", "max_rel_error_fp32", "max_bf16_error_over_single_process"},
    "strategies": {"rows"},
}
VOCABULARY_BYTES = 1024 // 2 * 4  # of a token's logits on one of two ranks: in tiles never all
MOMENTS = ("forward", "kept", "backward")
ROW = {"strategy", "p", "s", "seconds", "comm_bytes", "kept_bytes", "forward_bytes"}


@pytest.mark.parametrize("name", KEYS)
def test_quick_benchmark_prints_one_json_object_with_its_keys(name):
    script = [sys.executable, ROOT / "benchmarks" / f"{name}.py", "--json", "--quick"]
    run = subprocess.run(script, capture_output=True, text=True, timeout=120, check=True)
    result = json.loads(run.stdout.splitlines()[-1])
    assert set(result) >= KEYS[name] | {"hardware", "versions", "date", "configuration"}
    if name == "gpu_ring":
        (size,) = result["sizes"]
        assert size["relative_difference"] < 1e-5 and size["kernel"] == "torch CPU flash"
        assert result["ratio_to_single_call"] == size["ratio_to_single_call"]
    if name == "placement":
        assert result.pop("imbalance_max") <= 1.10 and result.pop("rows")
        assert result["windowed_imbalance_max"] <= 1.10 and result["windowed_rows"]
    if name == "edges":
        rows = [row for row in result.pop("rows") if row["maker"] == "all"]
        found = {(row["edge"], row["moment"]): row["bytes_per_token"] for row in rows}
        assert set(found) == {*itertools.product(("embedding", "head"), MOMENTS)}
        assert min(found.values()) > 0 and max(found.values()) < VOCABULARY_BYTES
    for row in result.get("rows", ()):
        assert set(row) >= ROW | {"backward_bytes"}
