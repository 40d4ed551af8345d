"""Tensors that say cuda:0 and have no values, forward and backward, on a machine without a GPU.

What mixes devices raises, and so does a call that the CUDA operators do not take. Autograd's engine
would ask a device for its streams; the graph is walked here instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

HOPPER = (9, 0)


@contextlib.contextmanager
def fake_cuda() -> Iterator[None]:
    """Tensors made inside are fake; their device is a Hopper."""
    with (
        patch.object(torch.autograd, "_engine_run_backward", _run_backward),
        patch.object(torch.cuda, "get_device_capability", lambda device=None: HOPPER),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield


def _run_backward(outputs, grads, retain_graph, create_graph, inputs, *rest, **how):
    """As autograd's engine: gradients of the inputs, or into .grad of all leaves."""
    roots, wanted = ([_edge(one) for one in some] for some in (outputs, inputs))
    order = _in_order([root.node for root in roots])
    goals = {edge.node for edge in wanted} or {node for node in order if _is_leaf(node)}
    passed: set[Any] = set()  # those that a gradient passes on its way
    for node in reversed(order):
        if any(after in goals | passed for after in _following(node)):
            passed.add(node)
    sums: dict[tuple[Any, int], Tensor] = {}
    for root, grad in zip(roots, grads, strict=True):
        _add(sums, root.node, root.output_nr, grad)
    for node in order:
        if node in passed:
            for (after, index), grad in zip(node.next_functions, _grads(node, sums), strict=False):
                if after in goals | passed and grad is not None:
                    _add(sums, after, index, grad)
    if not wanted:
        for node in goals:
            if (grad := sums.get((node, 0))) is not None:
                leaf = node.variable
                leaf.grad = grad if leaf.grad is None else leaf.grad + grad
    return tuple(sums.get((edge.node, edge.output_nr)) for edge in wanted)


def _edge(one: Tensor | GradientEdge) -> GradientEdge:
    return get_gradient_edge(one) if isinstance(one, Tensor) else one


def _following(node: Any) -> list[Any]:
    return [after for after, _ in node.next_functions if after is not None]


def _is_leaf(node: Any) -> bool:
    return hasattr(node, "variable")


def _in_order(roots: Sequence[Any]) -> list[Any]:
    """Every node before those that it leads to."""
    order: list[Any] = []
    seen: set[Any] = set()
    for root in roots:
        stack = [(root, iter(_following(root)))] if root not in seen else []
        seen.add(root)
        while stack:
            rest = stack[-1][1]
            after = next((one for one in rest if one not in seen), None)
            if after is None:
                order.append(stack.pop()[0])
            else:
                seen.add(after)
                stack.append((after, iter(_following(after))))
    return order[::-1]


def _grads(node: Any, sums: dict[tuple[Any, int], Tensor]) -> Sequence[Tensor | None]:
    """One for each of node.next_functions, from those of the node's outputs."""
    metadata = node._input_metadata
    given = [sums.get((node, index)) for index in range(len(metadata))]
    if all(grad is None for grad in given):
        return ()
    if not isinstance(node, BackwardCFunction):
        made = node(*given)
        return made if isinstance(made, tuple) else (made,)
    filled = [
        torch.zeros(of.shape, dtype=of.dtype, device=of.device) if grad is None else grad
        for grad, of in zip(given, metadata, strict=True)
    ]
    with torch.no_grad():
        made = node.apply(*filled)
    made = made if isinstance(made, tuple) else (made,)
    needed = (x for x, needs in zip(made, node.needs_input_grad, strict=True) if needs)
    return [None if after is None else next(needed) for after, _ in node.next_functions]


def _add(sums: dict[tuple[Any, int], Tensor], node: Any, index: int, grad: Tensor) -> None:
    like = node.variable if _is_leaf(node) else node._input_metadata[index]
    assert grad.device == like.device, (node.name(), grad.device, like.device)
    grad = grad.sum_to_size(like.shape).to(like.dtype)  # as of what was broadcast
    before = sums.get((node, index))
    sums[node, index] = grad if before is None else before + grad
