"""Flags of Megatron that would be ignored or change the model are refused before anything runs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses

import pytest

from megatron_paradyse.errors import UserError
from megatron_paradyse.strategies import get_strategy
from megatron_paradyse.train import strategy_flags
from tests.train.harness import LATENT, write_documents
from tests.train.parsing import parsed, validated

PACKED = ["--paradyse-sequences", "packed", "--paradyse-pack-tokens", "4K"]
PACKED += ["--micro-batch-size", 1]
OPTIMAL = ["--paradyse-policy", "optimal"]
REFUSED = {
    "--enable-cuda-graph True": ["--enable-cuda-graph"],
    "--external-cuda-graph True": ["--external-cuda-graph"],
    "--reset-attention-mask True": ["--reset-attention-mask"],
    "--log-max-attention-logit True": ["--log-max-attention-logit"],
    "--qk-clip True": ["--qk-clip"],
    "--fp8-format e4m3 with .*: leave --fp8-format out": ["--fp8-format", "e4m3"],
    "--fp4-format e2m1 with .*: leave --fp4-format out": ["--fp4-format", "e2m1"],
    "--te-precision-config-file here with .*: strategies run in float32": [
        "--te-precision-config-file", "here",
    ],
    "--fp32-residual-connection True with .*: leave --fp32-residual-connection out": [
        "--bf16", "--fp32-residual-connection",
    ],
    "--fine-grained-activation-offloading True": ["--fine-grained-activation-offloading"],
    "--cpu-offloading-num-layers 2": ["--cpu-offloading-num-layers", 2],
    "--hybrid-context-parallel True": ["--hybrid-context-parallel"],
    "--experimental-attention-variant dsa": ["--experimental-attention-variant", "dsa"],
    "--heterogeneous-layers-config-path here": ["--heterogeneous-layers-config-path", "here"],
    "--heterogeneous-layers-config-encoded-json {}": [
        "--heterogeneous-layers-config-encoded-json", "{}",
    ],
    "--perform-rl-step True": ["--perform-rl-step"],
    "--inprocess-restart True": ["--inprocess-restart"],
    "--phase-transition-iterations 2,4 without --train-samples": [
        "--phase-transition-iterations", "2,4",
    ],
    "--phase-transition-iterations 2 with --step-batch-size-schedule": [
        "--phase-transition-iterations", "2", "--train-samples", 64,
        "--step-batch-size-schedule", "0:2",
    ],
    "--log-interval 0, by which Megatron divides: give 1 or more": ["--log-interval", 0],
    "--tensorboard-log-interval 0 is no interval: give 1 or more": [
        "--tensorboard-dir", "logs", "--tensorboard-log-interval", 0,
    ],
    "--check-weight-hash-across-dp-replicas-interval 0 is no interval: give": [
        "--check-weight-hash-across-dp-replicas-interval", 0,
    ],
    "--log-memory-interval 0 is no interval: give 1 or more": ["--log-memory-interval", 0],
    "--manual-gc-interval -1 is no interval: give 1 or more, or 0 to": [
        "--manual-gc", "--manual-gc-interval", -1,
    ],
    "--loss-scale-window 0 is no interval: give 1 or more": ["--fp16", "--loss-scale-window", 0],
    "--override-ckpt-iteration -1: give 0 to begin .* anew, or": ["--override-ckpt-iteration", -1],
    "--num-workers -1: give how many processes read ahead, or 0": ["--num-workers", -1],
    "--lr-decay-iters 0 leaves no iters": ["--lr-decay-iters", 0],
    "--lr-decay-style WSD with --train-iters 4 .*: give --lr-wsd-decay-iters": [
        "--lr-decay-style", "WSD", "--lr-wsd-decay-samples", 2,
    ],
    "--lr-warmup-fraction 1 of the decay": ["--lr-warmup-fraction", 1.0],
    "--lr-warmup-init 0.02 is above --lr 0.01": ["--lr-warmup-init", "2e-2"],
    "--num-distributed-optimizer-instances 2 without --use-distributed-optimizer: add": [
        "--num-distributed-optimizer-instances", 2,
    ],
    "--num-distributed-optimizer-instances 2 does not divide 1 data-parallel replicas: give": [
        "--num-distributed-optimizer-instances", 2, "--use-distributed-optimizer",
    ],
    "--mtp-num-layers 0 predicts nothing": ["--mtp-num-layers", 0],
    "--save with --mtp-num-layers 1, --pipeline-model-parallel-size 2 and tied embeddings": [
        "--mtp-num-layers", 1, "--pipeline-model-parallel-size", 2, "--save", "here",
    ],
    "--mtp-num-layers 1 with a BERT": ["--mtp-num-layers", 1, "--paradyse-model", "bert"],
    "--mtp-use-repeated-layer with --mtp-num-layers 2: costs tell nothing": [
        "--mtp-num-layers", 2, "--mtp-use-repeated-layer", *OPTIMAL,
    ],
    "--overlap-grad-reduce with --mtp-num-layers 2, --mtp-use-repeated-layer and --paradyse-": [
        "--mtp-num-layers", 2, "--mtp-use-repeated-layer", "--overlap-grad-reduce",
        "--paradyse-policy", "random:1",
    ],
    "--mtp-num-layers 5 with --num-layers 4: costs tell nothing": ["--mtp-num-layers", 5, *OPTIMAL],
    "--load with --mtp-num-layers 1, --pipeline-model-parallel-size 2 and tied embeddings": [
        "--mtp-num-layers", 1, "--pipeline-model-parallel-size", 2, "--load", "here",
    ],
    "--num-query-groups 4 and --tensor-model-parallel-size 3: .*: use --tensor-model-par.* 2": [
        "--num-attention-heads", 12, "--group-query-attention", "--num-query-groups", 4,
        "--tensor-model-parallel-size", 3, "--sequence-parallel",
    ],
    "--ffn-hidden-size 129 is not divisible by --tensor-mod.* 2, .*: use --ffn-hidden-size 130": [
        "--ffn-hidden-size", 129, "--tensor-model-parallel-size", 2, "--sequence-parallel",
    ],
    "--ffn-hidden-size 256 is not divisible by --tensor-model-parallel-size 3, .*: .*-size 258": [
        "--num-attention-heads", 12, "--hidden-size", 96, "--swiglu",
        "--tensor-model-parallel-size", 3, "--sequence-parallel",
    ],
    "--seq-length 17 with --paradyse-sequences fixed is no multiple of .* 2, .*-length 16, or": [
        "--seq-length", 17, "--paradyse-sequences", "fixed",
        "--tensor-model-parallel-size", 2, "--sequence-parallel",
    ],
    "--paradyse-order bucketed with --paradyse-sequences fixed, .*: leave it out, or train on": [
        "--paradyse-sequences", "fixed", "--paradyse-order", "bucketed",
    ],
    "--paradyse-long-documents refuse with --paradyse-sequences fixed, .*: leave it out, or": [
        "--paradyse-sequences", "fixed", "--paradyse-long-documents", "refuse",
    ],
    "--paradyse-balance with --paradyse-sequences fixed, .*: leave it out, or train on docum": [
        "--paradyse-sequences", "fixed", "--paradyse-balance", "--paradyse-policy", "optimal",
    ],
    "--window-attn-skip-freq tells of 3 layers, and there are 4: give a 0 or 1 for each": [
        "--window-size", "8,0", "--window-attn-skip-freq", "[1,0,1]",
    ],
    "--recompute-modules layernorm, which Megatron .* TransformerEngine alone: .* leave layerno": [
        "--recompute-granularity", "selective", "--recompute-modules", "layernorm",
    ],
    "--optimizer muon, which Megatron takes from the package .*: pip install emerging-optimizers": [
        "--optimizer", "muon",
    ],
    "--init-method-xavier-uniform, which .*: leave it out, or": ["--init-method-xavier-uniform"],
    "--init-model-with-meta-device without a checkpoint: .*: give --load, or leave": [
        "--init-model-with-meta-device",
    ],
    "--rerun-mode report_stats, which .*: leave it out, or give validate_results or disabled": [
        "--rerun-mode", "report_stats",
    ],
    "--freeze-all-layers, which Megatron 0.19 does .*, and trains every layer: leave it out, or": [
        "--freeze-all-layers",
    ],
    "--adlr-autoresume, .* imports userlib, which is not there: leave it out": [
        "--adlr-autoresume",
    ],
    "--use-ring-exchange-p2p, which this PyTorch has not: .*: leave": ["--use-ring-exchange-p2p"],
    r"refuses these flags: assert args\.save_interval is .*: --save-interval is not given$": [
        "--save", "here", "--paradyse-sequences", "fixed", "--mock-data",
    ],
    "Megatron refuses these flags: --no-position-embedding is deprecated, use --position-e": [
        "--no-position-embedding", "--paradyse-sequences", "fixed",
    ],
    "--ddp-average-in-collective with --paradyse-sequences documents, where .*: leave": [
        "--ddp-average-in-collective",
    ],
    "--ddp-average-in-collective with --calculate-per-token-loss, where .*: leave": [
        "--ddp-average-in-collective", "--calculate-per-token-loss",
        "--paradyse-sequences", "fixed",
    ],
    "--use-distributed-optimizer with --optimizer sgd, .*: drop one of them": [
        "--use-distributed-optimizer", "--optimizer", "sgd",
    ],
    "--mla-down-proj-fusion True": [*LATENT, "--mla-down-proj-fusion"],
    "--cache-mla-latents True": [*LATENT, "--cache-mla-latents"],
    "--position-embedding-type mrope with --multi-latent-attention, which rotates by": [
        *LATENT, "--position-embedding-type", "mrope", "--mrope-section", 1, 1, 2,
    ],
    "--position-embedding-type mrope, of positions of three kinds, where the data have one: ": [
        "--position-embedding-type", "mrope", "--mrope-section", 1, 1, 2,
        "--paradyse-policy", "fixed:megatron_ts",
    ],
    "--kv-lora-rank 15 plus --qk-pos-emb-head-dim 8 is no multiple of --tensor-model-para": [
        *LATENT, "--kv-lora-rank", 15, "--tensor-model-parallel-size", 2, "--sequence-parallel",
    ],
    "--rotary-interleaved with --multi-latent-attention, whose pairs": [
        *LATENT, "--rotary-interleaved",
    ],
    "--attention-output-gate with --multi-latent-attention, which has no gate in Megatron": [
        *LATENT, "--attention-output-gate",
    ],
    "--q-lora-rank 25 is no multiple of --tensor-model-parallel-size 2, over": [
        *LATENT, "--q-lora-rank", 25, "--tensor-model-parallel-size", 2, "--sequence-parallel",
    ],
    "--rampup-batch-size 2 2 8: Megatron 0.19 does not read it: .* --step-batch-size-schedule": [
        "--rampup-batch-size", 2, 2, 8,
    ],
    "--step-batch-size-schedule '0:4 256:2': .*: let them grow": [
        "--step-batch-size-schedule", "0:4 256:2",
    ],
    "--logits-save-dir keeps all logits": ["--logits-save-dir", "here"],
    "--logits-load-dir compares all logits": ["--logits-load-dir", "here"],
    "--logits-save-dir with --paradyse-sequences documents": [
        "--logits-save-dir", "here", "--paradyse-head-tile", "off",
    ],
    "--logits-load-dir with --paradyse-sequences packed": [
        *PACKED, "--logits-load-dir", "here", "--paradyse-head-tile", "off",
    ],
    "--object-storage-cache-path with --paradyse-sequences documents": [
        "--object-storage-cache-path", "here",
    ],
    "--sharp-enabled-group dp without --use-sharp: leave it out": ["--sharp-enabled-group", "dp"],
    "--nccl-communicator-config-path nowhere is no file: name one": [
        "--nccl-communicator-config-path", "nowhere",
    ],
    "--batch-invariant-mode does not run with metp": [
        "--batch-invariant-mode", "--paradyse-policy", "fixed:metp",
    ],
    "--use-kitchen-attention with --paradyse-sequences packed": [
        *PACKED, "--use-kitchen-attention",
    ],
    "--attention-backend unfused": [*PACKED, "--attention-backend", "unfused"],
    "--recompute-granularity full with --paradyse-policy optimal": [
        *OPTIMAL, "--recompute-granularity", "full", "--recompute-method", "uniform",
        "--recompute-num-layers", 1,
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ({"lr": None}, "^--lr is missing, .*: give one$"),
        ({"train_iters": None}, "^how long to train is missing: give --train-iters or --train-sam"),
        ({"train_iters": None, "lr": None, "skip_train": True}, "^how long to train is missing: "),
    ],
)
def test_a_training_has_a_learning_rate_and_an_end(missing, said, monkeypatch):
    args = parsed(monkeypatch, "--paradyse-sequences", "fixed", "--mock-data")
    vars(args).update(missing)
    with pytest.raises(UserError, match=said):
        validated(args)


@pytest.mark.parametrize("said", REFUSED)
def test_it_is_named_with_the_remedy(said, monkeypatch):
    args = parsed(monkeypatch, *REFUSED[said])
    with pytest.raises(UserError, match=said) as refused:
        validated(args)
    assert "\n" not in str(refused.value) and ": " in str(refused.value)


def test_what_an_optimizer_lacks_is_told_in_one_line(monkeypatch):
    """Megatron makes its configuration after the flags have passed all checks."""
    from megatron.training import argument_utils

    flags = ["--use-precision-aware-optimizer", "--use-distributed-optimizer"]
    args = parsed(monkeypatch, *flags, "--paradyse-sequences", "fixed", "--mock-data")
    args.data_path = None
    said = "^Megatron refuses these flags: --use-precision-aware-optimizer requires FusedAdam"
    with pytest.raises(UserError, match=said):
        argument_utils.pretrain_cfg_container_from_args(validated(args), None)


@pytest.mark.parametrize(
    ("flag", "value", "known"),
    [
        ("--exit-signal", "TERM", "none of SIGHUP, .*, SIGTERM, .*"),
        ("--attention-backend", "triton", "none of flash, fused, unfused, local, auto"),
        ("--cuda-graph-modules", "all", "not known"),
    ],
)
def test_a_name_that_megatron_does_not_know_is_refused(flag, value, known, monkeypatch):
    """It looks such names up where argparse expects no KeyError."""
    with pytest.raises(UserError, match=f"^argument {flag}.*: '{value}' is {known}: see --help$"):
        parsed(monkeypatch, flag, value)


@pytest.mark.parametrize("samples", [3, 4])
def test_samples_of_less_than_one_batch_are_refused(samples, monkeypatch, tmp_path):
    """Megatron rounds their iterations down to none, and ends with code 0."""
    write_documents(tmp_path / "corpus", [20] * 10)
    args = parsed(monkeypatch, "--train-samples", samples)
    args.data_path = [str(tmp_path / "corpus")]
    said = "^--train-samples 3 trains nothing, as a global batch has 4: give that many or more, or"
    with pytest.raises(UserError, match=said) if samples < 4 else contextlib.nullcontext():
        validated(args)


def test_a_strategy_of_others_that_knows_no_gate_is_refused(monkeypatch):
    metp = dataclasses.replace(get_strategy("metp"), takes_gate=False)
    monkeypatch.setattr(strategy_flags, "get_strategy", lambda name: metp)
    args = parsed(monkeypatch, "--attention-output-gate", "--paradyse-policy", "fixed:metp")
    with pytest.raises(UserError, match=r"^strategy metp knows nothing of .*: name others by --pa"):
        validated(args)


@pytest.mark.parametrize(("interval", "said"), [(None, "is missing"), (0, "0 is no interval")])
def test_megatron_divides_by_the_interval_of_evaluations(interval, said, monkeypatch):
    args = parsed(monkeypatch)
    args.eval_interval = interval
    with pytest.raises(UserError, match=f"--eval-interval {said}, .*: give --eval-interval 1000"):
        validated(args)


ON_GPUS = ["--use-megatron-fsdp", "--use-torch-fsdp2"]  # parsed on a CPU they are refused
OF_LINEARS = ["--save-activations-interval 1", "--save-dgrads-interval 1"]
OF_LINEARS += ["--tensor-parallel-num-weight-shards 2"]
WHOLE = ["--paradyse-head-tile", "off", "--paradyse-policy"]


@pytest.mark.parametrize("flag", [*ON_GPUS, *OF_LINEARS])
def test_what_needs_megatrons_linears_runs_with_its_own_layers_only(flag, monkeypatch):
    def given(*more) -> argparse.Namespace:
        if flag not in ON_GPUS:
            return parsed(monkeypatch, *flag.split(), *WHOLE, *more)
        args = parsed(monkeypatch, *WHOLE, *more)
        return argparse.Namespace(**vars(args) | {flag[2:].replace("-", "_"): True})

    for policy, *more in (["fixed:metp"], ["optimal"], ["fixed:megatron_ts", *PACKED]):
        with pytest.raises(UserError, match=f"^{flag.split()[0]} with --paradyse: .* or give "):
            validated(given(policy, *more))
    with pytest.raises(UserError, match="--mock-data has no documents"):  # which comes later
        validated(given("fixed:megatron_ts", "--mock-data"))


ELSEWHERE = ["--sft", "--fim-data", "--logits-load-dir here", "--inprocess-restart"]


@pytest.mark.parametrize("flag", [*ELSEWHERE, "--dataloader-inter-document-masking"])
def test_what_only_a_checkouts_script_obeys_is_refused_without_it(flag, monkeypatch):
    """Without --paradyse too, as this entry is then a plain pretraining."""
    from megatron_paradyse.train import gpt

    given = argparse.Namespace(**{flag.split()[0].strip("-").replace("-", "_"): flag})
    monkeypatch.setattr(gpt, "parse_and_validate_args", lambda args_defaults: given)
    with pytest.raises(UserError, match=f"^{flag.split()[0]} is not in this entry point: run it"):
        gpt.pretrain()


@pytest.mark.parametrize("layout, apart", [("E|tt|ttm|L", True), ("Et|tmL", False), (None, False)])
def test_more_tokens_are_predicted_where_the_loss_is(layout, apart):
    from megatron_paradyse.train.model_flags import check_prediction_stage

    args = argparse.Namespace(
        mtp_num_layers=1, pipeline_model_parallel_layout=layout, pipeline_model_parallel_size=2
    )
    said = r"^--pipeline-model-parallel-layout E.tt.ttm.L: .*: put both into the last"
    with pytest.raises(UserError, match=said) if apart else contextlib.nullcontext():
        check_prediction_stage(args)


def test_iterations_that_a_tracker_file_names_are_refused(monkeypatch):
    from megatron.core.rerun_state_machine import RerunStateMachine

    monkeypatch.setattr(
        RerunStateMachine, "get_skipped_iterations_from_tracker_file", lambda path: [7, 9]
    )
    args = parsed(
        monkeypatch,
        "--paradyse-sequences",
        "fixed",
        "--result-rejected-tracker-filename",
        "rejected",
    )
    with pytest.raises(UserError, match=r"^--iterations-to-skip 7 9 with --paradyse: "):
        validated(args)
