"""Links of the documentation lead somewhere, and the files that it names are there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documentation.markdown import ROOT, Document, documents

DOCUMENTS = documents()
FIGURES = ROOT / "docs" / "figures"
# Where a path in the text may begin; the last two for `strategies/ring.py` and `docs/` itself.
PLACES = (ROOT, ROOT / "megatron_paradyse", ROOT / "docs")
NOT_OURS = {"pretrain_gpt.py", "gather_z.py"}  # Megatron-LM's; an example


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_every_link_and_anchor_resolves(document):
    for target in document.links:
        path, _, anchor = target.partition("#")
        file = (document.path.parent / path).resolve() if path else document.path
        assert file.exists(), f"{document.name} links to {target}: no such file"
        assert file.is_relative_to(ROOT), f"{document.name} links to {target}: outside"
        if anchor:
            assert anchor in Document(file).anchors, f"{document.name}: no heading for {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_every_source_file_between_backticks_exists(document):
    for name in re.findall(r"`([\w./-]+\.(?:py|sh|toml|patch))`", document.text):
        if Path(name).name not in NOT_OURS and "/" in name:
            places = [place / name for place in PLACES]
            assert any(path.exists() for path in places), f"{document.name} names {name}"


def test_every_page_is_linked_from_the_readme():
    linked = {target.partition("#")[0] for target in Document(ROOT / "README.md").links}
    pages = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    assert pages <= linked


@pytest.mark.parametrize("folder", (".", "train", "data", "packing", "strategies", "doctor"))
def test_every_module_is_on_the_code_map(folder):
    text = (ROOT / "docs/code-map.md").read_text(encoding="utf-8")
    modules = {path.stem for path in (ROOT / "megatron_paradyse" / folder).glob("[a-z]*.py")}
    assert modules <= set(re.findall(r"\w+", text))


def test_the_drawings_are_those_that_their_script_draws(tmp_path):
    """By their words: another matplotlib may put them elsewhere by a hair."""
    script = [sys.executable, str(FIGURES / "draw.py"), str(tmp_path)]
    subprocess.run(script, check=True, timeout=120, capture_output=True)
    drawn = {path.name: _words(path) for path in tmp_path.glob("*.svg")}
    assert drawn == {path.name: _words(path) for path in FIGURES.glob("*.svg")}
    for path in FIGURES.glob("*.svg"):
        assert path.stat().st_size < 60_000


def _words(path: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text(encoding="utf-8"))
