"""The versions that training needs: by metadata, and imported in a process apart."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from typing import Any

from megatron_paradyse import __version__
from megatron_paradyse.doctor import FAULT, LACK, OK, Check, machine
from megatron_paradyse.doctor.links import links
from megatron_paradyse.doctor.probe import COMPILED
from megatron_paradyse.strategies.flash_versions import why_not_used
from megatron_paradyse.train.megatron_version import (
    PACKAGE,
    SUPPORTED,
    TAG,
    find_megatron,
    is_wheel,
)

PROBE_SECONDS = 120
INSTALL = "pip install -e ."
APEX = (
    "git clone https://github.com/NVIDIA/apex && pip install --no-build-isolation "
    '--config-settings "--build-option=--cpp_ext" --config-settings "--build-option=--cuda_ext" '
    "./apex"
)
# package -> what its lack costs, and what mends it: on a GPU
ON_GPUS = {
    "transformer-engine": (
        "--transformer-impl local is set: Megatron's layers run without fused norms",
        "pip install -e '.[gpu]'",
    ),
    "apex": (
        "--no-gradient-accumulation-fusion is set: weight gradients are added by themselves",
        APEX,
    ),
    "flash-attn": (
        "PyTorch's CUDA kernels run the attention",
        "pip install 'flash-attn>=2.7,<3' --no-build-isolation",
    ),
    "triton": (
        "attention with dropout, windows in float32, and rings run slower PyTorch operations",
        "install gcc or clang and Python's headers (apt install gcc python3-dev), and pip install "
        "triton where it is missing",
    ),
}


def check_all() -> list[Check]:
    """Everything, the machine first."""
    present = [name for name in ON_GPUS if _version(name)]
    answers, failure = probe(present)
    torch = answers.get("torch", {})
    gpus = torch.get("gpus") or []
    return [
        _python(),
        Check("megatron_paradyse", OK, __version__),
        _torch(torch, failure),
        *_backends(torch),
        _megatron(answers, failure),
        *(_on_gpus(name, answers, bool(gpus)) for name in ON_GPUS),
        _numpy(),
        _xgboost(),
        *machine.gpus(gpus, torch),
        *links(len(gpus), torch),
        *machine.resources(),
        *machine.checkout(),
    ]


def probe(names: list[str], *, seconds: float = PROBE_SECONDS) -> tuple[dict[str, Any], str]:
    """What doctor.probe answers by name, and why it did not answer all: "" if it did."""
    command = [sys.executable, "-m", "megatron_paradyse.doctor.probe", *names]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    try:
        process = subprocess.run(
            command, capture_output=True, env=environment, timeout=seconds, check=False
        )
        output, failure = process.stdout, ""
        if process.returncode:
            failure = f"ended with code {process.returncode}"
    except subprocess.TimeoutExpired as error:
        output, failure = error.stdout or b"", f"gave no answer within {seconds:g} s"
    answers: dict[str, Any] = {}
    begun = ""
    for line in output.decode("utf-8", "replace").splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            continue
        begun = values.get("begin", begun)
        if "name" in values:
            answers[values["name"]] = values
    if failure and begun and begun not in answers:
        answers[begun] = {"error": f"importing it {failure}"}
    return answers, failure


def _version(name: str) -> str:
    """As installed, "" if it is not."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _python() -> Check:
    found = f"{platform.python_version()} ({sys.executable})"
    return Check("Python", OK, found)  # an older one cannot read this package


def _torch(torch: dict[str, Any], failure: str) -> Check:
    version = _version("torch")
    if not version:
        return Check("torch", FAULT, "not installed", "nothing can train", INSTALL)
    if "version" not in torch:
        why = torch.get("error") or failure
        return Check(
            "torch",
            FAULT,
            f"{version}, which cannot be imported: {why}",
            "nothing can train",
            "pip install --force-reinstall torch",
        )
    build = f"built for CUDA {torch['cuda']}" if torch["cuda"] else "built without CUDA"
    if not torch["cuda"] and shutil.which("nvidia-smi"):
        return Check(
            "torch",
            LACK,
            f"{version}, {build}",
            "GPUs are not used: ranks run on the CPU",
            "pip install --force-reinstall torch (the build for your CUDA)",
        )
    return Check("torch", OK, f"{version}, {build}")


def _backends(torch: dict[str, Any]) -> list[Check]:
    if "version" not in torch:
        return []
    checks = []
    gpus = bool(torch["gpus"])
    for name, needed in (("gloo", not gpus), ("nccl", gpus)):
        if torch[name]:
            checks.append(Check(name, OK, "in this build of torch"))
        elif needed:
            cost = f"ranks on {'GPUs' if gpus else 'a CPU'} cannot communicate"
            remedy = "pip install --force-reinstall torch"
            checks.append(Check(name, FAULT, "not in this build of torch", cost, remedy))
    return checks


def _megatron(answers: dict[str, Any], failure: str) -> Check:
    """Of what an import finds: the wheel, or a checkout of Megatron-LM on the path."""
    name, remedy = "megatron-core", f"pip install '{PACKAGE}'"
    found = find_megatron()
    if found is None:
        remedy += ", or export PYTHONPATH=/path/to/Megatron-LM"
        return Check(name, FAULT, "not installed", "nothing can train", remedy)
    version, folder = found
    told = version if is_wheel(folder) else f"{version}, a checkout of Megatron-LM in {folder}"
    if not version.startswith(f"{SUPPORTED}."):
        if told != version:
            remedy = f"git -C {folder} checkout {TAG}"
        return Check(name, FAULT, told, f"the plugin is made for {SUPPORTED}", remedy)
    answer = answers.get("megatron", {"error": f"importing it {failure or 'gave no answer'}"})
    if "error" in answer:
        told += f", whose training cannot be imported: {answer['error']}"
        reason, _, remedy = answer["error"].rpartition("): ")
        remedy = remedy if "Megatron cannot be imported (" in reason else INSTALL
        return Check(name, FAULT, told, "nothing can train", remedy)
    return Check(name, OK, told)


def _on_gpus(name: str, answers: dict[str, Any], gpus: bool) -> Check:
    version = _version(name)
    cost, remedy = ON_GPUS[name]
    error = answers.get(name, {}).get("error", "")
    if gpus and name == "flash-attn" and version and (why_not := why_not_used(version)):
        return Check(name, LACK, why_not, cost, remedy)
    if version and not error:
        return Check(name, OK, version)
    builds = COMPILED[name] is None  # on a GPU alone
    fault = "does not run" if builds else "cannot be imported"
    found = f"{version}, which {fault}: {error}" if version else "not installed"
    if not gpus and version and builds:
        found = version
    if not gpus:
        return Check(name, OK, found, "used on GPUs only")
    return Check(name, LACK, found, cost, remedy)


def _numpy() -> Check:
    version = _version("numpy")
    if version:
        return Check("numpy", OK, version)
    return Check("numpy", FAULT, "not installed", "nothing can train", INSTALL)


def _xgboost() -> Check:
    version = _version("xgboost")
    if version:
        return Check("xgboost", OK, version)
    cost = "megatron-paradyse fit cannot run; a fitted cost file still works"
    return Check("xgboost", LACK, "not installed", cost, "pip install xgboost")
