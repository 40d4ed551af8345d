"""Mixtures of experts of which one rank runs: every expert gets as many tokens as another.

Megatron's dispatchers ask which expert gets how many tokens, to size what they send and compute.
Simulated tensors do not tell: even counts are put in their place, and all that Megatron runs to
find them runs, and takes its time. A real rank in the place of all would tell of its own tokens
alone: they go to experts in turns, whatever its router says.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.moe.moe_utils import get_capacity
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
)
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import Function
from torch.utils._python_dispatch import _disable_current_modes

from megatron_paradyse.costs.description import ranks_together
from megatron_paradyse.doors import opened
from megatron_paradyse.errors import UserError
from megatron_paradyse.simulator.models import last_value
from megatron_paradyse.train.expert_flags import SINKHORN


def check_balancing(args: argparse.Namespace) -> None:
    """UserError for what depends on values even so."""
    if args.num_experts and SINKHORN in args.moe_router_load_balancing_type:
        raise UserError(
            "--moe-router-load-balancing-type sinkhorn is not simulated: it goes on until values "
            "are even: give another, or profile on a device"
        )


def num_ranks(flags: Sequence[str], p: int) -> int:
    """Of as many whole replicas of p as experts need."""
    names = ("--expert-model-parallel-size", "--expert-tensor-parallel-size")
    experts, parts = (last_value(name, flags) for name in names)
    given = [text for text in (experts, parts) if text is not None]
    if not all(text.isdecimal() for text in given):  # which Megatron refuses
        return p
    return ranks_together(p, max(1, int(experts or 1)), int(parts or p))  # a 0 is refused later


@contextlib.contextmanager
def even_experts() -> Iterator[None]:
    """Dispatchers that are asked inside find even numbers of tokens."""
    found = MoEAlltoAllTokenDispatcher.preprocess
    taken = MoEAllGatherTokenDispatcher.dispatch_postprocess
    doors = [
        (MoEAlltoAllTokenDispatcher, "preprocess", _exchanged(found)),
        (MoEAllGatherTokenDispatcher, "dispatch_postprocess", _gathered(taken)),
    ]
    with opened(doors):
        yield


def _exchanged(found: Callable) -> Callable:
    @functools.wraps(found)
    def preprocess(self: Any, routing_map: Tensor) -> Any:
        if not is_fake(routing_map):
            _route_evenly(routing_map, self.config)
            return found(self, routing_map)
        found(self, routing_map)
        counts = _tokens_per_expert(self, len(routing_map))
        own = counts[self.local_expert_indices]
        everyone = np.tile(own, (self.tp_size * self.ep_size, 1))  # all ranks send the same
        if not self.drop_and_pad and (self.ep_size > 1 or self.tp_size > 1):
            self.input_splits = counts.reshape(self.ep_size, -1).sum(axis=1)
            self.output_splits = np.full(self.ep_size, own.sum())
            self.output_splits_tp = np.full(self.tp_size, own.sum() * self.ep_size)
        self.num_out_tokens = int(counts.sum())
        self.num_global_tokens_per_local_expert = everyone
        chunks = np.arange(everyone.size)  # Megatron's were made with the model, without values
        self.sort_input_by_local_experts = chunks.reshape(-1, len(own)).T.ravel()
        self.restore_output_by_local_experts = chunks.reshape(len(own), -1).T.ravel()
        return everyone.sum(axis=0)

    return preprocess


def _gathered(taken: Callable) -> Callable:
    @functools.wraps(taken)
    def dispatch_postprocess(self: Any, hidden_states: Tensor, probs: Tensor):
        if not is_fake(self.routing_map):
            _route_evenly(self.routing_map, self.config)
            return taken(self, hidden_states, probs)
        counts = _even(len(hidden_states) * self.router_topk, probs.shape[1])
        counts = counts[self.local_expert_indices]
        total = int(counts.sum())
        doors = [
            (torch.Tensor, "item", lambda tensor: total),
            (torch.Tensor, "masked_select", lambda x, mask: _Selected.apply(x, mask, total)),
        ]
        with opened(doors):
            tokens, _, local_probs = taken(self, hidden_states, probs)
        return tokens, counts, local_probs

    return dispatch_postprocess


def _route_evenly(routing_map: Tensor, config: Any) -> None:
    """[tokens, experts]: in place, and beside autograd, which multiplies by it."""
    num_tokens, num_experts = routing_map.shape
    capacity = _capacity(config, num_tokens, num_experts)
    with _disable_current_modes():  # nothing counts it among the bytes of a layer
        sizes = num_tokens, num_experts, config.moe_router_topk, capacity
        even = _in_turns(*sizes, routing_map.device)
    routing_map.data.copy_(even)


def _capacity(config: Any, num_tokens: int, num_experts: int) -> int | None:
    if config.moe_expert_capacity_factor is None:
        return None
    return get_capacity(
        num_tokens=num_tokens * config.moe_router_topk,
        num_experts=num_experts,
        capacity_factor=config.moe_expert_capacity_factor,
    )


@functools.lru_cache(maxsize=8)
def _in_turns(
    num_tokens: int, num_experts: int, topk: int, capacity: int | None, device: torch.device
) -> Tensor:
    """Token by token the next experts, none of more tokens than its capacity."""
    turns = torch.arange(num_tokens * topk)
    if capacity is not None:
        turns = turns[turns // num_experts < capacity]
    even = torch.zeros(num_tokens, num_experts, dtype=torch.bool)
    even[turns // topk, turns % num_experts] = True
    return even.to(device)


def _tokens_per_expert(dispatcher: Any, num_tokens: int) -> np.ndarray:
    """Of one rank: to each expert, none of more than its capacity; all of that where padded."""
    config, num_experts = dispatcher.config, dispatcher.num_experts
    counts = _even(num_tokens * config.moe_router_topk, num_experts)
    capacity = _capacity(config, num_tokens, num_experts)
    if capacity is None:
        return counts
    return np.full_like(counts, capacity) if dispatcher.drop_and_pad else counts.clip(max=capacity)


class _Selected(Function):
    """So many values of x, as masked_select keeps and gives them."""

    @staticmethod
    def forward(ctx, x, mask, count):
        ctx.save_for_backward(x, mask)
        return x.flatten()[:count].clone()

    @staticmethod
    def backward(ctx, grad):
        x, _ = ctx.saved_tensors
        grad_x = torch.zeros_like(x)
        grad_x.view(-1)[: len(grad)].copy_(grad)
        return grad_x, None, None


def _even(total: int, parts: int) -> np.ndarray:
    """Whole numbers that differ by one at most, the first the largest, as turns give."""
    return total // parts + (np.arange(parts) < total % parts)
