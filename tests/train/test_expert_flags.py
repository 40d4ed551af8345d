"""Flags of a mixture of experts at which Megatron ends in a traceback are refused in one line."""

from __future__ import annotations

import argparse
import contextlib

import pytest

from megatron_paradyse.errors import UserError
from tests.train.harness import write_documents
from tests.train.parsing import parsed, validated

EXPERTS = ["--num-experts", 4, "--moe-router-topk", 2]
PLAIN = [*EXPERTS, "--disable-bias-linear"]
FIXED = [*PLAIN, "--paradyse-sequences", "fixed", "--mock-data"]
TP2 = ["--tensor-model-parallel-size", 2, "--sequence-parallel"]
GROUPS = ["--moe-router-num-groups", 2, "--moe-router-group-topk", 1]
BALANCING = "--moe-router-load-balancing-type"
REFUSED = {
    "--num-experts 4 with biases, which Megatron's --transformer-impl local cannot add: add": [
        *EXPERTS, "--no-bias-gelu-fusion",
    ],
    "--num-experts 4 with biases, which shared experts have not: add --disable-bias-linear": [
        *EXPERTS, "--moe-shared-expert-intermediate-size", 32,
    ],
    "--moe-latent-size 32, whose projections .*: install it, or leave --moe-latent-size out": [
        *EXPERTS, "--moe-latent-size", 32,
    ],
    "--moe-router-fusion, which .*: install it, or leave": [*PLAIN, "--moe-router-fusion"],
    "--moe-token-dispatcher-type flex with .* deepep, which needs deep_ep: install it, or give": [
        *PLAIN, "--moe-token-dispatcher-type", "flex",
    ],
    "--moe-token-dispatcher-type flex with .* hybridep, which needs deep_ep with HybridEP: ": [
        *PLAIN, "--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "hybridep",
    ],
    "--moe-ffn-hidden-size 33 is not divisible by 2, .*: use --moe-ffn-hidden-size 34": [
        *PLAIN, *TP2, "--moe-ffn-hidden-size", 33,
    ],
    "--moe-ffn-hidden-size 256 is not divisible by 3, .*: use --moe-ffn-hidden-size 258": [
        *PLAIN, "--expert-tensor-parallel-size", 3,
    ],
    "--moe-shared-expert-intermediate-size 33 is not divisible by .*: use .*-size 34": [
        *PLAIN, *TP2, "--moe-shared-expert-intermediate-size", 33,
    ],
    "--ffn-hidden-size 33 is not divisible by --tensor-model-parallel-size 2, .*-size 34": [
        *PLAIN, *TP2, "--moe-ffn-hidden-size", 32, "--ffn-hidden-size", 33,
        "--moe-layer-freq", "[0,1,1,1]",
    ],
    "--moe-router-topk 5, of 4 experts: give 1 to 4": [*PLAIN, "--moe-router-topk", 5],
    "--moe-router-topk 0, of 4 experts: give 1 to 4": [*PLAIN, "--moe-router-topk", 0],
    "--moe-router-topk 3, of 2 experts of --moe-router-group-topk 1 groups: give 1 to 2": [
        *PLAIN, *GROUPS, "--moe-router-topk", 3,
    ],
    f"{BALANCING} sinkhorn with --moe-aux-loss-coeff, .*: leave --moe-aux-loss-coeff out": [
        *PLAIN, BALANCING, "sinkhorn", "--moe-aux-loss-coeff", 0.1,
    ],
    f"{BALANCING} sinkhorn aux_loss: Megatron passes over sinkhorn .*: give it alone, or": [
        *PLAIN, BALANCING, "sinkhorn", "aux_loss", "--moe-aux-loss-coeff", 0.1, 0.1,
    ],
    "--expert-model-parallel-size 2 takes 2 ranks or a multiple, with 1 for .* got 1: start": [
        *FIXED, "--expert-model-parallel-size", 2,
    ],
    "--expert-model-parallel-size 1 takes 2 ranks or a multiple, with 2 for .* got 1: start": [
        *FIXED, "--expert-tensor-parallel-size", 2,
    ],
    "--expert-model-parallel-size 0 is no number of ranks: give 1 or more": [
        *PLAIN, "--expert-model-parallel-size", 0,
    ],
    "--expert-tensor-parallel-size -1 is no number of ranks: give 1 or more": [
        "--expert-tensor-parallel-size", -1,
    ],
}  # fmt: skip


@pytest.mark.parametrize("said", REFUSED)
def test_it_is_named_with_the_remedy(said, monkeypatch):
    args = parsed(monkeypatch, *REFUSED[said])
    with pytest.raises(UserError, match=f"^{said}") as refused:
        validated(args)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "flags",
    [
        ["--moe-ffn-hidden-size", 33],
        ["--ffn-hidden-size", 33, "--moe-ffn-hidden-size", 32],
        ["--moe-router-topk", 4],
        [*GROUPS, "--moe-router-topk", 2],
        [BALANCING, "sinkhorn", "--moe-aux-loss-coeff", 0],
        [BALANCING, "aux_loss", "seq_aux_loss", "--moe-aux-loss-coeff", 0.1, 0.1],
    ],
)
def test_what_megatron_runs_is_not_refused(flags, monkeypatch):
    args = parsed(monkeypatch, *FIXED, *flags)
    args.data_path = None
    validated(args)


CLAMPED = ["--swiglu", "--activation-func-clamp-value", 7.0, "--moe-layer-freq", "[0,1,1,1]"]
CLAMPED_PLANS = {
    "default: metp": "metp",
    "{default: megatron_ts, layers: {1: {attention: megatron_ts, mlp: metp}}}": "metp",
    "{default: metp, layers: {1: {attention: metp, mlp: megatron_ts+recompute}}}": None,
}


@pytest.mark.parametrize("plan", CLAMPED_PLANS)
def test_a_clamped_mlp_beside_experts_runs_as_megatron_runs_it(plan, monkeypatch, tmp_path):
    """It was refused at the first step; experts run whatever the plan says."""
    (tmp_path / "plan.yaml").write_text(plan)
    policy, refused = f"plan:{tmp_path / 'plan.yaml'}", CLAMPED_PLANS[plan]
    args = parsed(monkeypatch, *FIXED, *CLAMPED, "--paradyse-policy", policy)
    args.data_path = None
    said = f"^--activation-func-clamp-value 7.0 does not run with {refused} in the MLP of layer 1,"
    with pytest.raises(UserError, match=said) if refused else contextlib.nullcontext():
        validated(args)


@pytest.mark.parametrize("policy", ["fixed:ulysses_z", "random:1"])
def test_so_it_does_where_no_file_says_what_runs(policy, monkeypatch):
    args = parsed(monkeypatch, *FIXED, *CLAMPED, "--paradyse-policy", policy)
    with pytest.raises(UserError, match=r" in the MLP of layer 1, which has no experts: use --"):
        validated(args)
    args = parsed(monkeypatch, *FIXED, *CLAMPED[:-2], "--paradyse-policy", policy)
    args.data_path = None
    validated(args)


OVER_REPLICAS = ["--expert-model-parallel-size", 2], ["--expert-tensor-parallel-size", 2]


@pytest.mark.parametrize("flags", OVER_REPLICAS)
def test_replicas_that_share_experts_exchange_documents_of_their_own_lengths(
    flags, monkeypatch, tmp_path
):
    """Parts of one length, which all-gather and a padded capacity are of, ended every rank."""
    write_documents(tmp_path / "corpus", [20] * 10)
    monkeypatch.setenv("WORLD_SIZE", "2")

    def of_documents(*more):
        args = parsed(monkeypatch, *PLAIN, *flags, *more)
        args.data_path = [str(tmp_path / "corpus")]
        return validated(args)

    args = of_documents("--moe-token-dispatcher-type", "allgather")
    assert args.moe_token_dispatcher_type == "alltoall"
    padded = ["--moe-expert-capacity-factor", 1.0, "--moe-pad-expert-input-to-capacity"]
    padded += ["--moe-token-dispatcher-type", "alltoall"]
    with pytest.raises(UserError, match=r"^--moe-pad-expert-input-to-capacity with experts over"):
        of_documents(*padded)


@pytest.mark.parametrize(("p", "experts", "parts", "refused"), [
    (2, 2, 1, False), (2, 2, None, True), (2, 1, 4, True), (2, 1, None, False), (6, 4, 1, True),
])  # fmt: skip
def test_ranks_of_one_replica_pad_to_one_capacity(p, experts, parts, refused):
    from megatron_paradyse.train.expert_flags import check_exchange

    args = argparse.Namespace(
        num_experts=4,
        moe_pad_expert_input_to_capacity=True,
        tensor_model_parallel_size=p,
        expert_model_parallel_size=experts,
        expert_tensor_parallel_size=parts,
    )
    with pytest.raises(UserError) if refused else contextlib.nullcontext():
        check_exchange(args)
