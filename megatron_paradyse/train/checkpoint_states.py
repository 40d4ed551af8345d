"""Checkpoints whose optimizer states Megatron would give to other parameters, or not find."""

from __future__ import annotations

import argparse

from megatron_paradyse.errors import UserError

_OR_WITHOUT_ORDER = "or save it there with --dist-ckpt-optim-fully-reshardable, or --no-load-optim"


def check_order(run: argparse.Namespace, of_checkpoint: argparse.Namespace) -> None:
    """UserError where Megatron would give parameters the optimizer states of others.

    By default its distributed optimizer writes states in the order of the parameters, of which
    TransformerEngine's layers, with norms inside their linears, have another one, and so have its
    experts where they are grouped: fc1 of all of them comes before fc2.
    """
    if not _in_order(run, of_checkpoint) or run.no_load_optim:
        return
    theirs, ours = (getattr(args, "transformer_impl", None) for args in (of_checkpoint, run))
    if theirs not in (None, ours):
        flag = f"--transformer-impl {theirs}"
        raise _of_other_order(run, f"of {flag}, this run of {ours}", f"give {flag}")
    grouped, flag = _groups_experts(of_checkpoint), "--moe-grouped-gemm"
    if grouped and not _groups_experts(run):
        raise _of_other_order(run, f"of {flag}, this run without it", f"give {flag}")
    if not grouped and _groups_experts(run):
        raise _of_other_order(run, f"without {flag}, this run with it", f"leave {flag} out")


def _of_other_order(run: argparse.Namespace, what: str, remedy: str) -> UserError:
    return UserError(
        f"the checkpoint in {run.load} is {what}, and its distributed optimizer's states are in "
        f"the order of the parameters, which differs: {remedy}, {_OR_WITHOUT_ORDER}"
    )


def _groups_experts(args: argparse.Namespace) -> bool:
    """Whether several experts of a rank are one module; Megatron's own never are."""
    engine = getattr(args, "transformer_impl", None) == "transformer_engine"
    ranks = getattr(args, "expert_model_parallel_size", 1)
    several = (getattr(args, "num_experts", None) or 0) > ranks
    return engine and several and getattr(args, "moe_grouped_gemm", False)


def _in_order(*both: argparse.Namespace) -> bool:
    """Of run and checkpoint: whether optimizer states lie as those of the ranks' parameters."""
    distributed = all(getattr(args, "use_distributed_optimizer", False) for args in both)
    return distributed and not getattr(both[1], "dist_ckpt_optim_fully_reshardable", False)


def check_expert_states(run: argparse.Namespace, of_checkpoint: argparse.Namespace) -> None:
    """UserError where Megatron keeps the optimizer states of experts apart in one of the two alone.

    So it does where experts have ranks of their own: it then finds too few states, or too many. Or
    it gives those of one expert to another, where as many parameters lie on a rank.
    """
    theirs, ours = (_own_ranks(args) for args in (of_checkpoint, run))
    if theirs == ours or run.no_load_optim or run.finetune:
        return
    if theirs and ours:
        if not _in_order(run, of_checkpoint):
            return
        raise UserError(
            f"the checkpoint in {run.load} is of {theirs}, this run of {ours}, and its distributed "
            "optimizer's states are of the parts of experts there: "
            f"give {theirs}, {_OR_WITHOUT_ORDER}"
        )
    p = run.tensor_model_parallel_size
    like_others = f"--expert-model-parallel-size 1 --expert-tensor-parallel-size {p}"
    raise UserError(
        f"the checkpoint in {run.load} has the optimizer states of experts "
        f"{f'apart ({theirs})' if theirs else 'among the others'}, this run "
        f"{f'apart ({ours})' if ours else 'among the others'}, and Megatron cannot load them: give "
        f"{theirs or like_others}, or --no-load-optim"
    )


def _own_ranks(args: argparse.Namespace) -> str:
    """The flags that give experts other ranks than other weights have; "" where they have not."""
    experts = getattr(args, "expert_model_parallel_size", 1)
    p = getattr(args, "tensor_model_parallel_size", 1)
    parts = getattr(args, "expert_tensor_parallel_size", None) or p
    if not getattr(args, "num_experts", None) or (experts == 1 and parts == p):
        return ""
    return f"--expert-model-parallel-size {experts} --expert-tensor-parallel-size {parts}"
