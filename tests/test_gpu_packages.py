"""Packages for GPUs that are installed and do not run here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from megatron_paradyse import gpu_packages, megatron_start

COMPILED = ("amp_C", "fused_layer_norm_cuda")
WITHOUT_COMPILED_PARTS = {
    "apex/__init__.py": "",
    "apex/normalization/__init__.py": "",
    "apex/normalization/fused_layer_norm.py": "class FusedLayerNormAffineFunction: ...",
    "apex/optimizers.py": "class FusedAdam: ...\nclass FusedSGD: ...",
}
BROKEN_ENGINE = {"transformer_engine/__init__.py": "raise OSError('libcuda.so.1')"}


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def _python(*arguments: str, path: Path) -> str:
    """What it prints, on a machine without a GPU, with the folder on its path."""
    found = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": f"{path}{os.pathsep}{Path.cwd()}",
            "CUDA_VISIBLE_DEVICES": "",
        },
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout


def test_megatron_on_a_cpu_finds_none_of_them(tmp_path):
    _write(tmp_path, WITHOUT_COMPILED_PARTS | BROKEN_ENGINE)
    code = "from megatron_paradyse.train import plugin; plugin.install()\n"
    code += "from megatron.core.optimizer import Adam\n"
    code += "from megatron.core.models.backends import LNImpl\n"
    code += "print(Adam.__module__, LNImpl.__name__)"
    found = _python("-c", code, path=tmp_path).splitlines()
    assert found[-1] == "torch.optim.adamw WrappedTorchNorm"


def test_data_are_prepared_without_them(tmp_path):
    _write(tmp_path, BROKEN_ENGINE | {"documents/one.py": "print()\n"})
    told = _python(
        *("-m", "megatron_paradyse", "data", "prepare", f"{tmp_path}/documents"),
        *("--output-prefix", f"{tmp_path}/data"),
        path=tmp_path,
    )
    assert "1 document" in told and (tmp_path / "data.bin").stat().st_size


@pytest.fixture
def apex_here(tmp_path, monkeypatch):
    """An apex of Python alone; what is imported meanwhile is forgotten."""
    _write(tmp_path, WITHOUT_COMPILED_PARTS)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("apex", *COMPILED):
        monkeypatch.setitem(sys.modules, name, None)  # what is there comes back in the end
        del sys.modules[name]
    return tmp_path


@pytest.mark.parametrize(
    ("compiled", "reason"),
    [
        ({}, "ModuleNotFoundError: No module named 'amp_C'"),
        ({"amp_C.py": ""}, "ModuleNotFoundError: No module named 'fused_layer_norm_cuda'"),
        ({"amp_C.py": "raise OSError('undefined\\nsymbol')"}, "OSError: undefined symbol"),
        ({f"{name}.py": "" for name in COMPILED}, ""),
    ],
)
def test_apex_is_left_out_on_a_gpu_unless_its_compiled_parts_load(
    compiled, reason, apex_here, monkeypatch, capsys
):
    _write(apex_here, compiled)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(megatron_start, "install", lambda: None)
    megatron_start.say_once.cache_clear()
    assert megatron_start.make_ready() is False
    assert ("apex" in sys.modules) == bool(reason) and sys.modules.get("apex") is None
    said = capsys.readouterr().out
    line = f"> paradyse: apex is left out, for its compiled parts are not there ({reason})\n"
    assert said == (line if reason else "")


def test_an_apex_that_is_in_use_or_not_there_stays_so(apex_here, monkeypatch):
    sys.modules["apex"] = used = ModuleType("apex")
    assert gpu_packages.hide_broken_apex() == ""
    gpu_packages.hide_all()
    assert sys.modules["apex"] is used
    del sys.modules["apex"]
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(apex_here)])
    assert gpu_packages.hide_broken_apex() == "" and "apex" not in sys.modules
