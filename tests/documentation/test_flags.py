"""docs/flags.md has every flag of the package, and every flag of Megatron's that it refuses."""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys

import pytest

from megatron_paradyse.settings import FIELDS
from megatron_paradyse.train.arguments import add_arguments
from tests.documentation.markdown import ROOT, documents

PAGE = ROOT / "docs" / "flags.md"
TEXT = PAGE.read_text(encoding="utf-8")
TABLE = TEXT.partition("## Megatron's flags")[2]
REFUSING = {  # functions whose dicts and tuples of names are flags that they refuse
    "train/model_flags.py": ("check_model", "check_edges", "_check_own_modules"),
    "train/document_flags.py": ("prepare_documents",),
    "train/packed_flags.py": ("check_packed",),
    "train/gpt.py": ("pretrain",),
}
NO_FLAG = {"fp8": "--fp8-format", "fp4": "--fp4-format"}  # attributes of another name


def refused() -> set[str]:
    """The flags by the code: keys of a dict `refused`, and names that a loop goes through."""
    found: set[str] = set()
    for file, functions in REFUSING.items():
        tree = ast.parse((ROOT / "megatron_paradyse" / file).read_text(encoding="utf-8"))
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and function.name in functions:
                for node in ast.walk(function):
                    found |= _names(node)
    return {NO_FLAG.get(name, f"--{name.replace('_', '-')}") for name in found}


def _names(node: ast.AST) -> set[str]:
    values: list[ast.expr | None] = []
    if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
        values += node.value.keys
    elif isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple):
        values += node.iter.elts
    return {v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)}


def test_the_table_of_flags_is_what_the_script_writes():
    script = [
        sys.executable, "-c", "import flags; print(flags.page(flags.PAGE.read_text()), end='')"
    ]  # fmt: skip
    run = subprocess.run(
        script, cwd=ROOT / "scripts", capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stdout == TEXT


def test_every_flag_and_every_key_has_a_row():
    parser = argparse.ArgumentParser(add_help=False)
    for action in add_arguments(parser)._actions:
        assert re.search(rf"^\| `{action.option_strings[0]}[` ]", TEXT, re.M)
    for name in FIELDS:
        assert re.search(rf"^\|.*\| `{name}(: \w+)?` \|", TEXT, re.M)


@pytest.mark.parametrize("flag", sorted(refused()))
def test_a_flag_that_is_refused_has_a_row(flag):
    assert re.search(rf"^\|[^|]*`{flag}[` ]", TABLE, re.M)


def test_refusals_are_found_in_the_code():
    assert len(refused()) > 30
    assert {"--tp-comm-overlap", "--sft", "--hybrid-context-parallel"} <= refused()


def test_help_texts_are_not_taken_for_formats():
    parser = argparse.ArgumentParser(prog="pretrain_gpt")
    assert "5%" in add_arguments(parser).format_help()


def test_every_flag_that_a_page_names_exists():
    parser = argparse.ArgumentParser(add_help=False)
    known = {s for action in add_arguments(parser)._actions for s in action.option_strings}
    for document in documents():
        named = set(re.findall(r"(?<![\w-])--paradyse(?:-[a-z]+)*(?![\w*-])", document.text))
        assert named <= known, document.name
