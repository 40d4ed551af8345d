"""Properties over generated problems."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_paradyse.plan import LayerChoice, Plan
from megatron_paradyse.planner import Choice, LayerOptions, OptimalPlanner, Problem, evaluate

bytes_ = st.integers(0, 40)


@st.composite
def problems(draw):
    names = [f"s{i}" for i in range(draw(st.integers(1, 4)))]

    def half():
        return tuple(
            Choice(name, draw(st.integers(0, 9)) / 4, draw(bytes_), draw(bytes_), draw(bytes_))
            for name in names
        )

    kinds = [LayerOptions(half(), half()) for _ in range(draw(st.integers(1, 2)))]
    layers = {
        number: kinds[draw(st.integers(0, len(kinds) - 1))]
        for number in range(1, draw(st.integers(1, 12)) + 1)
    }
    return Problem(
        layers,
        draw(st.integers(0, 600)),
        base_bytes=draw(bytes_),
        head_bytes=draw(bytes_),
        embedding_bytes=draw(bytes_),
        granularity=draw(st.sampled_from(["operation", "layer", "sequence"])),
    )


@settings(max_examples=300, deadline=None)
@given(problems(), st.randoms(use_true_random=False))
def test_no_plan_of_a_random_draw_is_better(problem, rng):
    outcome = OptimalPlanner().plan(problem)
    assert outcome == OptimalPlanner().plan(problem)
    again = evaluate(problem, outcome.plan)
    assert (again.peak_bytes, again.exceeds_bytes) == (outcome.peak_bytes, outcome.exceeds_bytes)
    assert abs(again.seconds - outcome.seconds) < 1e-9
    for _ in range(10):
        layers = {}
        uniform = rng.choice(problem.layers[1].attention).name
        for number, options in problem.layers.items():
            attention, mlp = rng.choice(options.attention).name, rng.choice(options.mlp).name
            if problem.granularity == "layer":
                mlp = attention
            if problem.granularity == "sequence":
                attention = mlp = uniform
            layers[number] = LayerChoice(attention, mlp)
        drawn = evaluate(problem, Plan(layers))
        assert outcome.fits or not drawn.fits, "over budget though something fits"
        if drawn.fits:
            assert outcome.seconds <= drawn.seconds + 1e-9
        if not outcome.fits:
            assert outcome.peak_bytes <= drawn.peak_bytes


def test_planning_imports_no_torch():
    code = (
        "import sys, megatron_paradyse.planner, megatron_paradyse.planner.policies; "
        "assert not {'torch', 'xgboost', 'megatron', 'scipy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
