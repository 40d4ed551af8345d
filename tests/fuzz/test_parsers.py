"""Whatever a file holds, its parser reads it or refuses it in one line, and does nothing else."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.guarded import finding
from tests.fuzz.mutations import mutated
from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_any_input_is_read_or_refused(name, tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp() / f"fuzz-{name}"
    folder.mkdir(exist_ok=True)
    content = data.draw(mutated(_seeds(name, tmp_path_factory)))
    assert finding(TARGETS[name], folder, content) is None


_known: dict[str, list[bytes]] = {}


def _seeds(name, tmp_path_factory):
    if name not in _known:
        folder = tmp_path_factory.mktemp("seeds")
        _known[name] = TARGETS[name].seeds(folder)
        with contextlib.suppress(ValueError):  # imports take seconds, which no input does
            TARGETS[name].parse(folder, _known[name][0])
    return _known[name]


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_reach_the_parser(name, tmp_path):
    """One at least is read to its end, so that what is near it goes deep."""
    read = 0
    for content in TARGETS[name].seeds(tmp_path):
        try:
            TARGETS[name].parse(tmp_path, content)
            read += 1
        except ValueError:
            continue
    assert read
