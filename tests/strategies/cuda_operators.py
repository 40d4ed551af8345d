"""PyTorch's CUDA attention operators on the CPU, dense, with what they demand of their arguments.

Arguments are bound by the schema of the installed PyTorch. What is demanded was read from the
operators' sources: layouts, alignment, where a window or causal mask is anchored, and that the
backward of efficient attention takes rows of `out` to be n d apart, whatever its strides.
"""

from __future__ import annotations

import torch
from torch import Tensor

INFINITY = float("inf")


class CudaOperators:
    """Stands in for torch.ops.aten; `names` are the operators that were called."""

    def __init__(self):
        self.names: list[str] = []

    def __getattr__(self, name: str):
        schema = getattr(torch.ops.aten, name).default._schema
        run = _OPERATORS[name]

        def call(*args, **kwargs):
            self.names.append(name)
            positional = [a.name for a in schema.arguments if not a.kwarg_only]
            given = dict(zip(positional, args, strict=False)) | kwargs
            assert len(args) <= len(positional) and given.keys() >= {
                a.name for a in schema.arguments if not a.has_default_value()
            }
            defaults = {a.name: a.default_value for a in schema.arguments}
            assert given.keys() <= defaults.keys(), given.keys() - defaults.keys()
            return run(**defaults | given)

        return call


def _flash_forward(query, key, value, dropout_p, is_causal, scale, **rest):
    if rest["cum_seq_q"] is not None:
        return _flash_documents_forward(query, key, value, dropout_p, is_causal, scale, **rest)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))  # [b, s, n, d] -> [b, n, s, d]
    _check_flash(q, k, v, dropout_p=dropout_p, **rest)
    visible = _anchored_at_the_end(q, k, is_causal, **rest)
    out, lse = _attend(q, k, v, visible, scale)
    return out.transpose(1, 2), lse, None, None, None


def _flash_documents_forward(query, key, value, dropout_p, is_causal, scale, **rest):
    """Tokens first, [s, n, d], and lse [n, s]; without a window."""
    out, lse = torch.empty_like(query), query.new_empty(query.shape[1], query.shape[0])
    for rows, keys, alone in _documents(query, key, rest):
        part = _flash_forward(
            query[None, rows], key[None, keys], value[None, keys], dropout_p, is_causal, scale,
            **rest | alone,
        )  # fmt: skip
        out[rows], lse[:, rows] = part[0][0], part[1][0]
    return out, lse, None, None, None


def _flash_documents_backward(
    grad_out, query, key, value, out, logsumexp, is_causal, scale, **rest
):
    assert logsumexp.is_contiguous() and logsumexp.shape == (query.shape[1], query.shape[0])
    grads = tuple(torch.empty_like(x) for x in (query, key, value))
    for rows, keys, alone in _documents(query, key, rest):
        parts = _flash_backward(
            grad_out[None, rows], query[None, rows], key[None, keys], value[None, keys],
            out[None, rows], logsumexp[None, :, rows].contiguous(), is_causal, scale,
            **rest | alone,
        )  # fmt: skip
        for grad, part, where in zip(grads, parts, (rows, keys, keys), strict=True):
            grad[where] = part[0]
    return grads


def _documents(query: Tensor, key: Tensor, rest: dict):
    """Slices of queries and of keys of each document, and what a call of it alone would say."""
    ends = [rest["cum_seq_q"], rest["cum_seq_k"]]
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in ends)
    assert [x[-1] for x in ends] == [len(query), len(key)]
    sizes = [x.diff().tolist() for x in ends]
    assert all(
        max(size) == rest[name] for size, name in zip(sizes, ("max_q", "max_k"), strict=True)
    )
    starts = zip(*(x[:-1].tolist() for x in ends), strict=True)
    for (q, k), (num_rows, num_keys) in zip(starts, zip(*sizes, strict=True), strict=True):
        alone = {"cum_seq_q": None, "cum_seq_k": None, "max_q": num_rows, "max_k": num_keys}
        yield slice(q, q + num_rows), slice(k, k + num_keys), alone


def _flash_backward(grad_out, query, key, value, out, logsumexp, is_causal, scale, **rest):
    if rest["cum_seq_q"] is not None:
        return _flash_documents_backward(
            grad_out, query, key, value, out, logsumexp, is_causal, scale, **rest
        )
    tensors = tuple(x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    q, k, v = tensors[1:4]
    _check_flash(q, k, v, **rest)
    assert logsumexp.is_contiguous() and logsumexp.shape == q.shape[:3]
    visible = _anchored_at_the_end(q, k, is_causal, **rest)
    grads = _differentiate(*tensors, logsumexp, visible, scale)
    return tuple(grad.transpose(1, 2) for grad in grads)


def _check_flash(q, k, v, *, max_q, max_k, cum_seq_q, cum_seq_k, dropout_p, **unused) -> None:
    assert (max_q, max_k) == (q.shape[2], k.shape[2])
    assert cum_seq_q is None and cum_seq_k is None and dropout_p == 0.0
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    assert q.shape[3] % 8 == 0 and q.shape[3] <= 256 and q.shape[1] % k.shape[1] == 0


def _anchored_at_the_end(
    q: Tensor, k: Tensor, is_causal, *, window_size_left, window_size_right, **unused
) -> Tensor:
    """The last query's own key is the last one.

    With a bound on one side, none on the other is a bound of as many keys as there are: where
    queries are more, it hides keys from the first of them.
    """
    left, right = window_size_left, 0 if is_causal else window_size_right
    if left >= 0 or right >= 0:
        left, right = (k.shape[2] if bound < 0 else bound for bound in (left, right))
    else:
        left = right = k.shape[2] + q.shape[2]
    own = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    key = torch.arange(k.shape[2])
    visible = (key >= own - left) & (key <= own + right)
    assert visible.any(1).all(), "the kernel's lse of a row that sees nothing is +inf"
    return visible


def _efficient_forward(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, scale
):
    _check_efficient(query, key, value, attn_bias, dropout_p)
    assert compute_log_sumexp
    out, lse = _attend(query, key, value, _anchored_at_the_start(query, key, is_causal), scale)
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    padding = lse.new_full((*lse.shape[:2], -lse.shape[2] % 32), INFINITY)
    return out, torch.cat((lse, padding), 2), None, None


def _efficient_backward(
    grad_out_, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset,
    dropout_p, grad_input_mask, is_causal, scale,
):  # fmt: skip
    _check_efficient(query, key, value, attn_bias, dropout_p)
    b, n, s, d = query.shape
    assert grad_input_mask == [True, True, True, False]
    assert logsumexp.shape == (b, n, s + -s % 32)
    assert logsumexp.stride(-1) == 1 and all(x % 8 == 0 for x in logsumexp.stride()[:2])
    out = torch.as_strided(
        out, out.shape, (out.stride(0), out.stride(1), n * d, 1), out.storage_offset()
    )
    visible = _anchored_at_the_start(query, key, is_causal)
    lse = logsumexp[..., :s]
    return *_differentiate(grad_out_, query, key, value, out, lse, visible, scale), None


def _check_efficient(q: Tensor, k: Tensor, v: Tensor, attn_bias, dropout_p) -> None:
    assert attn_bias is None and dropout_p == 0.0
    assert q.shape[1] == k.shape[1] == v.shape[1], "it has no grouped heads"
    for x in (q, k, v):
        assert x.stride(-1) == 1
        strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
        assert all(stride * x.itemsize % 16 == 0 for stride in strides[:-1])
        assert x.storage_offset() * x.itemsize % 16 == 0


def _anchored_at_the_start(q: Tensor, k: Tensor, is_causal: bool) -> Tensor:
    visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    return visible.tril() if is_causal else visible


def _scores(q: Tensor, k: Tensor, visible: Tensor, scale: float) -> Tensor:
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (q @ k.transpose(-1, -2) * scale).masked_fill(~visible, -INFINITY)


def _attend(q, k, v, visible, scale):
    """Heads first: q [b, n, s, d] -> out [b, n, s, d], lse [b, n, s]."""
    scores = _scores(q, k, visible, scale)
    out = scores.softmax(-1) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return out, scores.logsumexp(-1)


def _differentiate(grad_out, q, k, v, out, lse, visible, scale):
    group = q.shape[1] // k.shape[1]
    probs = torch.exp(_scores(q, k, visible, scale) - lse[..., None])
    grad_probs = grad_out @ v.repeat_interleave(group, 1).transpose(-1, -2)
    delta = (grad_out * out).sum(-1, keepdim=True)
    grad_scores = probs * (grad_probs - delta) * scale
    of_heads = (grad_scores.transpose(-1, -2) @ q, probs.transpose(-1, -2) @ grad_out)
    grad_k, grad_v = (x.unflatten(1, (-1, group)).sum(2) for x in of_heads)
    return grad_scores @ k.repeat_interleave(group, 1), grad_k, grad_v


_OPERATORS = {
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient_forward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
}
