"""What --use-checkpoint-args sets is checked as what the command line gives."""

from __future__ import annotations

import argparse

import pytest

from megatron_paradyse.errors import UserError
from megatron_paradyse.train.cost_cache import cost_key
from tests.train.harness import write_documents
from tests.train.parsing import parsed, validated

OF_A_CHECKPOINT = {
    "--paradyse with --tensor-model-parallel-size 2 needs --sequence-parallel": {
        "tensor_model_parallel_size": 2
    },
    "--recompute-num-layers 2 with --mtp-num-layers 1, whose layers Megatron recomputes": {
        "mtp_num_layers": 1, "recompute_granularity": "full", "recompute_method": "uniform",
        "recompute_num_layers": 2,
    },
    "--position-embedding-type relative does not run with metp": {
        "position_embedding_type": "relative"
    },
    "--activation-func-clamp-value 7.0 does not run with metp": {
        "activation_func_clamp_value": 7.0
    },
    "--num-experts 4 with biases: Megatron cannot fuse them": {
        "num_experts": 4, "transformer_impl": "transformer_engine",
    },
    "--glu-linear-offset 1.0 does not run with metp": {"glu_linear_offset": 1.0},
    "--num-attention-heads 7 is not divisible by --tensor-model-parallel-size 2": {
        "tensor_model_parallel_size": 2, "sequence_parallel": True, "num_attention_heads": 7,
    },
}  # fmt: skip


@pytest.mark.parametrize("said", OF_A_CHECKPOINT)
def test_what_a_checkpoint_sets_is_checked_too(said, monkeypatch):
    """As --use-checkpoint-args does, between parsing and validation."""
    args = parsed(monkeypatch, "--paradyse-policy", "fixed:metp")
    vars(args).update(OF_A_CHECKPOINT[said])
    with pytest.raises(UserError, match=said):
        validated(args)


def test_a_checkpoint_may_give_the_sequence_length(monkeypatch, tmp_path):
    write_documents(tmp_path / "corpus", [20] * 10)
    args = parsed(monkeypatch, "--use-checkpoint-args")
    args.data_path, args.seq_length = [str(tmp_path / "corpus")], None
    with pytest.raises(UserError, match="--seq-length is missing"):
        validated(argparse.Namespace(**vars(args)))
    args.seq_length = 64
    assert validated(args).calculate_per_token_loss


def test_grouped_experts_of_a_checkpoint_run_one_after_the_other_on_a_cpu(monkeypatch):
    """Megatron ended in "Unsupported compute capability for GroupedGEMM kernels."."""
    flags = ["--num-experts", 4, "--disable-bias-linear", "--mock-data"]
    args = parsed(monkeypatch, *flags, "--paradyse-sequences", "fixed")
    args.data_path, args.moe_grouped_gemm = None, True
    assert validated(args).moe_grouped_gemm is False


def test_what_a_checkpoint_says_in_other_words_finds_the_costs_of_the_flags(monkeypatch):
    """Of --use-checkpoint-args, which no quick profile can read: kept ones were not found."""
    args = parsed(monkeypatch, "--mock-data", "--paradyse-sequences", "fixed")
    args.data_path = None
    args = validated(args)
    key = cost_key(args, args.paradyse_settings)
    args.padded_vocab_size, args.num_query_groups = 64, args.num_attention_heads
    assert cost_key(args, args.paradyse_settings) == key
    args.padded_vocab_size = 128
    assert cost_key(args, args.paradyse_settings) != key
