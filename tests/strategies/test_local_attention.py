"""The kernels agree with dense attention, alone and merged from pieces."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_paradyse.strategies.blocks import Block, Span, whole
from megatron_paradyse.strategies.contract import AttentionShape, Microbatch
from megatron_paradyse.strategies.joined_blocks import share_no_rows
from megatron_paradyse.strategies.kernels import CPU_FLASH, TILED, choose_kernel
from megatron_paradyse.strategies.local_attention import (
    AttentionTask,
    PartialOutput,
    add_gradients_,
    local_attention,
    merge_,
    new_gradients,
)
from megatron_paradyse.strategies.tiled_kernel import TILE, BlockRule

INFINITY = float("inf")


def random_qkv(s: int, b: int, n: int, g: int, d: int, dtype=torch.float64):
    torch.manual_seed(s)
    return (
        torch.randn(s, b, n, d, dtype=dtype),
        torch.randn(s, b, g, d, dtype=dtype),
        torch.randn(s, b, g, d, dtype=dtype),
    )


def attention_shape(n: int, g: int, d: int, **options) -> AttentionShape:
    options = {"causal": True, "softmax_scale": 1 / math.sqrt(d)} | options
    return AttentionShape(num_heads=n, num_kv_heads=g, head_dim=d, **options)


def _heads_first(*tensors):
    return tuple(x.permute(1, 2, 0, 3) for x in tensors)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "g"), [(4, 4), (4, 2), (4, 1)])
def test_tiled_and_fused_kernels_agree(causal, n, g):
    """More than one tile, not a multiple of it."""
    q, k, v = _heads_first(*random_qkv(TILE + 21, 2, n, g, 8))
    rule = BlockRule(scale=0.3, causal=causal)
    fused, tiled = CPU_FLASH.forward(q, k, v, rule), TILED.forward(q, k, v, rule)
    for got, truth in zip(tiled, fused, strict=True):
        torch.testing.assert_close(got, truth)
    grad = torch.randn_like(q)
    fused_grads = CPU_FLASH.backward(grad, q, k, v, *fused, rule)
    for got, truth in zip(TILED.backward(grad, q, k, v, *tiled, rule), fused_grads, strict=True):
        torch.testing.assert_close(got, truth)


@pytest.mark.parametrize("options", [{}, {"window": 9}, {"dropout": 0.4}])
def test_pieces_of_keys_in_any_order_merge_to_the_whole(options):
    s, b, n, g, d = 48, 2, 4, 2, 8
    q, k, v = random_qkv(s, b, n, g, d)
    microbatch = Microbatch(s, b, (((0, 30), (30, 41)), ((5, 48),)), dropout_seed=3)
    task = AttentionTask(attention_shape(n, g, d, **options), microbatch)
    q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    truth = local_attention(q, k, v, spans=whole(microbatch), task=task)
    grad = torch.randn_like(truth)
    true_grads = torch.autograd.grad(truth, (q, k, v), grad)

    pieces = [Span(start, start, start + 12) for start in (36, 0, 24, 12)]
    queries = tuple(sorted(pieces, key=lambda span: span.row))
    q, k, v = q.detach(), k.detach(), v.detach()
    partial = PartialOutput(q)
    for piece in pieces:
        partial.add(k, v, q_spans=queries, k_spans=(piece,), task=task)
    out, lse = partial.result()
    torch.testing.assert_close(out, truth)
    grads = new_gradients(q, k, v)
    for piece in pieces:
        add_gradients_(grads, grad, q, k, v, out, lse, q_spans=queries, k_spans=(piece,), task=task)
    for got, true_grad in zip(grads, true_grads, strict=True):
        torch.testing.assert_close(got, true_grad)


def test_padding_queries_get_zero_and_minus_infinity_and_zero_gradients():
    s, b, n, d = 12, 2, 2, 8
    q, k, v = (x.requires_grad_() for x in random_qkv(s, b, n, n, d, torch.float32))
    microbatch = Microbatch(s, b, (((0, 7),), ()))
    task = AttentionTask(attention_shape(n, n, d), microbatch)
    out = local_attention(q, k, v, spans=whole(microbatch), task=task)
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    for x in (out, *grads):
        assert x.isfinite().all()
        assert x[7:, 0].abs().max() == 0 and x[:, 1].abs().max() == 0
    partial = PartialOutput(q)
    partial.add(k, v, q_spans=whole(microbatch), k_spans=whole(microbatch), task=task)
    lse = partial.result()[1]
    assert (lse[1] == -INFINITY).all() and (lse[0, :, 7:] == -INFINITY).all()
    assert lse[0, :, :7].isfinite().all()


def test_merging_nothing_changes_nothing_and_huge_scores_do_not_overflow():
    out = torch.tensor([1.0, 2.0, 0.0, 5.0]).view(4, 1, 1, 1)
    lse = torch.tensor([1e4, -INFINITY, -INFINITY, -1e4]).view(1, 1, 4)
    block_out = torch.tensor([7.0, 3.0, 0.0, 9.0]).view(4, 1, 1, 1)
    block_lse = torch.tensor([-INFINITY, 2e4, -INFINITY, 1e4]).view(1, 1, 4)
    merge_(out, lse, block_out, block_lse)
    assert out.flatten().tolist() == [1.0, 3.0, 0.0, 9.0]
    assert lse.flatten().tolist() == [1e4, 2e4, -INFINITY, 1e4]


def test_a_row_whose_window_lies_outside_the_block_sees_nothing():
    q, k, v = _heads_first(*random_qkv(16, 1, 2, 2, 4, torch.float32))
    rule = BlockRule(scale=1.0, window=8, q_start=16, k_start=0)
    out, lse = TILED.forward(q, k, v, rule)
    assert (lse[:, :, 7:] == -INFINITY).all() and out[:, :, 7:].abs().max() == 0
    assert lse[:, :, :7].isfinite().all()
    grads = TILED.backward(torch.ones_like(q), q, k, v, out, lse, rule)
    assert all(grad.isfinite().all() for grad in grads)


def test_kernel_is_chosen_by_what_it_must_mask():
    q = torch.zeros(1, 1, 1, 8)
    assert choose_kernel(q).name == "torch CPU flash"
    assert choose_kernel(q, window=True).name == "tiled torch operations"
    assert choose_kernel(q, dropout=True).name == "tiled torch operations"


def _block(q_rows, k_rows, sequences=(0, 1)) -> Block:
    return Block(sequences, q_rows, k_rows, 0, 0, causal=False, window=None)


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ([((0, 4), (0, 4)), ((4, 9), (4, 9))], True),
        ([((0, 4), (0, 4)), ((4, 9), (3, 9))], False),  # keys of two
        ([((0, 5), (0, 4)), ((4, 9), (4, 9))], False),  # queries
        ([((4, 9), (0, 4)), ((0, 4), (4, 9))], True),
        ([((0, 4), (0, 4), (0, 1)), ((0, 4), (0, 4), (1, 2))], True),
        ([((0, 4), (0, 4), (0, 2)), ((5, 6), (5, 6), (1, 2))], False),  # not told of those
    ],
)
def test_gradients_are_no_sums_where_no_block_shares_rows(blocks, expected):
    assert share_no_rows(tuple(_block(*block) for block in blocks)) is expected
