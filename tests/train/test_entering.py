"""The three ways into Megatron: our module, the launcher, the patch."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.train.harness import ROOT, attempt, data_flags, run_bounded, train, with_defaults

PATCH = ROOT / "patches" / "megatron-lm-core_v0.19.0.patch"
CHECKOUT = os.environ.get("MEGATRON_LM_PATH")
needs_checkout = pytest.mark.skipif(
    CHECKOUT is None, reason="MEGATRON_LM_PATH names no Megatron-LM core_v0.19.0 checkout"
)
TP2 = ["--tensor-model-parallel-size", 2, "--sequence-parallel"]

# The shape of Megatron-LM's pretrain_gpt.py: it imports the two functions, unpacks get_batch's list
# in the order of BATCH_KEYS, and has a get_batch that the launcher must replace.
SCRIPT = """
from functools import partial

import torch
from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

BATCH_KEYS = ["attention_mask", "labels", "loss_mask", "position_ids", "tokens"]


def get_batch(data_iterator, vp_stage=None):
    raise AssertionError("not replaced")


def loss_func(loss_mask, losses):
    mask = loss_mask.view(-1)
    loss = (losses.view(-1) * mask).sum()
    report = torch.stack([loss.detach(), mask.sum()])
    return loss, mask.sum().int(), {"lm loss": report}


def forward_step(data_iterator, model):
    mask, labels, loss_mask, positions, tokens = get_batch(data_iterator)
    output = model(tokens, positions, mask, labels=labels)
    return output, partial(loss_func, loss_mask)


def provide(num_samples):
    raise AssertionError("not replaced")


if __name__ == "__main__":
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, provide, ModelType.encoder_or_decoder, forward_step)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    lengths = np.random.default_rng(2).integers(2, 90, size=60).tolist()
    return [*data_flags(tmp_path_factory.mktemp("data"), lengths), *TP2]


@pytest.fixture(scope="module")
def own_entry(data, tmp_path_factory):
    return train(tmp_path_factory.mktemp("own"), *data, ranks=2)


def test_launcher_replaces_data_and_batches_of_a_pretrain_script(data, own_entry, tmp_path):
    script = tmp_path / "pretrain_gpt.py"
    script.write_text(SCRIPT)
    run = train(tmp_path, *data, ranks=2, entry=("script", str(script)))
    np.testing.assert_allclose(run.values("loss"), own_entry.values("loss"), rtol=1e-6)


@pytest.mark.parametrize(
    ("model", "found"), [("None", "none in its config"), ("config.logger", "of LoggerConfig")]
)
def test_a_script_whose_model_is_no_gpt_is_refused_in_one_line(model, found, data, tmp_path):
    """As pretrain_hybrid.py and pretrain_vlm.py of Megatron-LM are."""
    script = tmp_path / "pretrain_other.py"
    script.write_text(SCRIPT.replace("    pretrain(", f"    config.model = {model}\n    pretrain("))
    run = attempt(tmp_path, *data, ranks=2, entry=("script", str(script)))
    assert run.code == 2 and "Traceback" not in run.stderr
    assert f"error: this pretrain script's model is no GPT ({found}), whose layers" in run.stderr


def start(script: Path, data: list, *flags, launch: bool = False) -> str:
    """What a pretrain script says under torchrun, in processes that have imported nothing yet."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", *(["-m", "megatron_paradyse.launch"] if launch else [])]
    command += [str(script), *with_defaults([*data, *flags])]
    code, stdout, stderr = run_bounded(command, timeout_seconds=240)
    assert code == 0 and "Traceback" not in stderr, stderr[-3000:]
    text = (script.parent / "megatron" / "core" / "package_info.py").read_text()
    version = ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", text, re.M))
    assert f"Megatron-Core version .......... {version}\n" in stdout  # of the script's checkout
    return stdout


@needs_checkout
def test_launcher_runs_an_unmodified_checkout_by_costs_of_its_own(data, own_entry, tmp_path):
    trace = tmp_path / "trace.jsonl"
    by_cost = ["--paradyse-policy", "optimal", "--paradyse-trace", trace]
    script = Path(CHECKOUT) / "pretrain_gpt.py"
    said = start(script, data, *by_cost, launch=True)
    assert "> paradyse: costs: a quick profile" in said
    records = [json.loads(line) for line in trace.read_text().splitlines()]
    losses = [record["lm loss"] for record in records if record["kind"] == "iteration"]
    np.testing.assert_allclose(losses, own_entry.values("loss"), rtol=1e-5)


@needs_checkout
def test_patch_applies_runs_and_reverts(data, tmp_path):
    """The patched script alone, under torchrun, trains with --paradyse; -R restores the file."""
    original = Path(CHECKOUT) / "pretrain_gpt.py"
    for name in ("pretrain_gpt.py", "gpt_builders.py", "model_provider.py"):
        shutil.copy(Path(CHECKOUT) / name, tmp_path)
    (tmp_path / "megatron").symlink_to(Path(CHECKOUT).absolute() / "megatron")
    apply = ["git", "apply", "--unidiff-zero"]
    subprocess.run([*apply, str(PATCH)], cwd=tmp_path, check=True, timeout=30)
    assert "tokens/s" in start(tmp_path / "pretrain_gpt.py", data, "--train-iters", 2)
    subprocess.run([*apply, "-R", str(PATCH)], cwd=tmp_path, check=True, timeout=30)
    assert (tmp_path / "pretrain_gpt.py").read_text() == original.read_text()


def test_patch_only_adds_lines():
    lines = PATCH.read_text().splitlines()
    assert [line for line in lines if line[:1] not in "+@-" or line[:1] == "-"] == [
        "--- a/pretrain_gpt.py"
    ]
    assert sum(line.startswith("+") and not line.startswith("+++") for line in lines) == 2


def test_without_the_flag_the_model_is_stock_megatrons(tmp_path):
    """No switchable module, no hook, no extended log line."""
    run = train(tmp_path, "--mock-data", *TP2, ranks=2)
    assert "tokens/s" not in run.stdout


@pytest.mark.parametrize(("latent", "head_dim"), [(False, 56), (True, 192)])
def test_the_kernel_that_the_log_names_is_that_of_the_heads_that_run(latent, head_dim, monkeypatch):
    """DeepSeek's hidden size over its heads is 56; latent attention has heads of its own size."""
    import megatron.training

    from megatron_paradyse.settings import Settings
    from megatron_paradyse.strategies import kernels
    from megatron_paradyse.train import describe, plugin

    args = argparse.Namespace(params_dtype=torch.bfloat16, window_size=None, attention_dropout=0.0)
    args.multi_latent_attention, args.kv_channels = latent, 56
    args.kv_lora_rank, args.qk_head_dim, args.qk_pos_emb_head_dim = 512, 128, 64
    args.v_head_dim = 128
    asked: list[int] = []
    said: list[str] = []

    def choose(q, **masks):
        asked.append(q.shape[-1])
        return kernels.TILED

    monkeypatch.setattr(describe, "choose_kernel", choose)
    monkeypatch.setattr(megatron.training, "get_args", lambda: args)
    monkeypatch.setattr(megatron.training, "print_rank_0", said.append)
    plugin._announce(Settings(policy="fixed:megatron_ts", sequences="fixed"))
    assert asked == [head_dim]
    assert said[0].endswith(f"attention kernel {kernels.TILED.name}")
