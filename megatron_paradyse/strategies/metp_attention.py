"""The attention of METP: block by block of heads, a ring attention among all ranks' tokens.

A ring attention joins the keys of every rank, so that all ranks must be at the same heads at the
same time. Blocks of attention weights are therefore broadcast by their owners in turn, and do not
hop: at one block per hop they would reach the ranks at different times. The bytes are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from torch.nn.functional import linear

from megatron_paradyse.strategies.aligned_heads import (
    align,
    align_gradient,
    heads_per_slot,
    num_kv_heads_per_block,
)
from megatron_paradyse.strategies.blocks import ring_spans, swaps_halves
from megatron_paradyse.strategies.collectives import swap_halves, swap_halves_back
from megatron_paradyse.strategies.contract import AttentionShape, AttentionWeights, Microbatch
from megatron_paradyse.strategies.heads import Heads, normalise_and_rotate, split_heads
from megatron_paradyse.strategies.latents import latent_heads, of_values, split_latents
from megatron_paradyse.strategies.local_attention import AttentionTask, accumulation_dtype
from megatron_paradyse.strategies.output_gate import gate_gradients, with_gate
from megatron_paradyse.strategies.ring_attention import ring_backward, ring_forward
from megatron_paradyse.strategies.second_run import is_second_run
from megatron_paradyse.strategies.sizes import is_long
from megatron_paradyse.strategies.softmax_offset import offset_gradient
from megatron_paradyse.strategies.weight_blocks import (
    Block,
    SumsToOwners,
    add_product_,
    broadcast_blocks,
    new_packed,
    set_product_,
    unpack,
)


class _Layer:
    """What both directions share: who holds which positions, and what a block computes."""

    def __init__(self, shape: AttentionShape, microbatch: Microbatch, group: ProcessGroup):
        self.shape, self.microbatch, self.group = shape, microbatch, group
        self.ring_group = microbatch.sequence_group(group)
        num_chunks = self.ring_group.size()
        self.spans_of_ranks = ring_spans(shape, microbatch, num_chunks)
        self._swaps = swaps_halves(shape, microbatch, num_chunks)
        self.num_parts = 1
        if is_second_run() and is_long(microbatch.seq_length // num_chunks, microbatch.batch_size):
            self.num_parts = num_kv_heads_per_block(shape, group.size())

    def balance(self, x: Tensor) -> Tensor:
        """Contiguous chunks -> chunks of equal causal work: once per layer, not per block.

        Half of x and half of the output change ranks. Swapping each block's q, k, v and output
        would move (n + g) d / h times as much, and again as much in the backward. Shards of packed
        documents are balanced already, and a narrow window leaves nothing to balance.
        """
        return swap_halves(x, self.ring_group) if self._swaps else x

    def unbalance(self, x: Tensor) -> Tensor:
        """The inverse of balance, and its dual."""
        return swap_halves_back(x, self.ring_group) if self._swaps else x

    def own_block(self, weights: AttentionWeights) -> Block:
        """The rank's proj columns, its aligned qkv rows, and if there is one the qkv bias.

        Over latents: the proj columns, and the rows of queries and of keys and values.
        """
        proj = weights.proj.detach()
        if weights.kv_up is not None:
            return proj, weights.qkv.detach(), weights.kv_up.detach()
        tensors = [proj, align(weights.qkv.detach(), self.shape, self.group)]
        if weights.qkv_bias is not None:
            tensors.append(align(weights.qkv_bias.detach(), self.shape, self.group))
        return tuple(tensors)

    def project(self, x: Tensor, ups: Sequence[Tensor]) -> Tensor:
        """x [s/p, b, i] by what a block has besides proj: see heads."""
        if self.shape.latent is None:
            return linear(x, *ups)
        *latents, c_pe = split_latents(x, self.shape.latent)
        products = [linear(c, up) for c, up in zip(latents, ups, strict=True)]
        return torch.cat((*products, c_pe), dim=-1)

    def project_back(
        self,
        grad: Tensor,
        x: Tensor,
        grad_x: Tensor,
        ups: Sequence[Tensor],
        grads: Sequence[Tensor],
    ) -> None:
        """Add to grad_x and set grads, given that of project's output; all have b s/p rows."""
        if self.shape.latent is None:
            add_product_(grad_x, grad, ups[0])
            set_product_(grads[0], grad.t(), x)
            if len(grads) == 2:
                torch.sum(grad, 0, dtype=grad_x.dtype, out=grads[1])
            return
        *of_products, of_positions = grad.split(
            (len(ups[0]), len(ups[1]), self.shape.latent.positions), dim=-1
        )
        latents, totals = (split_latents(t, self.shape.latent) for t in (x, grad_x))
        for part, c, total, up, grad_up in zip(
            of_products, latents[:2], totals[:2], ups, grads, strict=True
        ):
            add_product_(total, part, up)
            set_product_(grad_up, part.t(), c)
        totals[2].add_(of_positions)

    def heads(self, qkv: Tensor, weights: AttentionWeights) -> Heads:
        """A block's [s/p, b, (n/p + 2m) d] -> q [s/p, b, n/p, d], k and v [s/p, b, m, d], gates.

        Over latents: of the products of c_q and c_kv, and c_pe.
        """
        sizes, p, gate = self.shape.latent, self.group.size(), None
        if sizes is None:
            heads = heads_per_slot(self.shape, p)
            q, k, v, gate = split_heads(qkv, self.shape, heads_per_group=heads)
        else:
            assert self.microbatch.rope is not None
            of_queries = self.shape.num_heads // p * (sizes.content + sizes.positions)
            of_keys = self.shape.num_heads // p * (sizes.content + sizes.value)
            q, kv, c_pe = qkv.split((of_queries, of_keys, sizes.positions), dim=-1)
            num_rotated = self.microbatch.rope.shape[-1]
            q, k, v = latent_heads(q, kv, c_pe, sizes, num_rotated=num_rotated)
            del kv, c_pe
        del qkv
        spans = self.spans_of_ranks[self.ring_group.rank()]
        q, k = normalise_and_rotate(q, k, weights, self.shape, self.microbatch, spans)
        return q, k, v, gate

    def of_block(self, by_head: Tensor | None, owner: int) -> Tensor | None:
        """Of [n], that of the heads of `owner`, a view."""
        if by_head is None:
            return None
        per_block = self.shape.num_heads // self.group.size()
        return by_head[owner * per_block : (owner + 1) * per_block]

    def ring(self, owner: int, *, part: int = 0) -> dict[str, Any]:
        """The keyword arguments of the ring attention over a part of the heads of `owner`."""
        per_block = self.shape.num_heads // self.group.size()
        first_head = owner * per_block + part * per_block // self.num_parts
        task = AttentionTask(self.shape, self.microbatch, first_head)
        return {"spans_of_ranks": self.spans_of_ranks, "task": task, "group": self.ring_group}

    def ring_gradients(
        self, grad_out: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, *, owner: int
    ) -> tuple[Tensor, Tensor]:
        """Gradients of a block's q and kv.

        After a second run of a long sequence a key head at a time, with the query heads that use
        it: the ring's buffers are those of one, and its gradients take the place of q and kv.
        """
        if self.num_parts == 1:
            return ring_backward(grad_out, q, kv, out, lse, **self.ring(owner))
        heads = q.shape[2] // self.num_parts
        for part in range(self.num_parts):
            of_q, of_kv = slice(part * heads, (part + 1) * heads), slice(part, part + 1)
            q[:, :, of_q], kv[:, :, :, of_kv] = ring_backward(
                grad_out[:, :, of_q],
                q[:, :, of_q],
                kv[:, :, :, of_kv].contiguous(),
                out[:, :, of_q],
                lse[:, of_q],
                **self.ring(owner, part=part),
            )
        return q, kv

    def block_gradients(
        self,
        block: Block,
        grad_x: Tensor,
        x: Tensor,
        weights: AttentionWeights,
        norms: list[Tensor],
        grad: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        owner: int,
    ) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """Add the gradient of x to grad_x; return the block's, those of norms and of the offset.

        The block's is packed. All are sums over the rank's tokens: what the ring attention returns
        for k and v already holds what the queries of other ranks contribute.
        """
        proj, *ups = block
        rows, grad_rows = x.flatten(0, 1), grad.flatten(0, 1)
        with torch.enable_grad():
            mixed = _Root.apply(x.new_empty(0, requires_grad=True), self.project(x, ups))
            q, k, v, gate = self.heads(mixed, weights)
        # The graph outlives its tensors, which the ring attention would else find in the way.
        inputs = [get_gradient_edge(tensor) for tensor in (mixed, *norms)]
        outputs = [get_gradient_edge(tensor) for tensor in (q, k, v, gate) if tensor is not None]
        kv = torch.stack((k.detach(), v.detach()))
        q = q.detach()
        gate = None if gate is None else gate.detach()
        del mixed, k, v
        grad_out = (grad_rows @ proj).view(*out.shape[:3], -1)
        if grad_out.shape != out.shape:  # values have fewer channels than queries
            grad_out = F.pad(grad_out, (0, out.shape[-1] - grad_out.shape[-1]))
        of_gate: list[Tensor] = []
        if gate is not None:
            grad_out, *of_gate = gate_gradients(grad_out, out, gate)
        offset = self.of_block(weights.softmax_offset, owner)
        of_offset = offset_gradient(grad_out, out, lse, offset)
        grad_q, grad_kv = self.ring_gradients(grad_out, q, kv, out, lse, owner=owner)
        del q, kv, grad_out
        grads = (grad_q, grad_kv[0], grad_kv[1], *of_gate)
        grad_mixed, *of_norms = torch.autograd.grad(outputs, inputs, grads)
        del grads, grad_q, grad_kv, of_gate
        grad_mixed = grad_mixed.flatten(0, 1)
        grad_block = new_packed(block, grad_x.dtype)
        grad_proj, *grad_ups = unpack(grad_block, block)
        self.project_back(grad_mixed, rows, grad_x.view(rows.shape), ups, grad_ups)
        into_proj = with_gate(of_values(out, self.shape), gate).reshape(len(rows), -1)
        set_product_(grad_proj, grad_rows.t(), into_proj)
        return grad_block, of_norms, of_offset


class _Root(Function):
    """A tensor at which a graph begins; a leaf's graph would keep the leaf alive."""

    @staticmethod
    def forward(ctx, anchor, x):
        return x.view_as(x)


class CirculatingAttention(Function):
    """x [s/p, b, h] and the tensors of AttentionWeights -> [s/p, b, h].

    Of these softmax_offset is whole: [n].

    Keeps x (balanced) and each block's attention output and lse: the ring attention runs forward
    once. Its q, k and v are computed again in the backward. After a second run of a long sequence
    the backward's rings take one key head after the other.
    """

    @staticmethod
    def forward(ctx, shape, microbatch, group, x, *tensors):
        layer = _Layer(shape, microbatch, group)
        weights = AttentionWeights(*tensors)
        blocks = broadcast_blocks(layer.own_block(weights), group)
        x = layer.balance(x.detach()).contiguous()
        rows = x.flatten(0, 1)  # [s/p, b, h] -> [s/p b, h]
        total = rows.new_zeros(len(rows), len(weights.proj), dtype=accumulation_dtype(x.dtype))
        outs, lses = [], []
        for owner, (proj, *ups) in blocks:
            q, k, v, gate = layer.heads(layer.project(x, ups), weights)
            kv = torch.stack((k, v))
            del k, v
            offset = layer.of_block(weights.softmax_offset, owner)
            out, lse = ring_forward(q, kv, **layer.ring(owner), offset=offset)
            del q, kv
            into_proj = with_gate(of_values(out, shape), gate)
            add_product_(total, into_proj.reshape(len(rows), -1), proj.t())
            outs.append(out)
            lses.append(lse)
            del proj, ups, gate, into_proj
        ctx.layer = layer
        ctx.save_for_backward(x, *tensors, *outs, *lses)
        y = total.to(x.dtype).view(*x.shape[:2], -1)
        del total  # which may be wider
        return layer.unbalance(y)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        layer, p = ctx.layer, ctx.layer.group.size()
        x, *saved = ctx.saved_tensors
        tensors, outs, lses = saved[: -2 * p], saved[-2 * p : -p], saved[-p:]
        weights, norms = _with_own_norms(AttentionWeights(*tensors))
        own = layer.own_block(weights)
        blocks = broadcast_blocks(own, layer.group)
        grad = layer.balance(grad)
        wide = accumulation_dtype(x.dtype)
        grad_x = torch.zeros_like(x, dtype=wide)
        grads = {name: torch.zeros_like(norm, dtype=wide) for name, norm in norms.items()}
        of_offsets = []
        sums = SumsToOwners(layer.group)
        for owner, block in blocks:
            grad_block, of_norms, of_offset = layer.block_gradients(
                block, grad_x, x, weights, list(norms.values()), grad, outs[owner], lses[owner],
                owner=owner,
            )  # fmt: skip
            for total, part in zip(grads.values(), of_norms, strict=True):
                total += part
            of_offsets.append(of_offset)
            sums.begin(grad_block, owner)
            del block, grad_block
        grads["proj"], *of_ups = unpack(sums.result(), own)
        if weights.kv_up is not None:
            grads["qkv"], grads["kv_up"] = of_ups
        else:
            names = ("qkv", "qkv_bias")[: len(of_ups)]
            for name, of_up in zip(names, of_ups, strict=True):
                grads[name] = align_gradient(of_up, layer.shape, layer.group)
        if weights.softmax_offset is not None:
            grads["softmax_offset"] = torch.cat(of_offsets)
        of_weights = (
            None if tensor is None else grads[field.name].to(tensor.dtype)
            for field, tensor in zip(fields(weights), tensors, strict=True)
        )
        del grad
        grad_x = grad_x.to(x.dtype)
        return None, None, None, layer.unbalance(grad_x), *of_weights


def _with_own_norms(weights: AttentionWeights) -> tuple[AttentionWeights, dict[str, Tensor]]:
    """The weights with query/key norms that a small graph may differentiate, and these by name."""
    names = ("q_norm", "q_norm_bias", "k_norm", "k_norm_bias")
    present = {name: getattr(weights, name) for name in names}
    norms = {
        name: norm.detach().requires_grad_() for name, norm in present.items() if norm is not None
    }
    return replace(weights, **norms), norms
