"""Flags that Megatron's parser takes, and that end it in a traceback later.

As it builds the model, or at the first step.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Mapping

import torch
from megatron.core import optimizer
from megatron.core.tensor_parallel.random import HAVE_TE

from megatron_paradyse.errors import UserError
from megatron_paradyse.settings import FIXED
from megatron_paradyse.train.expert_flags import check_experts
from megatron_paradyse.train.model_layers import EXPERTS, ModelLayers, count_layers


def check_megatrons_limits(args: argparse.Namespace) -> None:
    """UserError for what would end in a traceback of Megatron, with or without this package."""
    patterns: Mapping[str, tuple[int, ...]] = {}
    if args.num_layers:  # refuses lists of too few layers
        patterns = ModelLayers.of_arguments(args, count_layers(args)).patterns
    check_key_heads(args)
    ffn_size = _ffn_size(args)
    if not args.num_experts or 0 in patterns.get(EXPERTS, ()):
        _check_ffn_size(args, ffn_size)
    _check_length(args)
    _check_positions(args)
    check_experts(args, ffn_size)
    _check_recomputation(args)
    _check_optimizer(args)
    _check_initialization(args)
    _check_packages(args)
    _check_communicators(args)
    if args.rerun_mode == "report_stats":
        raise UserError(
            "--rerun-mode report_stats, which Megatron 0.19 takes and does not know: leave it out, "
            "or give validate_results or disabled"
        )
    if args.num_workers < 0:
        raise UserError(
            f"--num-workers {args.num_workers}: give how many processes read ahead, or 0 for none"
        )
    if args.use_ring_exchange_p2p and not hasattr(torch.distributed, "ring_exchange"):
        raise UserError(
            "--use-ring-exchange-p2p, which this PyTorch has not: it is of a build of NVIDIA's: "
            "leave it out"
        )
    if args.freeze_all_layers:
        raise UserError(
            "--freeze-all-layers, which Megatron 0.19 does not read as it builds a model, and "
            "trains every layer: leave it out, or give --lr 0"
        )


def check_key_heads(args: argparse.Namespace) -> None:
    groups, p = args.num_query_groups, args.tensor_model_parallel_size
    if args.group_query_attention and groups and groups % p and p % groups:
        fitting = max(q for q in range(1, p) if groups % q == 0)
        raise UserError(
            f"--num-query-groups {groups} and --tensor-model-parallel-size {p}: Megatron shares "
            "key heads over ranks only where one of these divides the other: use "
            f"--tensor-model-parallel-size {fitting}"
        )


def _ffn_size(args: argparse.Namespace) -> int | None:
    """As Megatron will have it."""
    size = args.ffn_hidden_size
    if size is None and args.hidden_size:
        size = 4 * args.hidden_size
        size = int(size * 2 / 3 / 64) * 64 if args.swiglu else size
    return size


def _check_ffn_size(args: argparse.Namespace, size: int | None) -> None:
    p = args.tensor_model_parallel_size
    if size and size % p:
        raise UserError(
            f"--ffn-hidden-size {size} is not divisible by --tensor-model-parallel-size {p}, over "
            f"whose ranks Megatron shares an MLP: use --ffn-hidden-size {size + -size % p}"
        )


def _check_length(args: argparse.Namespace) -> None:
    """Of Megatron's own data, which are not padded to the ranks as documents are."""
    s, p = args.seq_length, args.tensor_model_parallel_size
    if args.paradyse_settings.sequences == FIXED and s and s % p:
        raise UserError(
            f"--seq-length {s} with --paradyse-sequences fixed is no multiple of "
            f"--tensor-model-parallel-size {p}, whose ranks share a sequence evenly: give "
            f"--seq-length {s - s % p or p}, or train on documents"
        )


def _check_positions(args: argparse.Namespace) -> None:
    if args.position_embedding_type == "mrope" and not args.multi_latent_attention:
        raise UserError(
            "--position-embedding-type mrope, of positions of three kinds, where the data have "
            "one: give --position-embedding-type rope"
        )


def _check_recomputation(args: argparse.Namespace) -> None:
    selective = args.recompute_granularity == "selective"
    if selective and "layernorm" in (args.recompute_modules or ()) and not HAVE_TE:
        raise UserError(
            "--recompute-modules layernorm, which Megatron 0.19 runs with TransformerEngine alone: "
            "install it, or leave layernorm out"
        )


def _check_optimizer(args: argparse.Namespace) -> None:
    if args.use_distributed_optimizer and args.optimizer == "sgd":
        raise UserError(
            "--use-distributed-optimizer with --optimizer sgd, whose states Megatron cannot share "
            "out: drop one of them"
        )
    _check_instances(args)
    _check_average(args)
    if args.optimizer not in ("adam", "sgd") and not optimizer.HAVE_EMERGING_OPTIMIZERS:
        raise UserError(
            f"--optimizer {args.optimizer}, which Megatron takes from the package "
            "emerging-optimizers: pip install emerging-optimizers"
        )


def _check_instances(args: argparse.Namespace) -> None:
    """Of the distributed optimizer, among which the replicas are shared out evenly."""
    count, flag = args.num_distributed_optimizer_instances, "--num-distributed-optimizer-instances"
    if count == 1:
        return
    if not args.use_distributed_optimizer:
        raise UserError(
            f"{flag} {count} without --use-distributed-optimizer: add it, or leave {flag} out"
        )
    replicas = args.world_size // (
        args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    )
    if count < 1 or replicas % count:
        raise UserError(
            f"{flag} {count} does not divide {replicas} data-parallel replicas: give a number that "
            "does"
        )


def _check_average(args: argparse.Namespace) -> None:
    sequences, given = args.paradyse_settings.sequences, "--calculate-per-token-loss"
    if sequences != FIXED:  # which sets that flag
        given = f"--paradyse-sequences {sequences}"
    elif not args.calculate_per_token_loss:
        return
    if args.ddp_average_in_collective:
        raise UserError(
            f"--ddp-average-in-collective with {given}, where gradients are divided by tokens, not "
            "by replicas: leave --ddp-average-in-collective out"
        )


def _check_initialization(args: argparse.Namespace) -> None:
    if args.init_method_xavier_uniform:
        raise UserError(
            "--init-method-xavier-uniform, which Megatron 0.19 hands to a config that does not "
            "know it: leave it out, or give --init-method-std"
        )
    sharded = args.use_megatron_fsdp or args.use_torch_fsdp2
    read = args.load or args.pretrained_checkpoint
    if args.init_model_with_meta_device and not (sharded or read):
        raise UserError(
            "--init-model-with-meta-device without a checkpoint: Megatron 0.19 then trains what "
            "memory happens to hold: give --load, or leave --init-model-with-meta-device out"
        )


def _check_packages(args: argparse.Namespace) -> None:
    """Of jobs that are watched or started again: Megatron ends, of one as if all were well."""
    for is_asked, flag, package in (
        (args.adlr_autoresume, "--adlr-autoresume", "userlib"),
        (args.enable_ft_package, "--enable-ft-package", "nvidia_resiliency_ext"),
    ):
        if is_asked and not _is_there(package):
            raise UserError(
                f"{flag}, for which Megatron imports {package}, which is not there: leave it out"
            )


def _check_communicators(args: argparse.Namespace) -> None:
    group, instances = args.sharp_enabled_group, "--num-distributed-optimizer-instances"
    if args.use_sharp and group != "dp_replica":
        raise UserError(
            "--use-sharp: Megatron 0.19 asks for its group dp before it has made it: leave it out, "
            f"or add --sharp-enabled-group dp_replica, with {instances}"
        )
    if group is not None and not args.use_sharp:
        raise UserError(f"--sharp-enabled-group {group} without --use-sharp: leave it out")
    if group is not None and args.num_distributed_optimizer_instances == 1:
        raise UserError(f"--sharp-enabled-group {group} needs {instances} of 2 or more: give it")
    path = args.nccl_communicator_config_path
    if path is not None and not os.path.isfile(path):
        raise UserError(f"--nccl-communicator-config-path {path} is no file: name one, or leave it")


def _is_there(package: str) -> bool:
    """Among the modules, or where Megatron looks for scripts of a cluster."""
    scripts = os.environ.get("SUBMIT_SCRIPTS", ".")
    return importlib.util.find_spec(package) is not None or os.path.isdir(f"{scripts}/{package}")
