"""The strategy that docs/extending.md adds as an example runs, and is right."""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import patch

from tests import latent_layers
from tests.strategies.cases import FLOAT32_TOLERANCE, AttentionCase, MlpCase
from tests.strategies.deviations import combine
from tests.strategies.harness import run_ranks
from tests.strategies.layers import run_case

DOCUMENT = Path(__file__).parents[2] / "docs" / "extending.md"


def _example():
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    namespace: dict = {}
    exec(compile(code, str(DOCUMENT), "exec"), namespace)
    return namespace["STRATEGY"]


def _run(group, case):
    with patch("tests.strategies.layers.get_strategy", lambda name: _example()):
        return run_case(group, case)


def _run_on_latents(group, case):
    with patch("megatron_paradyse.attention.get_strategy", lambda name: _example()):
        return latent_layers.run(group, case)


def test_documented_strategy_takes_latents():
    case = latent_layers.LatentCase("gather_z", 2, softmax="learnable")
    found = run_ranks(2, _run_on_latents, {"latents": case})["latents"]
    assert latent_layers.worst_error(case, found)[0] < 1e-6


def test_documented_strategy_matches_the_reference():
    cases = [
        AttentionCase("gather_z", 2, "causal", g=2, rope="half", bias=True),
        AttentionCase("gather_z", 2, "packed_causal", dropout=0.2),
        AttentionCase("gather_z", 2, "padded", g=1, offset=True),
        AttentionCase("gather_z", 2, "causal", g=1, bias=True, gate=True),
        MlpCase("gather_z", 2, gated=True),
    ]
    for name, ranks in run_ranks(2, _run, {case.name: case for case in cases}).items():
        errors = {tensor: part.relative for tensor, part in combine(ranks).items()}
        assert max(errors.values()) <= FLOAT32_TOLERANCE, (name, errors)
