"""Models whose layers differ, on 2 ranks: what Megatron builds is what the arguments say."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import pytest

from megatron_paradyse.costs.description import Description, check_compatible, differences
from megatron_paradyse.costs.layers import half_of, kinds_of, layer_of
from megatron_paradyse.errors import UserError
from megatron_paradyse.train.expert_flags import balance_over_replicas, lie_over_replicas
from megatron_paradyse.train.model_layers import ModelLayers
from tests.costs.synthetic import DESCRIPTION
from tests.profiler.profiling import LATENT, MODEL, RANKS, ROPE, run_profile
from tests.train.harness import run_forked

LENGTH = 128
WINDOWS = {"--window-size": "31,0"}
EXPERTS = {"--num-experts": 4, "--moe-router-topk": 2, "--disable-bias-linear": ""}
# flags, and the layers that differ from the first
MODELS = {
    "windows": (
        {**ROPE, **WINDOWS, "--window-attn-skip-freq": 3, "--no-rope-freq": "[0,0,1,0,1,0]"},
        {"attention@3": [3], "attention@5": [5], "attention@6": [6]},
    ),
    "experts that Megatron runs again": (
        {
            **EXPERTS,
            "--moe-layer-freq": "[0,1,1,0,1,1]",
            "--moe-token-dispatcher-type": "alltoall",
            "--recompute-granularity": "selective",
            "--recompute-modules": "moe",
        },
        {"mlp@2": [2, 3, 5, 6]},
    ),
    "experts in every other layer": (
        {**ROPE, **WINDOWS, **EXPERTS, "--moe-layer-freq": 2, "--window-attn-skip-freq": 2},
        {"attention@2": [2, 4, 6], "mlp@2": [2, 4, 6]},
    ),
    "latent attention with windows": (
        {**WINDOWS, "--window-attn-skip-freq": 2, **LATENT},
        {"attention@2": [2, 4, 6]},
    ),
    "alike": ({**EXPERTS, **WINDOWS}, {}),
    "alike, more tokens predicted": ({**ROPE, "--mtp-num-layers": 2, "--num-layers": 3}, {}),
    "windows, the last layers of experts, more tokens predicted": (
        {
            **ROPE,
            **WINDOWS,
            **EXPERTS,
            "--moe-layer-freq": "[0,1,1,1]",
            "--window-attn-skip-freq": 2,
            "--mtp-num-layers": 2,
            "--num-layers": 4,
        },
        {"attention@2": [2, 4, 6], "mlp@2": [2, 3, 4, 5, 6]},
    ),
}


def run(folder: Path, flags: dict) -> dict:
    output = folder / "layers.json"
    given = [str(text) for pair in (MODEL | flags).items() for text in pair if text != ""]
    argv = [str(output), str(LENGTH), *given]
    code, _, stderr = run_forked(
        "tests.profiler.layers_driver", argv, ranks=RANKS, folder=folder, timeout_seconds=200
    )
    assert code == 0, stderr[-4000:]
    return json.loads(output.read_text())


@pytest.mark.parametrize(("flags", "others"), MODELS.values(), ids=MODELS)
def test_layers_are_told_apart_as_megatron_builds_them(flags, others, tmp_path):
    """A layer of each kind tells the memory of all of them, and costs the peaks of plans."""
    found = run(tmp_path, flags)
    assert found["others"] == others
    built = [tuple(what) for what in found["layers"]]
    halves = [mlp for mlp, _, _ in built], [(window, rope) for _, window, rope in built]
    kinds = kinds_of(halves[1], halves[0])
    assert {name: list(numbers) for name, numbers in kinds.others.items()} == others
    numbers = [int(name.partition("@")[2] or 1) for name in kinds.measured()]
    assert [tuple(what) for what in found["profiled"]] == [built[n - 1] for n in numbers]
    for name, has in found["halves"].items():
        mlp, window, unrotated = built[layer_of(name) - 1]
        if half_of(name) == "mlp":
            assert has["experts"] == (4 if mlp == "MoELayer" else 0)
        else:
            assert (has.get("window"), has.get("rotated", 1)) == (window, 1 - unrotated)
    assert list(found["halves"]) == ["attention", "mlp", *others]
    assert found["static_bytes"] == pytest.approx(found["whole_bytes"], rel=1e-3)
    for plan, predicted, measured in found["peaks"]:
        assert predicted == pytest.approx(measured, rel=0.005), plan
    for plan, predicted, measured in found["evaluations"]:  # in which no gradient waits
        beside = predicted - found["waiting_bytes"] - found["static_bytes"]
        assert beside > 0.98 * (measured - found["static_bytes"]), plan


def arguments_with(name: str, value: int | list[int]) -> argparse.Namespace:
    """Of two layers."""
    given = {"num_experts": 4, "moe_layer_freq": 1, "window_size": (31, 0), "num_layers": 2}
    given |= {"window_attn_skip_freq": None, "no_rope_freq": None, name: value}
    return argparse.Namespace(**given, multi_latent_attention=False, mtp_num_layers=None)


@pytest.mark.parametrize("name", ["moe_layer_freq", "window_attn_skip_freq", "no_rope_freq"])
def test_a_list_of_fewer_layers_is_refused(name):
    args = arguments_with(name, [0, 1])
    assert ModelLayers.of_arguments(args, 2).patterns == {name: (0, 1)}
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')} tells of 2 layers, and there"):
        ModelLayers.of_arguments(args, 3)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("moe_layer_freq", [0, 1, 1], "--moe-layer-freq tells of 3 layers, and there are 2: give"),
        ("moe_layer_freq", [2, 1], r"--moe-layer-freq \[2, 1\]: give a 0 or 1 for each layer"),
        ("moe_layer_freq", 0, "--moe-layer-freq 0: one layer of how many, 1 or more, or a list"),
        ("window_attn_skip_freq", 0, "--window-attn-skip-freq 0: one layer of how many"),
    ],
)
def test_what_megatron_would_end_in_a_traceback_for_is_refused(name, value, message):
    with pytest.raises(UserError, match=message):
        ModelLayers.of_arguments(arguments_with(name, value), 2)


def test_lists_that_megatron_takes_are_taken():
    of_windows = ModelLayers.of_arguments(arguments_with("window_attn_skip_freq", [2, 0, 1]), 2)
    assert of_windows.patterns == {"window_attn_skip_freq": (1, 0)}
    none = ModelLayers.of_arguments(arguments_with("no_rope_freq", 0), 2)
    assert none.patterns == {}


def test_more_layers_of_multi_token_prediction_than_the_decoder_has():
    """The i-th has an attention like a layer i, and an MLP like the decoder's last."""
    given = {"num_experts": 4, "moe_layer_freq": 2, "window_size": (31, 0)}
    given |= {"window_attn_skip_freq": 2, "no_rope_freq": None, "multi_latent_attention": False}
    args = argparse.Namespace(**given, mtp_num_layers=3, mtp_use_repeated_layer=False)
    patterns = ModelLayers.of_arguments(args, 4).patterns
    assert patterns == {"moe_layer_freq": (1, 1, 1, 1), "window_attn_skip_freq": (1, 1, 0, 1)}


ONE_RANK_AN_EXPERT = {
    "tensor_model_parallel_size": 2,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 2,
}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("moe_layer_freq", "mlp.experts: 4 in the file, 0 in the run"),
        ("window_attn_skip_freq", "attention.window: 32 in the file, none in the run"),
        ("no_rope_freq", "attention.rotated: 0 in the file, 1 in the run"),
    ],
)
def test_a_model_of_the_inverse_pattern_is_another_model(name, told):
    """Which layers are unlike the first is then the same; what the first has is not."""
    given = {"num_experts": 4, "moe_layer_freq": 1, "window_size": (31, 0), "qk_layernorm": False}
    given |= {"window_attn_skip_freq": None, "no_rope_freq": None, "moe_ffn_hidden_size": 64}
    given |= {"moe_router_topk": 2, "moe_shared_expert_intermediate_size": None}
    given |= {"position_embedding_type": "rope", "multi_latent_attention": False}
    given |= {"mtp_num_layers": None, "attention_output_gate": False, "num_layers": 4}
    given |= {"qk_l2_norm": False, **ONE_RANK_AN_EXPERT}
    described = []
    for pattern in ([1, 0, 0, 0], [0, 1, 1, 1]):
        args = argparse.Namespace(**given | {name: pattern})
        layers = ModelLayers.of_arguments(args, 4)
        told_of = {"halves": layers.halves(args), "other_layers": layers.kinds().others}
        described.append(dataclasses.replace(DESCRIPTION, **told_of))
    assert described[0].other_layers == described[1].other_layers
    assert told in differences(*described)


def test_latents_of_another_size_are_another_model():
    given = {"multi_latent_attention": True, "num_experts": None, "window_size": None}
    given |= {"no_rope_freq": None, "qk_layernorm": True, "kv_lora_rank": 16, "q_lora_rank": None}
    given |= {"qk_head_dim": 12, "qk_pos_emb_head_dim": 8, "v_head_dim": 16}
    given |= {"mtp_num_layers": None, "attention_output_gate": False, "qk_l2_norm": False}
    described = []
    for size in (16, 32):
        args = argparse.Namespace(**given | {"kv_lora_rank": size})
        halves = ModelLayers.of_arguments(args, 4).halves(args)
        described.append(dataclasses.replace(DESCRIPTION, halves=halves))
    assert differences(*described) == ["attention.kv_lora_rank: 16 in the file, 32 in the run"]
    assert described[0].rotated_channels == 8


def _described(**flags) -> Description:
    given = {"multi_latent_attention": False, "num_experts": None, "window_size": None}
    given |= {"no_rope_freq": None, "qk_layernorm": False, "position_embedding_type": "rope"}
    given |= {"qk_l2_norm": False, "mtp_num_layers": None, "attention_output_gate": False}
    args = argparse.Namespace(**given | flags)
    halves = ModelLayers.of_arguments(args, 4).halves(args)
    return dataclasses.replace(DESCRIPTION, halves=halves)


WHOLE = {"num_experts": 4, "moe_layer_freq": 1, "moe_ffn_hidden_size": 64, "moe_router_topk": 2}
WHOLE |= {"moe_shared_expert_intermediate_size": None, **ONE_RANK_AN_EXPERT}


def test_costs_of_experts_that_lie_otherwise_over_ranks_are_not_of_the_run():
    """Each rank has others of their weights, and sends tokens otherwise."""
    whole = _described(**WHOLE)
    over_four = {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}
    assert differences(whole, _described(**WHOLE | over_four)) == [
        "mlp.expert_parallel: none in the file, 4 in the run",
        "mlp.expert_tensor_parallel: none in the file, 1 in the run",
    ]
    unsaid = {"expert_tensor_parallel_size": None}  # as many as of other weights
    assert differences(whole, _described(**WHOLE | unsaid)) == []


@pytest.mark.parametrize(
    ("p", "experts", "parts", "ranks"),
    [
        *((2, 1, 2, 2), (2, 1, 1, 2), (2, 2, 1, 2), (2, 2, 2, 4), (2, 4, 1, 4), (2, 2, 4, 8)),
        *((6, 2, 1, 6), (6, 4, 1, 12), (1, 1, 1, 1)),
    ],
)
def test_replicas_share_experts_whose_ranks_are_not_within_each(p, experts, parts, ranks):
    """Of 6 ranks and experts over 4 the second group has ranks of two replicas."""
    over = {"expert_model_parallel_size": experts, "expert_tensor_parallel_size": parts}
    over |= {"tensor_model_parallel_size": p}
    described = dataclasses.replace(_described(**WHOLE | over), p=p)
    assert (described.ranks, described.experts_shared) == (ranks, ranks > p)
    assert lie_over_replicas(argparse.Namespace(**over)) == (ranks > p)


@pytest.mark.parametrize(
    ("types", "num_experts", "replicas", "found"),
    [
        ("global_aux_loss", 4, 2, True),
        (["aux_loss", "global_aux_loss"], 4, 2, True),
        ("aux_loss", 4, 2, False),
        ("global_aux_loss", 4, 1, False),
        ("global_aux_loss", None, 2, False),
    ],
)
def test_what_replicas_count_together_keeps_their_mlps_in_step(types, num_experts, replicas, found):
    args = {"moe_router_load_balancing_type": types, "num_experts": num_experts}
    args |= {"data_parallel_size": replicas}
    assert balance_over_replicas(argparse.Namespace(**args)) == found


def test_costs_without_a_gate_of_the_output_are_not_of_a_model_with_one_nor_the_other_way():
    plain, gated = (_described(attention_output_gate=gate) for gate in (False, True))
    assert (plain.output_gate, gated.output_gate) == (False, True)
    for of_file, of_run, said in ((plain, gated, "none"), (gated, plain, "1")):
        with pytest.raises(UserError, match=f"attention.output_gate: {said} in the file, .* run: "):
            check_compatible(of_file, of_run)


def test_norms_of_queries_and_keys_are_those_of_the_model():
    plain, norm, l2 = _described(), _described(qk_layernorm=True), _described(qk_l2_norm=True)
    assert (plain.head_norm, norm.head_norm, l2.head_norm) == (None, "layernorm", "l2")
    assert differences(plain, l2) == ["attention.qk_l2_norm: none in the file, 1 in the run"]


def test_a_profile_measures_the_halves_of_each_kind(tmp_path):
    """Windows in two layers of three, experts in all but the first."""
    flags = {**EXPERTS, **WINDOWS, **ROPE, "--moe-layer-freq": "[0,1,1,1,1,1]"}
    flags |= {"--window-attn-skip-freq": 3, "--num-layers": 6, "--mtp-num-layers": 1}
    strategies = ("megatron_ts", "ulysses_z+recompute")
    found, _, _ = run_profile(tmp_path / "costs.json", model=flags, strategies=strategies)
    edges = {operation for strategy, operation, _ in found if strategy == "model"}
    assert edges == {"embedding", "prediction", "head"}
    operations = {operation for strategy, operation, _ in found if strategy == "megatron_ts"}
    assert operations == {"attention", "mlp", "layer", "mlp@2", "layer@2", "attention@3", "layer@3"}
    assert all(m.is_ok for m in found.values()), found
    s = LENGTH // 2
    dense, experts = (found["megatron_ts", name, s].kept_bytes for name in ("mlp", "mlp@2"))
    for layer, attention, mlp in (("layer", "attention", dense), ("layer@2", "attention", experts)):
        halves = found["megatron_ts", attention, s].kept_bytes + mlp
        whole = found["megatron_ts", layer, s].kept_bytes
        # of experts other ones get the tokens, where the attention runs before
        assert whole == pytest.approx(halves, rel=0.002 if layer == "layer" else 0.1)
    assert experts > 1.2 * dense


def test_an_mlp_that_no_strategy_changes_is_measured_once(tmp_path):
    """With +recompute and without; its costs are the same for all."""
    flags = {**EXPERTS, "--moe-layer-freq": "[0,1,1,1,1,1]"}
    names = ("megatron_ts", "ulysses_z", "metp", "metp+recompute", "ulysses_z+recompute")
    found, events, _ = run_profile(tmp_path / "costs.json", model=flags, strategies=names)
    measured = [e for e in events if e.get("operation") == "mlp@2" and not e["resumed"]]
    assert {e["strategy"] for e in measured} == {"megatron_ts", "metp+recompute"}
    for s in (LENGTH // 2, LENGTH):
        # what the dispatcher noted of the last run or notes of this one is no part of it
        assert found[names[3], "mlp@2", s].kept_bytes == found[names[3], "mlp", s].kept_bytes
        plain = {found[name, "mlp@2", s].costs for name in names[:3]}
        assert len(plain) == len({found[name, "mlp@2", s].costs for name in names[3:]}) == 1
        assert len({found[name, "mlp", s].forward_seconds for name in names[:3]}) == 3


def test_experts_over_replicas_are_measured_in_step(tmp_path):
    """Every rank runs each half as often: their tokens go to ranks of other replicas too."""
    flags = {**EXPERTS, "--moe-token-dispatcher-type": "alltoall", "--num-layers": 2}
    flags |= {"--tensor-model-parallel-size": 1, "--expert-model-parallel-size": RANKS}
    output, fault, strategies = tmp_path / "costs.json", "other clock", ("megatron_ts",)
    found, events, _ = run_profile(output, fault=fault, model=flags, strategies=strategies)
    assert all(m.is_ok for m in found.values()), found
    assert "mlp" in {operation for _, operation, _ in found}
    assert not [e for e in events if e.get("resumed")]
