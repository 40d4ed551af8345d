"""What the operating system tells of this machine."""

from __future__ import annotations

import os

import pytest

from megatron_paradyse import machine


def test_free_memory_is_a_part_of_what_there_is():
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < machine.free_bytes() <= total


def test_memory_is_told_in_kilobytes_of_1024_bytes(tmp_path, monkeypatch):
    told = tmp_path / "told"
    monkeypatch.setattr(machine, "Path", lambda name: told)
    monkeypatch.setattr(machine, "OWN_GROUP", tmp_path / "none")
    monkeypatch.setattr(machine, "GROUPS", tmp_path / "none")
    told.write_text("MemTotal: 900 kB\nMemAvailable:     700 kB\n")
    assert machine.free_bytes() == 700 * 1024
    told.write_text("MemTotal: 900 kB\n")
    assert machine.free_bytes() is None
    told.write_text("processor : 0\nmodel name\t: A: 2 x B\n")
    assert machine.cpu_name() == "A: 2 x B"


def write_group(folder, limit, used=400, inactive_file=0):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\ninactive_file {inactive_file}\nslab 3\n")


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """The folder of all groups; this process is in /jobs/mine."""
    (tmp_path / "own").write_text("1:name=systemd:/\n0::/jobs/mine\n")
    monkeypatch.setattr(machine, "OWN_GROUP", tmp_path / "own")
    monkeypatch.setattr(machine, "GROUPS", tmp_path / "groups")
    return tmp_path / "groups"


def test_a_limit_of_the_group_counts(groups):
    write_group(groups, 1000)
    assert machine.free_bytes() == 600


def test_a_group_without_a_limit_counts_not(groups):
    write_group(groups, "max")
    assert machine.free_bytes() > 1 << 20


def test_files_that_the_system_can_drop_are_free(groups):
    write_group(groups / "jobs/mine", 1000, used=900, inactive_file=500)
    assert machine.free_bytes() == 600


def test_a_group_that_does_not_tell_of_files_still_limits(groups):
    write_group(groups, 1000)
    (groups / "memory.stat").unlink()
    assert machine.free_bytes() == 600


@pytest.mark.parametrize("tightest", ["", "jobs", "jobs/mine"])
def test_the_tightest_of_the_groups_around_counts(groups, tightest):
    for name in ("", "jobs", "jobs/mine"):
        write_group(groups / name, 1000 if name == tightest else 5000)
    assert machine.free_bytes() == 600


def test_a_group_that_is_not_seen_from_here_leaves_those_that_are(groups, monkeypatch):
    write_group(groups, 1000)
    for text in ("0::/../elsewhere\n", "0::/\n", "4:memory:/old\n", ""):
        machine.OWN_GROUP.write_text(text)
        assert machine.free_bytes() == 600
    machine.OWN_GROUP.unlink()
    assert machine.free_bytes() == 600
