"""What the operating system tells of this machine."""

from __future__ import annotations

import os

from megatron_paradyse import machine


def test_free_memory_is_a_part_of_what_there_is():
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < machine.free_bytes() <= total


def test_a_limit_of_the_group_counts(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    monkeypatch.setattr(machine, "GROUP", tmp_path)
    assert machine.free_bytes() == 600


def test_a_group_without_a_limit_counts_not(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("max\n")
    monkeypatch.setattr(machine, "GROUP", tmp_path)
    assert machine.free_bytes() > 1 << 20
