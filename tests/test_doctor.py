"""`megatron-paradyse doctor`: what is there, what its lack costs, and that nothing can hang it."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from megatron_paradyse.cli import cli
from megatron_paradyse.doctor import FAULT, LACK, OK, SKIP, checks, commands, links, machine

TORCH = {"name": "torch", "version": "2.15", "cuda": "13.2", "gloo": True, "nccl": True}
CPU = {"torch": {**TORCH, "gpus": []}, "megatron": {"name": "megatron"}}
GPU = {**CPU, "torch": {**TORCH, "gpus": [{"name": "H100", "memory_bytes": 80 << 30}]}}
WHEELS = Path(str(metadata.distribution("megatron-core").locate_file("")))


@pytest.fixture
def found(monkeypatch):
    """The checks for the answers of a probe, with packages installed or not."""

    def ask(answers, failure="", *, without=(), extra=()):
        def version(name):
            if name in without:
                raise metadata.PackageNotFoundError(name)
            return "1.0"

        hidden = {"transformer-engine", "apex", "flash-attn", "triton"} - set(extra)
        without = {*without, *hidden}
        monkeypatch.setattr(checks.metadata, "version", version)
        megatron = None if "megatron-core" in without else ("0.19.2", WHEELS)
        monkeypatch.setattr(checks, "find_megatron", lambda: megatron)
        monkeypatch.setattr(checks, "probe", lambda names: (answers, failure))
        return {check.name: check for check in checks.check_all()}

    return ask


def test_this_machine_can_train_and_says_what_it_has():
    """The real probe, in a process of its own."""
    result = CliRunner().invoke(cli, ["doctor", "--json"])
    values = json.loads(result.stdout)
    assert result.exit_code == 0 and values["can_train"]
    states = {check["name"]: check for check in values["checks"]}
    assert states["torch"]["found"].startswith(metadata.version("torch"))
    assert states["megatron-core"]["state"] == states["gloo"]["state"] == OK
    assert all(c["cost"] for c in values["checks"] if c["state"] != OK)


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Puts a script in its place."""

    def place(script: str) -> None:
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    return place


def test_words_of_another_program_need_not_be_utf_8(found, nvidia_smi):
    """They ended the command."""
    nvidia_smi("printf 'A \\377 GPU'")
    assert found(CPU)["GPUs"].found == "nvidia-smi names A \ufffd GPU, torch sees none"


def test_what_a_program_that_fails_prints_names_no_gpu(found, nvidia_smi):
    nvidia_smi("echo 'NVIDIA-SMI has failed'\nexit 9")
    assert found(CPU)["GPUs"].found == "none"


def test_a_probe_that_ended_before_megatron_says_how(found):
    for failure, why in (("ended with code -9",) * 2, ("", "gave no answer")):
        check = found({"torch": CPU["torch"]}, failure)["megatron-core"]
        assert check.state == FAULT
        assert check.found.endswith(f"whose training cannot be imported: importing it {why}")
    check = found({}, "gave no answer within 120 s")["torch"]
    assert check.found == "1.0, which cannot be imported: gave no answer within 120 s"


def test_on_a_cpu_the_packages_of_gpus_are_no_lack(found):
    states = found(CPU)
    assert {states[n].state for n in ("transformer-engine", "apex", "flash-attn", "triton")} == {OK}
    assert states["GPUs"].state == LACK and "slow" in states["GPUs"].cost


def test_on_a_gpu_every_lack_has_a_cost_and_a_command(found):
    states = found(GPU)
    assert "PyTorch's CUDA kernels run" in states["flash-attn"].cost
    assert "--transformer-impl local" in states["transformer-engine"].cost
    assert "--no-gradient-accumulation-fusion" in states["apex"].cost
    for check in states.values():
        assert check.state == OK or (check.cost and check.remedy), check
    assert states["GPU 0"].found == "H100, 80.0 GiB"
    assert states["torch"].found == "1.0, built for CUDA 13.2"
    assert states["apex"].found == "not installed"


def test_a_package_that_is_installed_and_does_not_load_says_why(found):
    broken = {**GPU, "apex": {"error": "ImportError: undefined symbol"}}
    check = found(broken, extra=["apex"])["apex"]
    assert check.state == LACK and "cannot be imported: ImportError: undefined" in check.found


@pytest.mark.parametrize(
    ("version", "used"), [("2.6.3", False), ("2.7.0.post2", True), ("2.10.1", True), ("3.0", False)]
)
def test_a_flash_attention_that_attention_does_not_call_is_a_lack_on_a_gpu(
    version, used, found, monkeypatch
):
    monkeypatch.setattr(checks, "_version", lambda name: version)
    check = found(GPU, extra=["flash-attn"])["flash-attn"]
    assert check.state == (OK if used else LACK)
    assert check.found == version or not used
    assert used or "is installed, 2.7 or a later 2.x would be used" in check.found
    check = found(CPU, extra=["flash-attn"])["flash-attn"]
    assert (check.state, check.found) == (OK, version)


def test_triton_without_a_compiler_is_a_lack_on_a_gpu_alone(found):
    answer = {"triton": {"error": "RuntimeError: Failed to find C compiler"}}
    check = found({**GPU, **answer}, extra=["triton"])["triton"]
    assert check.state == LACK and "does not run: RuntimeError: Failed to find C" in check.found
    assert "gcc" in check.remedy
    check = found({**CPU, **answer}, extra=["triton"])["triton"]
    assert (check.state, check.found) == (OK, "1.0")


def test_a_package_at_which_megatrons_import_ends_is_mended_as_its_error_says(found):
    error = "UserError: Megatron cannot be imported (RuntimeError: old): pip uninstall old"
    check = found({**GPU, "megatron": {"error": error}})["megatron-core"]
    assert check.state == FAULT and check.remedy == "pip uninstall old"
    other = found({**GPU, "megatron": {"error": "OSError: x (y): z"}})["megatron-core"]
    assert other.remedy == "pip install -e ."


@pytest.mark.parametrize(
    ("without", "name", "state", "words"),
    [
        ("xgboost", "xgboost", LACK, "fit cannot run; a fitted cost file still works"),
        ("numpy", "numpy", FAULT, "nothing can train"),
        ("torch", "torch", FAULT, "nothing can train"),
        ("megatron-core", "megatron-core", FAULT, "nothing can train"),
    ],
)
def test_a_missing_package_costs_what_it_costs(found, without, name, state, words):
    check = found(CPU, without=[without])[name]
    assert check.state == state and words in check.cost and "pip install" in check.remedy


def test_a_backend_that_is_missing_where_it_is_needed_is_a_fault(found):
    assert found({**CPU, "torch": {**CPU["torch"], "gloo": False}})["gloo"].state == FAULT
    assert found({**GPU, "torch": {**GPU["torch"], "nccl": False}})["nccl"].state == FAULT
    assert "nccl" not in found({**CPU, "torch": {**CPU["torch"], "nccl": False}})


@pytest.mark.parametrize(
    ("program", "seconds", "why"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 60, "ended with code -11"),
        ("import signal; signal.pause()", 1, "no answer within 1 s"),
    ],
)
def test_an_import_that_crashes_or_hangs_is_named(program, seconds, why, monkeypatch, tmp_path):
    """A stand-in for python that begins to import torch, and then does what the case says."""
    fake = tmp_path / "python"
    fake.write_text(f'#!{sys.executable}\nprint(\'{{"begin": "torch"}}\', flush=True)\n{program}\n')
    fake.chmod(0o755)
    monkeypatch.setattr(checks.sys, "executable", str(fake))
    answers, failure = checks.probe([], seconds=seconds)
    assert why in failure and why in answers["torch"]["error"]
    check = checks._torch(answers["torch"], failure)
    assert check.state == FAULT and why in check.found


def test_the_exit_code_is_1_where_training_cannot_run(monkeypatch):
    fault = commands.Check("torch", FAULT, "not\x1b installed", "nothing", "pip install -e .")
    monkeypatch.setattr(checks, "check_all", lambda: [fault])
    result = CliRunner().invoke(cli, ["doctor"])
    assert result.exit_code == 1
    assert result.stdout.splitlines()[0].startswith("fault torch: not")
    assert "mend: pip install -e ." in result.stdout
    assert result.stdout.endswith("training cannot run here\n")


@pytest.mark.parametrize(("free_gib", "state"), [(2, LACK), (6, OK), (None, OK)])
def test_memory_is_what_programs_may_take(free_gib, state, monkeypatch):
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": (64 << 30) // 4096}
    monkeypatch.setattr(machine.os, "sysconf", sizes.__getitem__)
    free = None if free_gib is None else free_gib << 30
    monkeypatch.setattr(machine, "free_bytes", lambda: free)
    check = {check.name: check for check in machine.resources()}["memory"]
    told = "" if free_gib is None else f", of which programs here may take {free_gib}.0"
    assert (check.state, check.found) == (state, f"64.0 GiB{told}")


@pytest.mark.parametrize(("free_gib", "state"), [(4, LACK), (6, OK)])
def test_little_room_on_the_disk_is_a_lack(free_gib, state, monkeypatch):
    usage = SimpleNamespace(free=free_gib << 30)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda place: usage)
    check = {check.name: check for check in machine.resources()}["disk"]
    assert check.state == state and check.found.startswith(f"{free_gib}.0 GiB free in ")


def test_a_terminal_gets_a_table_of_everything_said(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    commands._print([commands.Check("GPUs", LACK, "[none]", "it is slow", "buy one")])
    words = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue()).split()
    told = "what found lack GPUs [none] it is slow buy one"
    assert " ".join(words) == told


def test_a_current_folder_that_is_gone_is_told(tmp_path, monkeypatch):
    """It ended the command: "No such file or directory"."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    result = CliRunner().invoke(cli, ["doctor"])
    assert result.exit_code == 1 and not result.stdout
    assert result.stderr == "error: the current folder is gone: cd to one that is there\n"


def test_a_checkout_of_another_version_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("MEGATRON_LM_PATH", str(tmp_path))
    (check,) = machine.checkout()
    assert check.state == LACK and "holds no pretrain_gpt.py" in check.found
    (tmp_path / "pretrain_gpt.py").touch()
    (tmp_path / "megatron/core").mkdir(parents=True)
    info = tmp_path / "megatron/core/package_info.py"
    for minor, state in (("19", OK), ("20", LACK)):
        info.write_text(f"MAJOR = 0\nMINOR = {minor}\nPATCH = 0\n")
        (check,) = machine.checkout()
        assert check.state == state and f"0.{minor}.0" in check.found


@pytest.mark.parametrize(
    ("patch", "state", "words"), [("19", OK, ""), ("20", FAULT, "the plugin is made for 0.19")]
)
def test_a_checkout_on_the_path_is_told_as_what_it_is(patch, state, words, monkeypatch, tmp_path):
    """As an import would find it, before the wheel; its training is imported elsewhere."""
    (tmp_path / "megatron/core").mkdir(parents=True)
    info = tmp_path / "megatron/core/package_info.py"
    info.write_text(f"MAJOR = 0\nMINOR = {patch}\nPATCH = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [n for n in sys.modules if n.split(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    check = checks._megatron(CPU, "")
    assert (check.state, check.cost) == (state, words)
    assert check.found == f"0.{patch}.1, a checkout of Megatron-LM in {tmp_path}"
    assert state == OK or check.remedy == f"git -C {tmp_path} checkout core_v0.19.2"


LEGEND = "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe and NUMA nodes\n"


def matrix(rows: list[str]) -> str:
    """As nvidia-smi topo -m prints it, with a network card, affinities and an underlined header."""
    head = (
        "\x1b[4m\t"
        + "\t".join(f"GPU{i}" for i in range(len(rows)))
        + "\tNIC0\tCPU Affinity\x1b[0m\n"
    )
    body = "".join(f"GPU{i}\t{chr(9).join(row.split())}\tSYS\t0-31\n" for i, row in enumerate(rows))
    return head + body + "NIC0\t" + "SYS\t" * len(rows) + " X \n" + LEGEND


NVSWITCH = ["X NV18 NV18 NV18", "NV18 X NV18 NV18", "NV18 NV18 X NV18", "NV18 NV18 NV18 X"]
TWO_PAIRS = ["X NV12 SYS SYS", "NV12 X SYS SYS", "SYS SYS X NV12", "SYS SYS NV12 X"]
NO_NVLINK = ["X PHB", "PHB X"]
ODD_ONE = ["X NV12 SYS", "NV12 X SYS", "SYS SYS X"]  # no equal groups on NVLink alone


@pytest.mark.parametrize(
    ("rows", "state", "found", "remedy"),
    [
        (NVSWITCH, OK, "NV18 between all pairs", ""),
        (TWO_PAIRS, LACK, "NV12: 2 pairs, SYS: 4 pairs", "--tensor-model-parallel-size 2 keeps"),
        (NO_NVLINK, LACK, "PHB between all pairs", "profile network --nproc 2"),
        (["X NV4 NV18", "NV4 X NV4", "NV18 NV4 X"], OK, "NV18: 1 pair, NV4: 2 pairs", ""),
        (ODD_ONE, LACK, "NV12: 1 pair, SYS: 2 pairs", "profile network --nproc 3"),
        (["X ODD", "ODD X"], LACK, "nvidia-smi topo -m says nothing", "profile network --nproc 2"),
        ([], LACK, "nvidia-smi topo -m says nothing", "profile network --nproc 4"),
    ],
)
def test_links_are_read_from_the_pairs_of_gpus(rows, state, found, remedy, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(links, "output_of", lambda *command: matrix(rows) if rows else "")
    check, nodes = links.links(len(rows) or 4, {})
    assert (check.name, check.state, check.found) == ("links", state, found)
    assert remedy in check.remedy and (check.cost or state == OK)
    assert nodes.state == SKIP


@pytest.mark.parametrize(
    ("visible", "state", "found"),
    [
        ("1,3", LACK, "SYS between all pairs"),
        ("3, 2", OK, "NV12 between all pairs"),
        ("2,3,-1,0", OK, "NV12 between all pairs"),
        ("0,9", LACK, "nvidia-smi topo -m says nothing"),
        ("GPU-8932f937,GPU-9a1c", SKIP, "CUDA_VISIBLE_DEVICES names GPUs otherwise than by number"),
    ],
)
def test_links_are_those_of_the_gpus_that_are_visible(visible, state, found, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(links, "output_of", lambda *command: matrix(TWO_PAIRS))
    check = links.links(2, {})[0]
    assert (check.name, check.state, check.found) == ("links", state, found)
    assert check.cost or state == OK


def test_gpus_that_cannot_read_each_other_are_told():
    checks_of = {check.name: check for check in links.links(2, {"pairs_apart": [[0, 1]]})}
    told = checks_of["peer access"].found
    assert told == "1 pair, such as GPU0-GPU1, cannot read each other's memory"
    assert "peer access" not in {check.name for check in links.links(2, {"pairs_apart": []})}


def test_the_network_between_nodes_is_described_and_said_to_be_unchecked(tmp_path):
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
        (port / "link_layer").write_text("InfiniBand\n")
    check = links._between_nodes(tmp_path)
    assert check.state == SKIP and "profile network" in check.remedy
    assert check.found.startswith("mlx5_0 InfiniBand 400 Gb/sec (4X NDR); not checked")
    assert "sockets" in links._between_nodes(tmp_path / "none").cost


def test_a_machine_without_gpus_has_no_links_to_check():
    assert links.links(0, {}) == []
