"""Megatron's defaults on a machine with GPUs, without the packages that they need."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from megatron_paradyse import cpu_platform, megatron_start
from megatron_paradyse.errors import UserError
from megatron_paradyse.train import plugin

DEFAULTS = {
    "transformer_impl": "transformer_engine",
    "apply_rope_fusion": True,
    "no_persist_layer_norm": False,
    "gradient_accumulation_fusion": True,
    "masked_softmax_fusion": True,
}
IN_BACKGROUND = {"async_save": True, "async_strategy": "nvrx"}
NVRX = "megatron.core.dist_checkpointing.strategies.nvrx.has_nvrx_async_support"


@pytest.fixture(autouse=True)
def installed():
    plugin.install()


@pytest.mark.parametrize("vocab_size", [None, 257])
def test_a_size_of_the_vocabulary_in_place_of_the_datas_is_told(vocab_size):
    """With --vocab-size and no --tokenizer-type Megatron builds its default, whatever the data."""

    def build(args):
        raise ModuleNotFoundError("wget")

    args = argparse.Namespace(
        vocab_size=vocab_size, tokenizer_type="GPT2BPETokenizer", tokenizer_model=None
    )
    with pytest.raises(UserError, match="data prepare' wrote, which name") as refused:
        megatron_start._in_one_line(build)(args)
    assert ("without --vocab-size 257" in str(refused.value)) == (vocab_size is not None)


@pytest.mark.parametrize(
    ("kind", "saved", "said"),
    [
        ("tensorboard", "here", "--tensorboard-dir there: its log cannot be begun .PermissionErr"),
        ("wandb", "here", "--wandb-project: its log cannot be begun .PermissionError: no"),
        ("wandb", None, "its log cannot be begun .neither --wandb-save-dir nor --save says where"),
    ],
)
def test_a_log_that_cannot_be_begun_is_one_line(kind, saved, said):
    def set_writer(args):
        raise PermissionError("no")

    args = argparse.Namespace(tensorboard_dir="there", wandb_save_dir=None, save=saved)
    with pytest.raises(UserError, match=said):
        megatron_start._opens_log(set_writer, kind)(args)


def test_megatron_begins_its_logs_through_it():
    from megatron.training import global_vars

    for name in ("_set_tensorboard_writer", "_set_wandb_writer"):
        made = getattr(global_vars, name).__wrapped__
        assert (made.__module__, made.__name__) == (global_vars.__name__, name)


def test_what_is_missing_is_done_without_and_said():
    """This machine has neither TransformerEngine nor apex."""
    args = argparse.Namespace(**DEFAULTS)
    flags = megatron_start.complete(args)
    assert {*flags} == {*megatron_start.FLAGS.values()} - {"--async-strategy mcore"}
    assert vars(args) == {name: cpu_platform.CPU_ARGUMENTS[name] for name in DEFAULTS}
    assert megatron_start.complete(args) == []


@pytest.mark.parametrize("asked", [True, False])
def test_a_model_that_would_stay_in_the_memory_of_the_host_is_refused(asked):
    args = argparse.Namespace(paradyse=True, use_cpu_initialization=asked)
    refused = pytest.raises(UserError, match="--use-cpu-initialization: Megatron")
    with refused if asked else contextlib.nullcontext():
        megatron_start.check_initialization(args)
    megatron_start.check_initialization(argparse.Namespace(use_cpu_initialization=asked))


@pytest.mark.parametrize(
    ("code", "file", "helps"),
    [
        ("raise RuntimeError('curand not found')", "transformer_engine/__init__.py", "[pytorch]'"),
        ("raise AttributeError('nvidia_resiliency_ext has none')", "nvrx.py", "_ext>=0.6'"),
        ("raise AssertionError('nvidia-resiliency-ext is old')", "nvrx.py", "_ext>=0.6'"),
        ("raise OSError('libx.so')", "x.py", "uninstall the package that it names"),
        ("raise OSError('libx.so')", "megatron/transformer_engine.py", "install, mend or"),
    ],
)
def test_a_package_at_which_megatrons_import_ends_is_told_with_what_helps(code, file, helps):
    with pytest.raises(Exception) as raised:
        exec(compile(code, f"site-packages/{file}", "exec"))
    told = str(megatron_start.cannot_import(raised.value))
    assert told.startswith(f"Megatron cannot be imported ({raised.type.__name__}: ")
    assert helps.replace("_ext", "nvidia-resiliency-ext") in told and "uninstall" in told


def test_a_broken_package_ends_a_start_in_one_line(tmp_path):
    package = tmp_path / "nvidia_resiliency_ext"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('no libcudnn')")
    command = [sys.executable, "-m", "megatron_paradyse.pretrain_gpt", "--paradyse"]
    found = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path.cwd()}"},
    )
    errors = [line for line in found.stderr.splitlines() if "rror" in line]
    assert found.returncode == 2 and len(errors) == 1, found.stderr[-2000:]
    assert errors[0].startswith("error: Megatron cannot be imported (RuntimeError: no libcudnn)")


def test_a_rank_that_crashes_says_where():
    code = "from megatron_paradyse.train import plugin; plugin.install(); import ctypes\n"
    code += "def inside_the_model(): ctypes.string_at(0)\ninside_the_model()"
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode < 0 and "in inside_the_model" in found.stderr


def test_news_of_the_arguments_are_said_once_however_often_they_are_parsed(capsys):
    for _ in range(2):
        megatron_start.say_once("packages are missing")
    assert capsys.readouterr().out == "> paradyse: packages are missing\n"


@pytest.mark.parametrize("vocab_size", [0, -3])
def test_a_vocabulary_of_no_ids_is_refused_as_such(vocab_size):
    build = megatron_start._in_one_line(lambda args: pytest.fail("a tokenizer is built"))
    args = argparse.Namespace(vocab_size=vocab_size, tokenizer_type="NullTokenizer")
    with pytest.raises(UserError, match=f"^--vocab-size {vocab_size}: give the number of ids"):
        build(args)


def test_what_is_installed_is_left_as_it_was(monkeypatch):
    from megatron.core.extensions import transformer_engine
    from megatron.core.fusions import fused_layer_norm
    from megatron.core.tensor_parallel import layers

    monkeypatch.setattr(transformer_engine, "HAVE_TE", True)
    monkeypatch.setattr(fused_layer_norm, "HAVE_FUSED_LAYER_NORM", True)
    args = argparse.Namespace(**DEFAULTS)
    flags = megatron_start.complete(args)
    assert flags == ["--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion"]
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", True)
    softmax = ModuleType("scaled_masked_softmax_cuda")
    softmax.__spec__ = argparse.Namespace()
    monkeypatch.setitem(sys.modules, softmax.__name__, softmax)
    args = argparse.Namespace(**DEFAULTS)
    assert megatron_start.complete(args) == [] and vars(args) == DEFAULTS


def _too_old():
    raise AssertionError("NVRx >= 0.6.0 is required")


@pytest.mark.parametrize(
    ("has_support", "strategy"),
    [(lambda: True, "nvrx"), (lambda: False, "mcore"), (_too_old, "mcore")],
)
def test_checkpoints_are_saved_in_the_background_by_what_is_installed(
    has_support, strategy, monkeypatch
):
    monkeypatch.setattr(NVRX, has_support)
    args = argparse.Namespace(**DEFAULTS, **IN_BACKGROUND)
    said = "--async-strategy mcore" in megatron_start.complete(args)
    assert args.async_strategy == strategy and said == (strategy == "mcore")


@pytest.mark.parametrize(
    ("paradyse", "seq_length", "seen"),
    [(True, 1 << 20, 8192), (True, 4096, 4096), (False, 1 << 20, 1 << 20)],
)
def test_fused_kernels_are_warmed_up_on_short_tensors(paradyse, seq_length, seen, monkeypatch):
    """Megatron would allocate [s, b, f/p] several times: more than a GPU has for a long s."""
    args = argparse.Namespace(
        paradyse=paradyse, seq_length=seq_length, tensor_model_parallel_size=2
    )
    monkeypatch.setattr("megatron.training.get_args", lambda: args)
    lengths = []
    warm_up = megatron_start._short_warm_up(lambda tp_size=None: lengths.append(args.seq_length))
    warm_up(tp_size=2)
    assert lengths == [seen] and args.seq_length == seq_length


def test_a_compiled_function_may_have_more_variants_than_by_default():
    assert torch._dynamo.config.recompile_limit >= megatron_start.MOST_VARIANTS  # by install()
    for limit, expected in ((8, 64), (100, 100)):
        with torch._dynamo.config.patch(recompile_limit=limit):
            megatron_start.allow_variants()
            assert torch._dynamo.config.recompile_limit == expected


def test_an_error_in_what_is_timed_for_stragglers_is_not_logged_beside_its_line(caplog):
    """Megatron's detector writes the traceback of each, also where it times nothing."""
    from megatron.core.utils import StragglerDetector

    with pytest.raises(UserError, match="the data have"), StragglerDetector():
        raise UserError("the data have the token 62")
    assert not caplog.records


def test_scores_of_experts_have_their_gradients_where_a_product_reads_memory(monkeypatch):
    """As TransformerEngine's does: it takes where a tensor begins, and its shape."""
    from megatron.core.transformer.moe import moe_utils

    def product(A, B, dtype, layout="TN", **kwargs):
        A, B = (torch.as_strided(x, x.shape, (x.shape[1], 1)) for x in (A, B))
        transposed = A.t() if layout[0] == "T" else A, B.t() if layout[1] == "T" else B
        return [transposed[1] @ transposed[0]]

    monkeypatch.setattr(moe_utils, "te_general_gemm", product)
    tokens, weight = torch.randn(6, 5, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    scores = moe_utils.router_gating_linear(tokens, weight, None, torch.float32)
    assert scores.equal(product(weight, tokens, None)[0])
    grad = torch.randn(4, 6).t()  # of what was transposed for the experts
    found = torch.autograd.grad(scores, (tokens, weight), grad)
    torch.testing.assert_close(found, (grad @ weight, grad.t() @ tokens))


def test_the_wheel_need_not_be_compiled():
    from megatron.core.datasets import utils

    utils.compile_helpers()  # Megatron's own ends the process: there is no Makefile


@pytest.mark.parametrize("failure", [SystemExit(1), FileNotFoundError("make")])
def test_a_checkout_that_cannot_be_compiled_says_what_it_takes(failure, monkeypatch):
    """Megatron's own ends the process, after the words of make."""

    def compile_helpers():
        raise failure

    monkeypatch.setattr(megatron_start.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"{Path(__file__).parent}: install make, .* pybind11"):
        megatron_start._compile_in_a_checkout(compile_helpers)()


READ_ONCE = ("CUDA_DEVICE_MAX_CONNECTIONS", *megatron_start.ALLOCATORS)
EXPANDABLE = "expandable_segments:True"


READING = [  # flags, of the user's environment, connections, allocator
    (["--paradyse"], {}, "1", EXPANDABLE),
    ([], {}, "None", ""),
    (["--paradyse", "--async-save"], {}, "1", ""),
    (["--paradyse"], {READ_ONCE[0]: "8"}, "8", EXPANDABLE),
    *(
        (["--paradyse"], {name: "max_split_size_mb:64"}, "1", "max_split_size_mb:64")
        for name in megatron_start.ALLOCATORS
    ),
]


def test_what_cuda_reads_once_is_set_before_it_is_asked_and_with_paradyse_only():
    """PyTorch reads the allocator's settings only then: it would refuse what it does not know.

    Each case in a process forked from one that has imported PyTorch.
    """
    code = (
        "import json, os, sys, torch\n"
        "def settings():\n"
        f"    names = {megatron_start.ALLOCATORS}\n"
        "    name = next((name for name in names if name in os.environ), names[0])\n"
        "    found, os.environ[name] = os.environ.get(name, ''), 'unknown:1'\n"
        "    try:\n"
        "        torch._C._accelerator_setAllocatorSettings('max_split_size_mb:64')\n"
        "    except ValueError:\n"
        "        return found\n"
        "    return 'read before'\n"
        "torch.cuda.is_available = lambda: (print(os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS'),"
        " settings(), sep='|'), os._exit(0))\n"
        "for flags, of_user in json.loads(sys.argv[1]):\n"
        "    if child := os.fork():\n"
        "        os.waitpid(child, 0)\n"
        "        continue\n"
        "    os.environ.update(of_user)\n"
        "    sys.argv[1:] = flags\n"
        "    from megatron_paradyse.train import plugin\n"
        "    plugin.install()\n"
        "    os._exit(1)\n"
    )
    environment = {name: v for name, v in os.environ.items() if name not in READ_ONCE}
    cases = json.dumps([(flags, of_user) for flags, of_user, *_ in READING])
    found = subprocess.run(
        [sys.executable, "-u", "-c", code, cases],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    expected = [f"{connections}|{allocator}" for *_, connections, allocator in READING]
    assert found.stdout.splitlines() == expected, found.stderr
