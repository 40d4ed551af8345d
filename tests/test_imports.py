"""Data flows downward inside the package: who may import whom, read from the sources."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import megatron_paradyse

PACKAGE = "megatron_paradyse"
ROOT = Path(megatron_paradyse.__file__).parent
MODULES = {
    ".".join((PACKAGE, *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in sorted(ROOT.rglob("*.py"))
}
# Tables of numbers and choices among names: never tensors, never Megatron.
WITHOUT_TORCH = ("plan", "plan_file", "policy", "settings", "errors", "units", "strategies")
WITHOUT_TORCH += ("simulator.hardware", "simulator.network", "simulator.models", "train.summary")
WITHOUT_TORCH += ("report.figures", "report.page", "train_command", "doctor.checks")
WITHOUT_TORCH += ("packing", "setting_kinds", "flag_file", "schema_command")
# Each may import those after it, besides errors and units; nothing below imports what is above.
LAYERS = (
    ("cli",),
    ("launch", "pretrain_gpt"),
    ("train",),
    ("layer_specs",),
    ("submodules",),
    ("hook", "model_edges"),
    ("policy",),
    ("settings", "plan_file"),
    ("setting_kinds",),
    ("plan", "data", "edges", "packing"),
    ("strategies",),
)


def _imports(module: str) -> Iterator[tuple[str, bool]]:
    """What a module imports, as full names, and whether importing the module runs it."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    for node, runs in _statements(tree.body, True):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, runs
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield (full if full in MODULES else str(node.module)), runs


def _statements(body, runs: bool) -> Iterator[tuple[ast.AST, bool]]:
    for node in body:
        yield node, runs
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        later = typing_only or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for field in ("body", "orelse", "finalbody", "handlers"):
            yield from _statements(getattr(node, field, []), runs and not later)


def _is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def _unit(name: str) -> str:
    """The module or folder directly inside the package."""
    return name.split(".")[1] if "." in name else ""


TENSORS_AND_GROUPS = [m for m in MODULES if _unit(m) in ("strategies", "edges")]


@pytest.mark.parametrize("module", TENSORS_AND_GROUPS)
def test_strategies_and_edges_know_neither_megatron_nor_plans(module):
    known = ("strategies", "errors", "live_bytes", _unit(module))
    for name, _ in _imports(module):
        assert not _is_in(name, "megatron")
        if _is_in(name, PACKAGE):
            assert _unit(name) in known, f"{module} imports {name}"


def test_a_strategy_imports_no_other_strategy():
    package = f"{PACKAGE}.strategies"
    registered = {f"{package}.{name}" for name in _built_in()}
    for module in registered:
        others = {name for name, _ in _imports(module)} & registered
        assert not others, f"{module} imports {others}"


def _built_in() -> tuple[str, ...]:
    from megatron_paradyse.strategies import BUILT_IN

    return BUILT_IN


def test_nothing_imports_what_lies_above_it():
    height = {unit: i for i, layer in enumerate(LAYERS) for unit in layer}
    for module in MODULES:
        for name, _ in _imports(module):
            if _is_in(name, PACKAGE) and _unit(module) in height and _unit(name) in height:
                above = height[_unit(name)] < height[_unit(module)]
                assert not above, f"{module} imports {name}, which lies above it"


def test_units_import_each_other_in_no_circle():
    graph: dict[str, set[str]] = {}
    for module in MODULES:
        used = {_unit(name) for name, runs in _imports(module) if runs and _is_in(name, PACKAGE)}
        graph.setdefault(_unit(module), set()).update(used - {_unit(module), ""})
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError


def test_choosing_imports_no_torch():
    """In a fresh process: the planner answers in microseconds and runs where torch is not."""
    names = ", ".join(f"{PACKAGE}.{name}" for name in WITHOUT_TORCH)
    script = (
        f"import sys, {names}\n"
        "from megatron_paradyse.strategies import strategy_names\n"
        "strategy_names()\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'megatron'}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_the_reader_of_imports_sees_them_all():
    found = dict(_imports(f"{PACKAGE}.attention"))
    assert found[f"{PACKAGE}.strategies.order"] and found["megatron.core.transformer.attention"]
    assert not dict(_imports(f"{PACKAGE}.strategies.contract"))["torch"]  # for type checkers only
    assert not dict(_imports(f"{PACKAGE}.strategies"))[f"{PACKAGE}.strategies.recompute"]
