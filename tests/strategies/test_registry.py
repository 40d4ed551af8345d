"""The registry: names, modifiers, third parties, refusals."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import megatron_paradyse.strategies as registry
from megatron_paradyse.errors import UserError
from megatron_paradyse.strategies import get_strategy, parse_strategy_name, strategy_names
from megatron_paradyse.strategies.contract import (
    AttentionShape,
    AttentionWeights,
    Microbatch,
    MlpWeights,
)
from megatron_paradyse.strategies.marks import FLAG_OF_MARK, check_heeds

FOLDER = Path(registry.__file__).parent


def _shape(n: int, g: int, d: int = 8) -> AttentionShape:
    return AttentionShape(num_heads=n, num_kv_heads=g, head_dim=d, causal=True, softmax_scale=1.0)


@pytest.mark.parametrize("name", strategy_names())
def test_a_strategy_is_found_by_its_own_name(name):
    assert get_strategy(name).name == name
    for suffix in ("+recompute", "+offload"):
        assert get_strategy(name + suffix).name == name + suffix
        assert parse_strategy_name(name + suffix) == (name, True)
    with pytest.raises(UserError, match="each also with"):
        parse_strategy_name(f"{name}+offload+recompute")


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(UserError, match=r"no strategy named 'ulyses_z': use one of .*ulysses_z"):
        get_strategy("ulyses_z")


def test_refusals_name_rule_values_and_remedy():
    with pytest.raises(
        UserError, match=r"ulysses_z needs n % p == 0, got n=12, p=8: use megatron_cz, or p=4"
    ):
        get_strategy("ulysses_z").check(_shape(12, 12), 8)
    with pytest.raises(UserError, match=r"megatron_ts needs n % p == 0, got n=12, p=8"):
        get_strategy("megatron_ts").check(_shape(12, 12), 8)
    with pytest.raises(UserError, match=r"g % p == 0 or p % g == 0, got g=6, p=4"):
        get_strategy("megatron_ts").check(_shape(12, 6), 4)
    with pytest.raises(UserError, match=r"n % g == 0"):
        _shape(12, 5)
    with pytest.raises(UserError, match=r"\(n \+ 2g\) d % p == 0"):
        get_strategy("megatron_cz").check(_shape(6, 1), 3)
    with pytest.raises(UserError, match=r"\(2n \+ 2g\) d % p == 0"):
        get_strategy("megatron_cz").check(replace(_shape(6, 1), output_gate=True), 5)


def give(monkeypatch, strategy):
    """By the entry point `mine`, as another package does."""
    point = SimpleNamespace(load=lambda: strategy)
    monkeypatch.setattr(registry, "_third_party", lambda: {"mine": point})


def test_third_party_strategy_is_found_through_its_entry_point(monkeypatch):
    give(monkeypatch, replace(get_strategy("megatron_ts"), name="mine", title="Mine"))
    assert "mine" in strategy_names()
    assert registry.get_strategy.__wrapped__("mine").title == "Mine"
    assert registry.get_strategy.__wrapped__("mine+recompute").title == "Mine+recompute"


BROKEN = {
    "gone:STRATEGY": r"cannot be imported, ModuleNotFoundError: No module named 'gone': repair",
    "json:STRATEGY": r"cannot be imported, AttributeError: .*'json' has no attribute 'STRATEGY'",
    "json:dumps": r"not an object of the class Strategy, but function: name one",
    "megatron_paradyse.strategies.contract:Strategy": r"class Strategy, but Strategy: name one",
    "megatron_paradyse.strategies.metp:STRATEGY": r"calls itself 'metp': give both the same name",
}


@pytest.mark.parametrize("value", BROKEN)
def test_an_entry_point_that_gives_no_strategy_is_refused_by_its_name(value, monkeypatch):
    point = EntryPoint("mine", value, registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "_third_party", lambda: {"mine": point})
    with pytest.raises(UserError, match=f"^entry point 'mine' of .*{BROKEN[value]}"):
        registry.get_strategy.__wrapped__("mine")


def test_an_entry_point_may_not_have_the_name_of_a_built_in_strategy(monkeypatch):
    """It was left aside without a word."""
    point = EntryPoint("metp", "theirs:METP", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "_third_party", lambda: {"metp": point})
    assert strategy_names().count("metp") == 1
    said = r"^entry point 'metp' of .*: a built-in .*: rename it, or .* \(theirs:METP\)$"
    for name in ("metp", "metp+recompute"):
        with pytest.raises(UserError, match=said):
            registry.get_strategy.__wrapped__(name)
    assert registry.get_strategy.__wrapped__("ulysses_z").name == "ulysses_z"


@pytest.mark.parametrize("part", ["check", "takes"])
def test_errors_of_another_packages_answers_are_told_as_its_own(part, monkeypatch):
    def fail(*_):
        raise KeyError("gone")

    give(monkeypatch, replace(get_strategy("metp"), name="mine", **{part: fail}))
    strategy = registry.get_strategy.__wrapped__("mine")
    with pytest.raises(UserError, match=f"^strategy mine: {part} ends with KeyError: 'gone': rep"):
        getattr(strategy, part)(None, 2)


@pytest.mark.parametrize(("part", "value"), [("check", None), ("mlp", 3), ("takes", "all")])
def test_a_part_that_is_no_function_is_refused(part, value, monkeypatch):
    give(monkeypatch, replace(get_strategy("metp"), name="mine", **{part: value}))
    with pytest.raises(UserError, match=rf"'mine' .*: {part} is {value!r}, not a function: give"):
        registry.get_strategy.__wrapped__("mine")


RESULTS = {
    "as due": (lambda x: x, None),
    "nothing": (lambda x: None, "a NoneType, where"),
    "wider numbers": (torch.Tensor.double, r"\[4, 2, 8\] in torch.float64, where"),
    "all ranks' rows": (lambda x: torch.cat((x, x)), r"\[8, 2, 8\] in torch.float32, where"),
}


@pytest.mark.parametrize("case", RESULTS)
@pytest.mark.parametrize("part", ["attention", "mlp", "tiled_mlp"])
def test_what_another_packages_strategy_returns_is_held_to_the_contract(part, case, monkeypatch):
    """Megatron would go on with what adds up: another dtype, or with p = 1 more rows."""
    result, said = RESULTS[case]
    given = replace(get_strategy("metp"), name="mine", **{part: lambda x, *_: result(x)})
    give(monkeypatch, given)
    x, weight = torch.zeros(4, 2, 8), torch.zeros(8, 8)
    weights = (AttentionWeights if part == "attention" else MlpWeights)(weight, weight)
    run = getattr(registry.get_strategy.__wrapped__("mine"), part)
    if said is None:
        assert run(x, weights, None, None) is x
        return
    due = r" \[s/p, b, h\] = \[4, 2, 8\] in torch.float32 is due: repair"
    with pytest.raises(UserError, match=f"^strategy mine: {part} returns {said}{due}"):
        run(x, weights, None, None)


def test_a_microbatch_that_another_packages_strategy_cannot_run_is_refused(monkeypatch):
    """Why it cannot is the strategy's own: of local_z alone it is where documents lie."""
    takes = replace(get_strategy("megatron_ts"), name="mine", takes=lambda m, p: m.seq_length > 99)
    give(monkeypatch, takes)
    registry.check_takes("mine+recompute", Microbatch(100, 1), 2)
    with pytest.raises(UserError, match=r"^mine cannot run .* of s=99 over p=2 ranks: use "):
        registry.check_takes("mine", Microbatch(99, 1), 2)
    with pytest.raises(UserError, match=r"^local_z .*=2 ranks, as not every document lies on one"):
        registry.check_takes("local_z", Microbatch(100, 1), 2)


@pytest.mark.parametrize("mark", FLAG_OF_MARK)
@pytest.mark.parametrize("name", [*registry.BUILT_IN, "metp+recompute", "megatron_cz+offload"])
def test_a_strategy_that_does_not_heed_what_the_model_has_is_refused(name, mark):
    """It would compute another attention than the model's."""
    strategy, has = get_strategy(name), {"offset": False, "latents": False, "gate": False}
    without = replace(strategy, **{mark: False})
    check_heeds(without, **has)
    has[mark.removeprefix("takes_")] = True
    check_heeds(strategy, **has)
    refused = f"{re.escape(name)} knows nothing of {FLAG_OF_MARK[mark]} "
    with pytest.raises(UserError, match=refused):
        check_heeds(without, **has)


def test_asking_for_names_imports_no_torch():
    code = (
        "import sys, megatron_paradyse.strategies as s; assert s.strategy_names();"
        "assert 'torch' not in sys.modules"
    )
    root = FOLDER.parents[1]
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True, cwd=root)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_strategies_import_neither_megatron_nor_each_other(path):
    others = set(strategy_names()) - {path.stem}
    for node in ast.walk(ast.parse(path.read_text())):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        for module in modules:
            assert module.split(".")[0] != "megatron", (path.name, module)
            assert module.split(".")[-1] not in others, (path.name, module)
