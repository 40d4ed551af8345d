"""A kernel's backward in several calls, where one would have more elements than it can count."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megatron_paradyse.strategies.tiled_kernel import BlockRule

# FlashAttention's backward may count the elements of its accumulator [b, sq, n, d] in 32 bits; it
# rounds sq up to 128 and d to 64. Of documents side by side that is [sq + 128 documents, n, d].
MOST_ELEMENTS = 2**31 - 1

Backward = Callable[..., tuple[Tensor, ...]]


def in_small_calls(backward: Backward) -> Backward:
    """The same by sequences, and by heads, where a call would have more than MOST_ELEMENTS."""

    def run(grad_out, q, k, v, out, lse, rule):
        pieces = list(_pieces(q, k, rule))
        if len(pieces) == 1:
            return backward(grad_out, q, k, v, out, lse, rule)
        grads = tuple(torch.empty_like(x) for x in (q, k, v))
        for sequences, heads, kv_heads in pieces:
            of_q, of_k = (sequences, heads), (sequences, kv_heads)
            parts = backward(grad_out[of_q], q[of_q], k[of_k], v[of_k], out[of_q], lse[of_q], rule)
            for grad, place, part in zip(grads, (of_q, of_k, of_k), parts, strict=True):
                grad[place] = part
            del parts, part
        return grads

    return run


def _pieces(q: Tensor, k: Tensor, rule: BlockRule) -> Iterator[tuple[slice, slice, slice]]:
    """Sequences, heads of queries, heads of keys: all at once if that is few enough."""
    (b, n, rows, d), g = q.shape, k.shape[1]
    rows += 128 * len(rule.parts) if rule.parts else -rows % 128
    of_head = rows * (d + -d % 64) * (n // g)  # with all its queries
    if b * g * of_head <= MOST_ELEMENTS:
        yield slice(None), slice(None), slice(None)
        return
    step = max(1, min(g, MOST_ELEMENTS // of_head))
    for sequence in range(b):
        for first in range(0, g, step):
            kv_heads = slice(first, min(first + step, g))
            heads = slice(kv_heads.start * (n // g), kv_heads.stop * (n // g))
            yield slice(sequence, sequence + 1), heads, kv_heads
