"""Stages and policies of a cost file: what is always there, and Megatron's gather buffer."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import megatron_paradyse.strategies as registry
from megatron_paradyse.costs.description import ELEMENT_BYTES
from megatron_paradyse.errors import UserError
from megatron_paradyse.packing.placement import place
from megatron_paradyse.planner.cache import CAPACITY
from megatron_paradyse.planner.cost_settings import ABLATIONS, read_costs
from megatron_paradyse.planner.from_costs import stage_memory
from megatron_paradyse.planner.from_file import FilePolicies
from megatron_paradyse.settings import Restriction, Settings
from megatron_paradyse.strategies import get_strategy
from megatron_paradyse.strategies.sizes import TILE_ROWS
from tests.train.synthetic_costs import LENGTHS, write_costs

BUFFER = 256 * 4  # bytes a token: h, float32
ANGLES = 4 * 32  # of RoPE, of a head, in float32
LAYERS = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    path = write_costs(tmp_path_factory.mktemp("costs") / "costs.json")
    return Settings(policy="optimal", cost_model=str(path), head_tile=128)


def policies(settings, budget_bytes=150_000_000, **more):
    return FilePolicies(settings, read_costs(settings), budget_bytes, **more)


def problem(settings, s, **parts):
    made = policies(settings)
    return made.policy(made.stage(**parts), smooth=False).problem(LAYERS, 1, s, False)


def test_the_buffer_is_everybodys_up_to_a_tile_and_megatron_ts_own_above(settings):
    below, above = problem(settings, 128), problem(settings, 192)
    static = policies(settings).stage().static_bytes
    # the embedding keeps 4 bytes a token by the laws; fitted, and rounded to whole bytes
    assert below.base_bytes == pytest.approx(static + (4 + BUFFER + ANGLES) * 128, abs=1)
    assert above.base_bytes == pytest.approx(static + (4 + ANGLES) * 192, abs=1)
    assert below.gather_bytes == 0 and above.gather_bytes == BUFFER * 192
    for options in above.layers.values():
        for choice in (*options.attention, *options.mlp):
            assert choice.gathers == (choice.name == "megatron_ts")


def test_an_mlp_that_recomputes_in_tiles_needs_no_buffer_of_megatrons(settings):
    made = policies(settings)
    memory = stage_memory(made.costs.file.require_model().operation, made.stage())
    tile = TILE_ROWS * made.costs.file.table.description.p

    def gathers(operation, name, s):
        return memory.gathers(operation, name, s, 1)

    for name in ("megatron_ts+recompute", "megatron_ts+offload"):
        assert gathers("mlp", name, tile) and not gathers("mlp", name, tile + 1)
        assert gathers("attention", name, tile + 1)
    assert gathers("mlp", "megatron_ts", tile + 1) and not gathers("mlp", "metp", 64)


def test_without_a_head_on_the_stage_only_megatron_ts_has_the_buffer(settings):
    assert problem(settings, 64, has_head=False).gather_bytes == BUFFER * 64


def test_a_stage_without_the_embedding_holds_the_input_it_received(settings):
    made = policies(settings)
    shape = made.costs.file.table.description
    received = shape.model.hidden_size * ELEMENT_BYTES[shape.dtype] // shape.p
    for s, b in ((64, 1), (256, 3)):
        middle = made.stage(has_embedding=False)
        memory = stage_memory(made.model.operation, middle)
        tables = (BUFFER * s * b if made.stage().buffer_free_above >= s * b else 0) + ANGLES * s
        assert memory.embedding_kept(s, b) == received * s * b + tables
        assert memory.embedding_peak(s, b, backward=True) == 0
        last = stage_memory(made.model.operation, dataclasses.replace(middle, held_besides=1.0))
        assert last.embedding_kept(s, b) == 2 * received * s * b + tables
        first = stage_memory(made.model.operation, made.stage())
        assert first.embedding_kept(s, b) == pytest.approx(4 * s * b + tables, abs=b)


@pytest.mark.parametrize("case", ["no tiles", "in flight", "experts"])
def test_the_buffer_is_always_there_where_others_may_make_it(case, settings):
    if case == "no tiles":
        settings = dataclasses.replace(settings, head_tile="off")
    made = policies(settings, megatron_mlp=case == "experts")
    stage = made.stage(num_in_flight=2 if case == "in flight" else 1)
    found = made.policy(stage, smooth=False).problem(LAYERS, 1, 192, False)
    assert found.gather_bytes == 0
    assert found.base_bytes >= stage.static_bytes + BUFFER * 192


def test_the_files_static_bytes_hold_the_buffer_of_its_longest_length(settings):
    assert policies(settings).stage().static_bytes == 1e8 - BUFFER * max(LENGTHS)
    half = policies(settings).stage(share=0.5)
    assert half.static_bytes == (1e8 - BUFFER * max(LENGTHS)) / 2


def edited(settings, path, edit):
    """The settings with a cost file whose content was edited."""
    content = json.loads(Path(settings.cost_model).read_text())
    edit(content)
    path.write_text(json.dumps(content))
    return dataclasses.replace(settings, cost_model=str(path))


def test_an_evaluation_holds_of_head_and_embedding_what_their_forwards_do(settings):
    """No backward runs; its bytes, a head's the most of all here, are for training alone."""
    made = policies(settings)

    def costs_of(strategy, operation, s, b):
        costs = made.model.operation(strategy, operation, s, b)
        sizes = {"kept_bytes": 50.0 * s, "forward_bytes": 3.0 * s, "backward_bytes": 1e6 * s}
        return dataclasses.replace(costs, **sizes) if strategy == "model" else costs

    policy = made.policy(made.stage(), smooth=False)
    policy.memory = stage_memory(costs_of, made.stage())
    training, evaluation = (policy.problem(LAYERS, 1, 192, alone) for alone in (False, True))
    assert (training.head_bytes, training.embedding_bytes) == (1_000_050 * 192, 1_000_000 * 192)
    assert (evaluation.head_bytes, evaluation.embedding_bytes) == (53 * 192, 3 * 192)


@pytest.mark.parametrize("tokens", [64, 1024])
def test_the_buffer_in_static_bytes_is_of_the_tokens_that_the_file_says(tokens, settings, tmp_path):
    """Of fewer where longer lengths were added to a profile, of more where it was cut short."""
    said = edited(
        settings, tmp_path / "x.json", lambda file: file["constants"].update(buffer_tokens=tokens)
    )
    assert policies(said).stage().static_bytes == 1e8 - BUFFER * tokens


def test_the_gradient_of_tied_embeddings_counts_once_beside_the_head(settings, tmp_path):
    """The head's backward makes it, and it waits from there on; that of several heads too.

    A training that has none, or a file that does not tell, takes nothing off the head.
    """
    waiting = 400
    told = edited(
        settings, tmp_path / "x.json", lambda f: f["constants"].update(waiting_bytes=waiting)
    )

    def head_bytes(given, **parts):
        return problem(given, 192, **parts).head_bytes

    whole = head_bytes(settings)
    assert whole > waiting and problem(told, 192).base_bytes == problem(settings, 192).base_bytes
    assert head_bytes(told) == head_bytes(told, waiting_bytes=9999) == whole - waiting
    assert head_bytes(told, waiting_bytes=0) == head_bytes(told, has_embedding=False) == whole
    assert head_bytes(settings, waiting_bytes=waiting) == whole
    (tmp_path / "more").mkdir()
    several = write_costs(tmp_path / "more" / "costs.json", num_predicting=1)
    several = dataclasses.replace(settings, cost_model=str(several))
    same = edited(
        several, tmp_path / "y.json", lambda f: f["constants"].update(waiting_bytes=waiting)
    )
    assert policies(same).stage().waiting_bytes == waiting
    assert policies(same).stage().num_predicting == 1
    assert policies(same).stage(has_head=False).num_predicting == 0


def test_static_bytes_below_their_buffer_are_refused(settings, tmp_path):
    few = edited(
        settings, tmp_path / "x.json", lambda file: file["constants"].update(static_bytes=1000)
    )
    with pytest.raises(
        UserError, match=r"static_bytes 1,000 are fewer than .* 256 tokens: profile into"
    ):
        policies(few).stage()


def test_what_is_always_there_must_fit(settings):
    made = policies(settings, 50_000_000)
    with pytest.raises(UserError, match=r"parameters, gradients and optimizer take 95\.1 MiB of"):
        made.check_room(made.stage())
    made.check_room(made.stage(share=0.4))


def unfitted(settings, path, strategy, operations):
    """The settings with a file that has no costs of a strategy's operations."""

    def edit(file):
        fits = file["model"]["operations"]
        left = [f for f in fits if f["strategy"] != strategy or f["operation"] not in operations]
        assert len(left) == len(fits) - len(operations)
        file["model"]["operations"] = left

    return edited(settings, path, edit)


@pytest.mark.parametrize("operations", [("attention", "mlp"), ("attention",)])
def test_recomputation_without_the_strategys_own_costs_is_not_offered(
    operations, settings, tmp_path
):
    """A layer of which both halves recompute runs the attention again: its costs are needed."""
    without = unfitted(settings, tmp_path / "x.json", "metp", operations)
    made = policies(without, 1 << 40)
    assert made.costs.strategies == ("megatron_ts", "ulysses_z")
    policy = made.policy(made.stage(), smooth=False)
    assert policy.outcome(1, 128, LAYERS).fits
    with pytest.raises(UserError, match=r"no costs of metp, which metp\+recompute needs: profile"):
        read_costs(dataclasses.replace(without, strategies=("metp+recompute",)))


def test_only_what_is_named_is_offered_though_its_costs_need_others(settings):
    made = policies(dataclasses.replace(settings, strategies=("metp+recompute",)))
    found = made.policy(made.stage(), smooth=False).problem(LAYERS, 1, 128, False)
    for options in found.layers.values():
        assert {c.name for c in (*options.attention, *options.mlp)} == {"metp+recompute"}


def test_what_one_layer_may_run_is_not_offered_to_the_others(settings, tmp_path):
    """Against offload: false, and where a CPU's default has no +offload."""
    moves = edited(
        settings, tmp_path / "x.json", lambda f: f["constants"].update(host_bytes_per_second=5e8)
    )
    only = {2: Restriction(("metp+offload",), ("metp", "metp+recompute"))}
    for said in (
        {"offload": False},
        {},
        {"strategies": ("metp", "ulysses_z")},
        {"strategies": ("metp", "ulysses_z"), "policy": "heuristic"},
    ):
        made = policies(dataclasses.replace(moves, layers=only, **said), 1 << 40)
        default = said.get("strategies", ("megatron_ts", "ulysses_z", "metp", "metp+recompute"))
        assert {*made.costs.strategies} == {*default, "metp+offload", "metp+recompute"}
        policy = made.policy(made.stage(), smooth=False)
        found = policy.problem(LAYERS, 1, 128, False).layers
        for number in (1, 3, 4):
            for choices in (found[number].attention, found[number].mlp):
                assert tuple(choice.name for choice in choices) == default
        assert [choice.name for choice in found[2].attention] == ["metp+offload"]
        assert "metp+offload" not in policy.uniforms(1, 128, LAYERS)


def test_a_layer_that_the_model_lacks_is_named(settings):
    """A rule for layer 9 of 4 would otherwise never be used, and nobody told."""
    rule = {9: Restriction(("metp",), ("metp",))}
    with pytest.raises(UserError, match="there is no layer 9 in a model of 4: give 1 to 4"):
        policies(dataclasses.replace(settings, layers=rule), 1 << 40)


@pytest.mark.parametrize(
    "source, gain", [("measured", 0.05), ("stand-in", 0.0), ("simulated", 0.0)]
)
def test_measured_costs_mix_for_a_gain_of_5_percent(source, gain, settings, tmp_path):
    text = json.loads(Path(settings.cost_model).read_text())
    text["description"]["source"] = source
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(text))
    settings = dataclasses.replace(settings, cost_model=str(path))
    made = policies(settings)
    assert made.policy(made.stage()).gain == gain
    given = policies(dataclasses.replace(settings, mixing_gain=0.2))
    assert given.policy(given.stage()).gain == 0.2


@pytest.mark.parametrize("kind", ["optimal", "heuristic"])
def test_a_strategy_of_another_package_is_planned_where_it_says_that_it_runs(
    kind, settings, tmp_path, monkeypatch
):
    """By the length that there is, though lengths up to the same multiple of 64 share costs."""
    asked = []

    def takes(microbatch, p):
        asked.append(microbatch.documents)
        return p == 4 and microbatch.seq_length > 150

    mine = dataclasses.replace(get_strategy("ulysses_z"), name="mine", takes=takes)
    point = SimpleNamespace(load=lambda: mine)
    monkeypatch.setattr(registry, "_third_party", lambda: {"mine": point})
    path = tmp_path / "costs.json"
    path.write_text(Path(settings.cost_model).read_text().replace('"ulysses_z"', '"mine"'))
    said = dataclasses.replace(settings, policy=kind, cost_model=str(path))
    made = policies(said, 1 << 40)
    policy = made.policy(made.stage())
    for s in (160, 140, 160):
        names = {choice.attention for choice in policy.plan(1, s, LAYERS).layers.values()}
        assert ("mine" in names) == (s == 160)
        assert (policy.barred(1, s) == {"mine"}) == (s == 140)
    row = place([64, 32], 4, causal=True)
    assert policy.barred(1, row.seq_length, row) == {"mine"}
    assert {*asked} == {None, (row.documents,)}
    longer = place([96, 80, 16], 4, causal=True)
    outcome = policy.outcome(1, longer.seq_length, LAYERS, row=longer)
    assert {choice.attention for choice in outcome.plan.layers.values()} == {"mine"}
    wide = dataclasses.replace(place([64, 32], 8, causal=True), groups=2)
    assert not policy.barred(1, wide.group_length, wide)  # says takes_wide, and nothing of lengths


@pytest.mark.parametrize("part", [None, *ABLATIONS])
def test_each_part_of_algorithm_1_can_be_left_out(part, settings):
    name = "heuristic" if part is None else f"heuristic:no-{part}"
    made = policies(dataclasses.replace(settings, policy=name))
    policy, plain = made.policy(made.stage()), made.policy(made.stage(), smooth=False)
    assert policy.gamma == (None if part == "smoothing" else 0.05) and plain.gamma is None
    assert policy.capacity == (0 if part == "cache" else CAPACITY)
    parts = dataclasses.asdict(policy.planner)
    assert parts == {name: name.replace("_", "-") != part for name in parts} and len(parts) == 4


def test_the_heuristic_takes_no_gain(settings):
    settings = dataclasses.replace(settings, policy="heuristic", mixing_gain=0.1)
    with pytest.raises(UserError, match=r"mixing-gain has no effect with .* heuristic"):
        read_costs(settings)


def test_replicas_that_share_experts_run_no_mlp_again(settings):
    """One would wait in the experts' exchange for replicas whose plan does not run theirs again."""
    strategies = ("metp", "metp+recompute")
    some = dataclasses.replace(settings, strategies=strategies)
    made = policies(some, experts_shared=True)
    options = made.policy(made.stage(), smooth=False).problem(LAYERS, 1, 128, False).layers[1]
    assert [choice.name for choice in options.attention] == [*strategies]
    assert [choice.name for choice in options.mlp] == ["metp"]
    made = policies(dataclasses.replace(some, strategies=strategies[1:]), experts_shared=True)
    with pytest.raises(UserError, match="and replicas that run experts together"):
        made.policy(made.stage(), smooth=False).problem(LAYERS, 1, 128, False)
