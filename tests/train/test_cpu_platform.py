"""The CPU platform lets Megatron run without a GPU and changes no result."""

from __future__ import annotations

import argparse
import sys
import time

import pytest
import torch

from megatron_paradyse.errors import UserError
from megatron_paradyse.train import plugin
from tests.train.harness import run_bounded, run_forked, with_defaults
from tests.train.parsing import parsed, validated


@pytest.mark.parametrize("spec", ["stock", "paradyse"])
def test_megatron_on_cpu_equals_plain_pytorch(spec, tmp_path):
    """Losses and every gradient of a GPT against the same model in plain float64 PyTorch."""
    flags = ["--num-layers", 2, "--hidden-size", 32, "--num-attention-heads", 4]
    if spec == "paradyse":
        flags += ["--paradyse", "--paradyse-sequences", "fixed"]
        flags += ["--mtp-num-layers", 2, "--position-embedding-type", "none"]
    module, argv = "tests.train.compare_with_plain", with_defaults(flags)
    code, stdout, stderr = run_forked(module, argv, ranks=1, folder=tmp_path, timeout_seconds=120)
    assert code == 0, stderr[-3000:]
    assert "worst of" in stdout


def test_it_is_refused_where_there_is_a_gpu(monkeypatch):
    from megatron_paradyse import cpu_platform

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="with a GPU"):
        cpu_platform.install()


def test_the_memory_of_a_cpu_is_logged_as_none():
    """As Megatron asks for it with --log-memory-to-tensorboard."""
    plugin.install()
    assert torch.cuda.memory_stats()["reserved_bytes.all.current"] == 0


def test_events_tell_the_time_between_them():
    """As Megatron's inference engines ask for it."""
    plugin.install()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    time.sleep(0.01)
    torch.cuda.current_stream().record_event(end)
    assert 10 <= start.elapsed_time(end) < 10_000


def test_saves_in_the_background_are_saved_at_once(capsys):
    """Their worker wants a GPU; a rank would wait for it for ever."""
    from megatron_paradyse.cpu_platform import apply_arguments

    for _ in range(2):  # as often as Megatron parses them
        args = argparse.Namespace(async_save=True, use_persistent_ckpt_worker=True)
        apply_arguments(args)
        assert (args.async_save, args.use_persistent_ckpt_worker) == (False, False)
    assert capsys.readouterr().out.count("--async-save needs a GPU") == 1


@pytest.mark.parametrize("flag", ["--use-megatron-fsdp", "--use-torch-fsdp2"])
def test_what_megatron_shards_on_gpus_alone_is_refused(flag):
    """It ended in a traceback: "Invalid device string: 'cuda:cpu'"."""
    from megatron_paradyse.cpu_platform import apply_arguments

    args = argparse.Namespace(**{flag[2:].replace("-", "_"): True})
    with pytest.raises(UserError, match=f"^{flag} needs GPUs, .*: leave {flag} out$"):
        apply_arguments(args)


@pytest.mark.parametrize("by_pytorch", [False, True])
def test_what_only_a_gpu_can_record_is_left_out(by_pytorch, capsys):
    from megatron_paradyse.cpu_platform import apply_arguments

    args = argparse.Namespace(profile=True, use_pytorch_profiler=by_pytorch)
    args.record_memory_history = not by_pytorch
    args.gpu_sniff_test_interval = None if by_pytorch else 10
    args.use_sharp, args.sharp_enabled_group = not by_pytorch, "dp"
    apply_arguments(args)
    assert (args.profile, args.record_memory_history) == (by_pytorch, False)
    assert args.gpu_sniff_test_interval is None
    assert (args.use_sharp, args.sharp_enabled_group) == (False, "dp" if by_pytorch else None)
    said = capsys.readouterr().out
    flags = "--profile", "--record-memory-history", "--gpu-sniff-test-interval", "--use-sharp"
    for flag in flags:
        assert (f"{flag} needs" in said) is not by_pytorch


SHARP = {
    None: "--use-sharp: Megatron 0.19 asks for its group dp before",
    "dp": "--use-sharp: Megatron 0.19 asks for its group dp before",
    "dp_replica": "--sharp-enabled-group dp_replica needs --num-distributed-optimizer-instances",
}


@pytest.mark.parametrize("group", SHARP)
def test_groups_that_a_network_adds_up_for_are_ones_that_megatron_makes(group, monkeypatch):
    """On GPUs: elsewhere --use-sharp is left out as arguments are read."""
    args = parsed(monkeypatch, "--paradyse-sequences", "fixed", "--mock-data")
    args.use_sharp, args.sharp_enabled_group = True, group
    with pytest.raises(UserError, match=f"^{SHARP[group]}"):
        validated(args)


@pytest.mark.parametrize("capability", [(0, 0), (8, 0)])
def test_experts_are_grouped_where_a_gpu_is_simulated_alone(capability, capsys, monkeypatch):
    from megatron_paradyse.cpu_platform import apply_arguments

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    args = argparse.Namespace(moe_grouped_gemm=True)
    apply_arguments(args)
    is_simulated = capability == (8, 0)
    assert args.moe_grouped_gemm is is_simulated
    assert ("--moe-grouped-gemm needs a GPU" in capsys.readouterr().out) is not is_simulated


def test_it_is_not_imported_where_there_is_a_gpu():
    """plugin.install() with a GPU in sight: Megatron as it is, cpu_platform never imported."""
    code = (
        "import sys, torch; torch.cuda.is_available = lambda: True\n"
        "from megatron_paradyse.train import plugin\n"
        "try:\n    plugin.install()\nexcept Exception as error:\n    print('stopped', error)\n"
        "assert 'megatron_paradyse.cpu_platform' not in sys.modules\n"
        "print('not imported')"
    )
    result, stdout, stderr = run_bounded([sys.executable, "-c", code], timeout_seconds=120)
    assert result == 0 and "not imported" in stdout, stdout + stderr[-2000:]


class _MakesAMask(torch.autograd.Function):
    """As Megatron's unfused attention does when it runs again."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.full((2,), 3.0, device="cuda")


def test_what_a_backward_runs_lands_on_the_cpu_too():
    """PyTorch leaves the mode that redirects devices for each of its ways into a backward."""
    plugin.install()
    for run in (
        lambda x, y: y.backward(),
        lambda x, y: torch.autograd.backward(y),
        lambda x, y: setattr(x, "grad", torch.autograd.grad(y, x)[0]),
    ):
        x = torch.ones(2, requires_grad=True)
        run(x, _MakesAMask.apply(x).sum())
        assert x.grad.tolist() == [3.0, 3.0]
