"""Flags of a mixture of experts that Megatron's parser takes, and that end it in a traceback later.

And those by which ranks would wait for tokens of another length than the others send.
"""

from __future__ import annotations

import argparse

from megatron.core.tensor_parallel.random import HAVE_TE
from megatron.core.transformer.moe import fused_a2a

from megatron_paradyse.costs.description import ranks_together
from megatron_paradyse.errors import UserError

DISPATCHERS = {  # of --moe-flex-dispatcher-backend: the package, and whether it is there
    "deepep": ("deep_ep", fused_a2a.HAVE_DEEP_EP),
    "hybridep": ("deep_ep with HybridEP", fused_a2a.HAVE_HYBRIDEP),
    "ncclep": ("TransformerEngine with NCCL EP", fused_a2a.HAVE_TE_EP),
}
SINKHORN = "sinkhorn"
ALONE = (SINKHORN, "quantile_balancing")  # Megatron passes over them in a list of several


def lie_over_replicas(args: argparse.Namespace) -> bool:
    """Whether ranks of several replicas run the experts of a layer together."""
    p, experts = args.tensor_model_parallel_size, args.expert_model_parallel_size
    return ranks_together(p, experts, args.expert_tensor_parallel_size) > p


def balance_over_replicas(args: argparse.Namespace) -> bool:
    """Whether routers of experts add up what replicas count, while an MLP runs."""
    types = args.moe_router_load_balancing_type
    named = "global_aux_loss" in ([types] if isinstance(types, str) else types)
    return bool(args.num_experts) and named and args.data_parallel_size > 1


def check_experts(args: argparse.Namespace, ffn_size: int | None) -> None:
    """UserError for what would end in a traceback of Megatron, with or without this package.

    ffn_size: of an expert, unless --moe-ffn-hidden-size is given.
    """
    for flag in ("--expert-model-parallel-size", "--expert-tensor-parallel-size"):
        ranks = getattr(args, flag[2:].replace("-", "_"))
        if ranks is not None and ranks < 1:
            raise UserError(f"{flag} {ranks} is no number of ranks: give 1 or more")
    if not args.num_experts:
        return
    _check_sizes(args, ffn_size)
    _check_choice(args)
    _check_balancing(args)
    _check_packages(args)
    _check_biases(args)


def check_exchange(args: argparse.Namespace) -> None:
    """UserError where replicas exchange tokens by a number that each takes from its own length."""
    if args.num_experts and args.moe_pad_expert_input_to_capacity and lie_over_replicas(args):
        raise UserError(
            "--moe-pad-expert-input-to-capacity with experts over several replicas "
            "(--expert-model-parallel-size, --expert-tensor-parallel-size), each of whose "
            "capacities follows from its own documents: leave it out (tokens are dropped all the "
            "same), or give --paradyse-sequences fixed"
        )


def _check_sizes(args: argparse.Namespace, ffn_size: int | None) -> None:
    """Of what ranks share evenly."""
    p = args.tensor_model_parallel_size
    parts = args.expert_tensor_parallel_size or p
    size, flag = args.moe_ffn_hidden_size or ffn_size or 0, "--moe-ffn-hidden-size"
    if size % parts:
        raise UserError(
            f"{flag} {size} is not divisible by {parts}, the ranks over which Megatron shares an "
            f"expert (--expert-tensor-parallel-size): use {flag} {size + -size % parts}"
        )
    size = args.moe_shared_expert_intermediate_size or 0
    flag = "--moe-shared-expert-intermediate-size"
    if size % p:
        raise UserError(
            f"{flag} {size} is not divisible by --tensor-model-parallel-size {p}, over whose ranks "
            f"Megatron shares it: use {flag} {size + -size % p}"
        )


def _check_choice(args: argparse.Namespace) -> None:
    """Of how many experts a token may get."""
    there, within = args.num_experts, "experts"
    if args.moe_router_group_topk and args.moe_router_num_groups:
        there = there // args.moe_router_num_groups * args.moe_router_group_topk
        within = f"experts of --moe-router-group-topk {args.moe_router_group_topk} groups"
    if not 1 <= args.moe_router_topk <= there:
        raise UserError(
            f"--moe-router-topk {args.moe_router_topk}, of {there} {within}: give 1 to {there}"
        )


def _check_balancing(args: argparse.Namespace) -> None:
    given, weights = args.moe_router_load_balancing_type, args.moe_aux_loss_coeff
    types = [given] if isinstance(given, str) else given
    for name in ALONE:
        if name in types and len(types) > 1:
            raise UserError(
                f"--moe-router-load-balancing-type {' '.join(types)}: Megatron passes over {name} "
                "among several: give it alone, or leave it out"
            )
    if SINKHORN in types and weights not in (0, [0]):
        raise UserError(
            f"--moe-router-load-balancing-type {SINKHORN} with --moe-aux-loss-coeff, which "
            "Megatron refuses at the first step: leave --moe-aux-loss-coeff out"
        )


def _check_packages(args: argparse.Namespace) -> None:
    if args.moe_latent_size and not HAVE_TE:
        raise UserError(
            f"--moe-latent-size {args.moe_latent_size}, whose projections Megatron has with "
            "TransformerEngine alone: install it, or leave --moe-latent-size out"
        )
    if args.moe_router_fusion and not HAVE_TE:
        raise UserError(
            "--moe-router-fusion, which Megatron runs with TransformerEngine alone: install it, or "
            "leave --moe-router-fusion out"
        )
    backend = args.moe_flex_dispatcher_backend
    package, there = DISPATCHERS.get(backend, ("", True))
    if args.moe_token_dispatcher_type == "flex" and not there:
        raise UserError(
            f"--moe-token-dispatcher-type flex with --moe-flex-dispatcher-backend {backend}, which "
            f"needs {package}: install it, or give --moe-token-dispatcher-type alltoall"
        )


def _check_biases(args: argparse.Namespace) -> None:
    """No shared expert has some, nor one of Megatron's own that calls its MLP."""
    if not args.add_bias_linear:
        return
    given = f"--num-experts {args.num_experts} with biases"
    if args.moe_shared_expert_intermediate_size:
        raise UserError(f"{given}, which shared experts have not: add --disable-bias-linear")
    if args.transformer_impl == "local":
        raise UserError(
            f"{given}, which Megatron's --transformer-impl local cannot add: add "
            "--disable-bias-linear"
        )
    fused = args.bias_gelu_fusion and not args.use_te_activation_func
    if fused and not (args.swiglu or args.quick_geglu):
        raise UserError(
            f"{given}: Megatron cannot fuse them with the GELU of experts: add "
            "--no-bias-gelu-fusion or --disable-bias-linear"
        )
