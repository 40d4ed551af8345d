"""A training loop without Megatron's: strategies switch, and results are those of stock layers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_paradyse import layer_specs
from megatron_paradyse.errors import UserError
from megatron_paradyse.train import own_loop
from megatron_paradyse.units import parse_bytes
from tests.train.harness import LATENT, LLAMA, run_forked, with_defaults
from tests.train.synthetic_costs import write_costs

COMPARED = {
    "gpt": 6,
    "llama": 4,
    "pipeline": 3,
    "predicting": 4,
    "frozen": 4,
    "packed": 5,
    "values": 2,
    "subclassed": 2,
    "dropout": 4,
    "checkpointed": 1,
    "refused": 1,
}


@pytest.mark.parametrize("case", COMPARED)
def test_losses_and_gradients_are_those_of_stock_layers(case, tmp_path):
    """To 1e-5, with another random plan at every microbatch of another length."""
    run([case], tmp_path, COMPARED[case])


def test_replicas_of_a_wrapped_model_train_as_with_stock_layers(tmp_path):
    run(["wrapped", str(tmp_path)], tmp_path, 1)


@pytest.mark.parametrize(
    ("ranks", "positions", "head_tile", "backend"),
    [
        (1, "learned_absolute", "auto", "auto"),
        (2, "rope", "auto", "auto"),
        (2, "learned_absolute", "8", "unfused"),
    ],
)
def test_generating_leaves_plans_aside(ranks, positions, head_tile, backend, tmp_path):
    run(["generating", str(ranks), positions, head_tile, backend], tmp_path, 3, ranks=ranks)


def test_plans_by_cost_within_what_is_left_of_the_memory(tmp_path):
    run(["by_costs", str(write_costs(tmp_path / "costs.json"))], tmp_path, 2)


def test_what_an_optimizer_of_pytorch_will_hold_is_told_before_the_first_step(tmp_path):
    run(["optimizers", str(write_costs(tmp_path / "costs.json"))], tmp_path, 0, ranks=1)


ROTATED = ["--position-embedding-type", "rope"]
EXPERTS = ["--num-experts", 4, "--moe-layer-freq", "[0,1,1,1]", "--moe-ffn-hidden-size", 32]
EXPERTS += ["--disable-bias-linear", "--moe-shared-expert-intermediate-size", 48]
MODELS = {
    "GPT": [],
    "LLaMA": [*LLAMA, "--qk-layernorm", "--attention-dropout", 0.1, "--num-layers", 3],
    "latent attention": LATENT,
    "windows": [*ROTATED, "--window-size", "16,16", "--window-attn-skip-freq", 2],
    "not rotated everywhere": [*ROTATED, "--no-rope-freq", 4, "--hidden-dropout", 0.1],
    "gates": [*LLAMA, "--attention-output-gate", "--kv-channels", 24],
    "experts": EXPERTS,
    "quick GEGLU": ["--quick-geglu", "--no-bias-gelu-fusion"],
    "multi-token prediction": [*ROTATED, "--mtp-num-layers", 2, "--paradyse-head-tile", 16],
}


@pytest.mark.parametrize("model", MODELS)
def test_a_model_is_described_as_its_flags_are(model, tmp_path):
    """So that costs made by flags are known to be of it."""
    flags = [*MODELS[model], "--tensor-model-parallel-size", 2, "--sequence-parallel"]
    code, stdout, stderr = run_forked(
        "tests.train.describing",
        with_defaults([*flags, "--paradyse", "--paradyse-policy", "fixed:megatron_ts"]),
        ranks=2,
        folder=tmp_path,
        timeout_seconds=60,
    )
    assert code == 0, stdout[-2000:] + stderr[-4000:]
    assert stdout.count("compared ") == 2


def run(arguments: list[str], folder, compared: int, *, ranks: int = 2) -> None:
    code, stdout, stderr = run_forked(
        "tests.train.own_loop_cases",
        arguments,
        ranks=ranks,
        folder=folder / "ranks",
        timeout_seconds=120,
    )
    assert code == 0, stdout[-2000:] + stderr[-4000:]
    assert stdout.count("compared ") == compared, stdout


def test_settings_of_a_program_are_those_of_a_file():
    """Paths, tuples and numbers of bytes, where a YAML file has texts and lists."""
    settings = own_loop._settings(
        {
            "cost_model": Path("costs.json"),
            "strategies": ("metp", "megatron_ts"),
            "layers": {"1-2": {"attention": ("metp",), "mlp": ["metp"]}},
            "memory_budget": 180_000_000,
        }
    )
    assert settings == own_loop._settings(
        {
            "cost_model": "costs.json",
            "strategies": ["metp", "megatron_ts"],
            "layers": {"1-2": {"attention": ["metp"], "mlp": ["metp"]}},
            "memory_budget": "180000000B",
        }
    )
    assert parse_bytes(settings.memory_budget) == 180_000_000
    share = own_loop._settings({"cost_model": "costs.json", "memory_budget": 0.9 * 200_000_001})
    assert parse_bytes(share.memory_budget) == 180_000_000
    with pytest.raises(UserError, match="True is not a text"):
        own_loop._settings({"cost_model": "costs.json", "memory_budget": True})
    for size in (0.9, -5, math.inf, math.nan):  # a share, say
        with pytest.raises(UserError, match=f"memory_budget {size}: give bytes, from 1"):
            own_loop._settings({"cost_model": "costs.json", "memory_budget": size})


CONFIG = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=8)


@pytest.mark.parametrize(
    ("spec", "config", "fault"),
    [
        (
            get_gpt_layer_local_spec,
            CONFIG,
            r"\(get_gpt_layer_local_spec\): give Megatron",
        ),
        (CONFIG, get_gpt_layer_local_spec(), r"\(TransformerConfig\): give Megatron's spec"),
        (ModuleSpec(module=SelfAttention), CONFIG, r"\(SelfAttention\): give Megatron's spec"),
        (get_gpt_layer_local_spec(), {}, r"\(\.\.\., dict\): give the model's TransformerConfig"),
    ],
)
def test_another_thing_than_a_spec_of_layers_is_told_what_to_give(spec, config, fault):
    with pytest.raises(UserError, match=f"switchable_spec{fault}"):
        own_loop.switchable_spec(spec, config)


def test_plans_are_attached_after_process_groups_exist():
    with pytest.raises(UserError, match=r"exist: call mpu\.initialize_model_parallel first"):
        own_loop.attach([torch.nn.Linear(2, 2)], policy="fixed:metp")


def test_a_layer_that_can_switch_stays_as_it_is():
    once = layer_specs.switchable_layer(get_gpt_layer_local_spec(), CONFIG)
    assert layer_specs.switchable_layer(once, CONFIG) is once
