"""Hand-written plans say which strategy which layer runs, and nothing unknown passes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_paradyse.errors import UserError
from megatron_paradyse.plan import LayerChoice, Plan, uniform_plan
from megatron_paradyse.plan_file import load_plan_file
from megatron_paradyse.policy import cost_policy_kind, make_policy
from megatron_paradyse.settings import Settings
from megatron_paradyse.strategies import takes_wide

MIXED = Path(__file__).parents[1] / "configs" / "plans" / "mixed.yaml"


def write(tmp_path, text):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    return str(path)


def test_the_committed_example_reads_as_written():
    plan = make_policy(Settings(policy=f"plan:{MIXED}")).plan(1, 128, [1, 2, 3, 4, 5])
    assert plan.runs() == ("1-2 ulysses_z, 3 megatron_cz/metp, 4 metp+recompute, 5 megatron_ts")


def test_a_fixed_policy_runs_one_strategy_on_every_layer_of_every_stage():
    policy = make_policy(Settings(policy="fixed:metp+recompute"))
    assert policy.strategies == ("metp+recompute",)
    for layers in ([1, 2], [3, 4, 5], [1, 2]):
        assert policy.plan(1, 128, layers) == uniform_plan(layers, "metp+recompute")
    with pytest.raises(UserError, match="no strategy named 'metb'"):
        make_policy(Settings(policy="fixed:metb"))


def test_a_stage_gets_the_plan_of_its_own_layers(tmp_path):
    plan_file = load_plan_file(write(tmp_path, "layers: {1-2: metp, 3-4: ulysses_z}\n"))
    assert plan_file.plan([3, 4]) == uniform_plan([3, 4], "ulysses_z")
    policy = make_policy(Settings(policy=f"plan:{tmp_path / 'plan.yaml'}"))
    assert policy.strategies == plan_file.strategies == ("metp", "ulysses_z")


@pytest.mark.parametrize(
    "text, message",
    [
        ("layers: {1: metb}\n", r"plan.yaml:1: no strategy named 'metb': use one of megatron_ts"),
        ("layers:\n  1-3: metp\n  2: metp\n", r"plan.yaml:3: layer 2 is given twice"),
        ("default: metp\ndefault: ulysses_z\n", r"plan.yaml:2: key 'default' is given twice: keep"),
        (
            "layers:\n  1: {attention: metp, mlp: metp, attention: megatron_ts}\n",
            r"plan.yaml:2: key 'attention' is given twice: keep one",
        ),
        ("layers: {[1, 2]: metp}\n", r"plan.yaml:1: a key is a sequence: write it as a text"),
        ("layers: {3-1: metp}\n", r"plan.yaml:1: '3-1' is not a layer or a range such as 1-4"),
        ("layers: {0: metp}\n", r"'0' is not a layer"),
        ("layers: {1-999999: metp}\n", r"plan.yaml:1: '1-999999' names layers beyond 100,000, the"),
        ("layers: {1-1000000: metp}\n", r"yaml:1: '1-1000000' names layers beyond 100,000, the"),
        (
            "layers:\n" + "".join(f"  {n}: metp\n" for n in range(1, 12_000)),
            r"plan.yaml: more than 20,000 values: write less, layers as ranges such as 1-4",
        ),
        ("layers: {1: {attention: metp}}\n", r"plan.yaml:1: give both attention and mlp"),
        ("layers: {1: {atention: metp}}\n", r"unknown key 'atention': use attention and mlp"),
        ("layer: {1: metp}\n", r"plan.yaml:1: unknown key 'layer': use default and layers"),
        ("layers: {1: }\n", r"plan.yaml:1: expected the name of a strategy, such as megatron_ts"),
        ("default:\n", r"plan.yaml:1: expected the name of a strategy"),
        ("layers: {1: {attention: {a: b}, mlp: metp}}\n", r"plan.yaml:1: expected the name"),
        ("- metp\n", r"expected 'key: value' lines"),
        ("", r"expected 'key: value' lines"),
        ("layers: {}\n", r"the plan is empty"),
        ("layers: [\n", r"is not YAML"),
    ],
)
def test_errors_name_file_line_and_remedy(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        load_plan_file(write(tmp_path, text))


def test_a_layer_without_a_strategy_is_named(tmp_path):
    plan_file = load_plan_file(write(tmp_path, "layers: {1: metp}\n"))
    with pytest.raises(UserError, match="layer 2 has no strategy: add it, or a default"):
        plan_file.plan([1, 2])


def test_a_plan_must_fit_the_number_of_layers():
    policy = make_policy(Settings(policy=f"plan:{MIXED}"))
    policy.check_layers(4)
    with pytest.raises(UserError, match=r"layer 4 is beyond the 3 of the model: drop it"):
        policy.check_layers(3)


def test_a_plan_without_the_last_layer_does_not_fit(tmp_path):
    policy = make_policy(Settings(policy=f"plan:{write(tmp_path, 'layers: {1-3: metp}')}"))
    policy.check_layers(3)
    with pytest.raises(UserError, match="layer 4 has no strategy"):
        policy.check_layers(4)
    policy = make_policy(Settings(policy=f"plan:{write(tmp_path, 'layers: {2-3: metp}')}"))
    with pytest.raises(UserError, match="layer 1 has no strategy"):
        policy.check_layers(3)


@pytest.mark.parametrize("policy", ["fixed", "fixed:", "plan:", "random", "random:", "optima"])
def test_a_policy_without_what_it_needs_is_unknown(policy):
    assert cost_policy_kind(Settings(policy=policy)) is None
    with pytest.raises(UserError, match=f"unknown policy '{policy}': use fixed:STRATEGY"):
        make_policy(Settings(policy=policy))


def test_random_plans_run_wide_rows_by_what_can_alone():
    policy = make_policy(Settings(policy="random:1", strategies=("local_z", "ulysses_z", "metp")))
    names = {}
    for row in (None, SimpleNamespace(groups=1), SimpleNamespace(groups=2)):
        choices = policy.plan(1, 128, range(1, 65), row=row).layers.values()
        names[row and row.groups] = [
            {getattr(c, half) for c in choices} for half in ("attention", "mlp")
        ]
    every = {"local_z", "ulysses_z", "metp"}
    wide = {name for name in every if takes_wide(name)}
    assert wide < every and names == {None: [every] * 2, 1: [every] * 2, 2: [wide, every]}


def test_random_plans_differ_by_microbatch_and_repeat_with_the_seed():
    def draw(seed):
        policy = make_policy(Settings(policy=f"random:{seed}", strategies=("metp", "ulysses_z")))
        places = [(iteration, microbatch) for iteration in (0, 1) for microbatch in (0, 1)]
        return [policy.plan(1, 128, range(1, 9), at=at) for at in places]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert len({plan.runs() for plan in draw(1)}) == 4
    names = {c.attention for plan in draw(1) for c in plan.layers.values()}
    assert names == {"metp", "ulysses_z"}
    assert {c.attention == c.mlp for plan in draw(1) for c in plan.layers.values()} == {True, False}


def test_runs_join_only_neighbouring_layers():
    plan = Plan({1: LayerChoice(), 2: LayerChoice(), 4: LayerChoice()})
    assert plan.runs() == "1-2 megatron_ts, 4 megatron_ts"
