"""The flash kernels over many documents that lie side by side: one call with cumulative lengths.

As in kernels.py, with b = 1 and rule.parts: the rows of queries and of keys of each document, one
after the other in q and in k and v. Queries see their own document's keys only.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from megatron_paradyse.strategies.host import to_device
from megatron_paradyse.strategies.tiled_kernel import BlockRule

aten = torch.ops.aten
Parts = tuple[tuple[int, int], ...]


def cuda_flash_documents_forward(q: Tensor, k: Tensor, v: Tensor, rule: BlockRule):
    q, k, v = _tokens_first(q, k, v)
    out, lse, *_ = aten._flash_attention_forward(
        q, k, v, *_lengths(rule.parts, q), 0.0, rule.causal, False, scale=rule.scale,
        **_window(rule),
    )  # fmt: skip
    return *_heads_first(out), lse[None]


def cuda_flash_documents_backward(grad_out, q, k, v, out, lse, rule: BlockRule):
    grad_out, q, k, v, out = _tokens_first(grad_out, q, k, v, out)
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # random state, without dropout
    grads = aten._flash_attention_backward(
        grad_out, q, k, v, out, lse[0].contiguous(), *_lengths(rule.parts, q), 0.0, rule.causal,
        unused, unused, scale=rule.scale, **_window(rule),
    )  # fmt: skip
    return _heads_first(*grads)


def flash_attn_documents_forward(q: Tensor, k: Tensor, v: Tensor, rule: BlockRule):
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward as forward

    q, k, v = _tokens_first(q, k, v)
    out, lse, *_ = forward(
        q, k, v, *_lengths(rule.parts, q), dropout_p=0.0, softmax_scale=rule.scale,
        causal=rule.causal, softcap=0.0, alibi_slopes=None, return_softmax=False, **_window(rule),
    )  # fmt: skip
    return *_heads_first(out), lse[None]


def flash_attn_documents_backward(grad_out, q, k, v, out, lse, rule: BlockRule):
    from flash_attn.flash_attn_interface import _flash_attn_varlen_backward as backward

    grad_out, q, k, v, out = _tokens_first(grad_out, q, k, v, out)
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    backward(
        grad_out, q, k, v, out, lse[0].contiguous(), *grads, *_lengths(rule.parts, q),
        dropout_p=0.0, softmax_scale=rule.scale, causal=rule.causal, softcap=0.0,
        alibi_slopes=None, deterministic=torch.are_deterministic_algorithms_enabled(),
        **_window(rule),
    )  # fmt: skip
    return _heads_first(*grads)


def _window(rule: BlockRule) -> dict[str, int]:
    """None but the causal mask."""
    assert rule.window is None
    return {"window_size_left": -1, "window_size_right": 0 if rule.causal else -1}


def _tokens_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """[1, n, s, d] -> [s, n, d], views."""
    return tuple(x[0].transpose(0, 1) for x in tensors)


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.transpose(0, 1)[None] for x in tensors)


def _lengths(parts: Parts, like: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Cumulative rows of queries and of keys, int32 on that device, and the most of each."""
    make = _cumulative if type(like) is Tensor else _cumulative.__wrapped__  # no fake one is kept
    queries, keys = zip(*parts, strict=True)
    return make(queries, like.device), make(keys, like.device), max(queries), max(keys)


@lru_cache(maxsize=256)  # one copy to the device for all layers; a ring has parts for each step
def _cumulative(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return to_device(np.cumsum([0, *lengths], dtype=np.int32), device)
