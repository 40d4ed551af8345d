"""One microbatch of whole documents on every rank of a tensor-parallel group."""

from __future__ import annotations

import torch
from megatron.core import mpu
from megatron.training import get_args
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import is_first_or_last_pipeline_stage


def document_batch(data_iterator, vp_stage: int | None = None) -> dict[str, torch.Tensor | None]:
    """Read a microbatch on the group's first rank and broadcast it, in Megatron's form.

    Returns tokens, labels, position_ids (int64) and loss_mask (float32), each [b, s], and
    attention_mask None; all None on a pipeline stage that needs none of them. Padding has
    loss_mask 0. Moves 8 b (s + 2) bytes over the group.
    """
    group = mpu.get_tensor_model_parallel_group()
    source = mpu.get_tensor_model_parallel_src_rank()
    device = torch.device("cuda", torch.cuda.current_device()) if _on_gpu() else torch.device("cpu")
    edge = is_first_or_last_pipeline_stage(vp_stage)
    batch = next(data_iterator) if mpu.get_tensor_model_parallel_rank() == 0 else None
    shape = torch.zeros(2, dtype=torch.int64, device=device)
    if batch is not None:
        shape.copy_(torch.tensor(batch["tokens"].shape))
    torch.distributed.broadcast(shape, source, group=group)
    num_sequences, width = shape.tolist()
    columns = width + 1 if edge else 1  # the lengths, then the tokens where they are needed
    payload = torch.empty(num_sequences, columns, dtype=torch.int64, device=device)
    if batch is not None:
        payload[:, 0] = batch["lengths"]
        if edge:
            payload[:, 1:] = batch["tokens"]
    torch.distributed.broadcast(payload, source, group=group)
    lengths = payload[:, 0]
    if torch.is_grad_enabled():  # evaluation does not count towards Megatron's FLOP statistics
        _count(lengths)
    if not edge:
        names = ("tokens", "labels", "position_ids", "loss_mask", "attention_mask")
        return dict.fromkeys(names)
    return derive_batch(
        payload[:, 1:], lengths, max_position=get_args().max_position_embeddings - 1
    )


def derive_batch(tokens: torch.Tensor, lengths: torch.Tensor, *, max_position: int) -> dict:
    """Inputs, labels, positions and loss mask from b rows of s + 1 tokens."""
    positions = torch.arange(tokens.shape[1] - 1, device=tokens.device)
    positions = positions.expand(tokens.shape[0], -1)
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "position_ids": positions.clamp(max=max_position).contiguous(),
        "loss_mask": (positions < lengths[:, None]).float(),
        "attention_mask": None,
    }


def _count(lengths: torch.Tensor) -> None:
    starts = torch.zeros(1, dtype=lengths.dtype, device=lengths.device)
    update_seqlen_stats_from_cu_seqlens(torch.cat([starts, lengths.cumsum(0)]).int())
    meter.lengths.append(lengths.clone())  # a view would keep the microbatch's tokens alive


class LengthMeter:
    """The lengths that this replica trained on since the last log line."""

    def __init__(self):
        self.lengths: list[torch.Tensor] = []

    def take(self) -> list[int]:
        """The collected lengths; the meter starts anew."""
        lengths = torch.cat(self.lengths).tolist() if self.lengths else []
        self.lengths.clear()
        return lengths


meter = LengthMeter()


def _on_gpu() -> bool:
    return torch.cuda.is_available()
