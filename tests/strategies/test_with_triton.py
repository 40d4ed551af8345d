"""Kernels in Triton where it cannot build what launches them: PyTorch's run instead."""

from __future__ import annotations

import importlib.util
import logging
import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_paradyse.strategies import kernels, with_triton
from megatron_paradyse.strategies.fused_tiles import can_fuse


class WithoutCompiler:
    @property
    def active(self):
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")


@pytest.fixture
def triton(monkeypatch):
    """As installed, with such a driver; asked anew."""
    with_triton.has_triton.cache_clear()

    def install(driver):
        runtime = SimpleNamespace(driver=driver)
        monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(runtime=runtime))
        monkeypatch.setitem(sys.modules, "triton.runtime", runtime)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: driver)

    yield install
    with_triton.has_triton.cache_clear()


def test_without_a_compiler_the_tiled_operations_run_and_a_line_says_why(triton, caplog):
    triton(WithoutCompiler())
    with caplog.at_level(logging.WARNING):
        assert not can_fuse((9, 0), torch.bfloat16, 64)
        kernel = kernels._choose_tiled("cuda", (9, 0), torch.bfloat16, 64)
        assert kernel is kernels.TILED
    (record,) = caplog.records  # once
    assert "(RuntimeError: Failed to find C compiler. Please specify via CC)" in record.message


def test_with_a_driver_it_runs_and_without_triton_nothing_is_said(triton, caplog):
    triton(SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: "cuda")))
    assert can_fuse((9, 0), torch.bfloat16, 64) and with_triton.why_not() == ""
    with_triton.has_triton.cache_clear()
    triton(None)
    assert not can_fuse((9, 0), torch.bfloat16, 64) and not caplog.records
    assert with_triton.why_not() == "it is not installed"
