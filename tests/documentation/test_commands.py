"""Every command of README and docs runs, at a small scale; trainings as far as their flags go."""

from __future__ import annotations

import shutil

import pytest
from click.testing import CliRunner

from megatron_paradyse.cli import cli
from tests.documentation.markdown import Command, documents
from tests.documentation.rules import NOT_RUN, OTHER_OUTPUT
from tests.documentation.running import Runner
from tests.documentation.workplace import make_workplace

DOCUMENTS = [document for document in documents() if document.commands]
RAN: set = set()


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """Filled once; every document gets a copy, so that none needs another's commands."""
    folder = make_workplace(tmp_path_factory.mktemp("documented"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for prefix in ("data/code", "demo-output/corpus"):
            result = CliRunner().invoke(cli, ["data", "prepare", "my_project", "-o", prefix])
            assert result.exit_code == 0, result.output
    return folder


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_every_command_runs(document, workplace, tmp_path, monkeypatch):
    folder = tmp_path / "workplace"
    shutil.copytree(workplace, folder, symlinks=True)
    monkeypatch.chdir(folder)
    runner = Runner(folder, RAN)
    for command in document.commands:
        runner.run(command)
    runner.finish()


def test_a_command_that_nobody_knows_and_one_that_is_wrong_are_noticed(workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    runner = Runner(workplace)
    for text in ("git push", "megatron-paradyse plan costs.json --length 1K", "make dmeo"):
        with pytest.raises(Exception):  # noqa: B017 - whichever of the programs refuses it
            runner.run(Command(text))
    runner.run(Command("torchrun ... --paradyse --paradyse-cost-modell costs.json"))
    with pytest.raises(AssertionError, match="did you mean --paradyse-cost-model"):
        runner.finish()


def test_the_documentation_has_commands_of_every_kind():
    texts = [command.text for document in DOCUMENTS for command in document.commands]
    assert len(texts) > 80
    for start in ("torchrun", "make", "megatron-paradyse profile", "python benchmarks/"):
        assert any(text.startswith(start) for text in texts)
    assert all(why for _, why in (*NOT_RUN, *OTHER_OUTPUT))
