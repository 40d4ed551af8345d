"""One microbatch of whole documents on every rank of a tensor-parallel group."""

from __future__ import annotations

import numpy as np
import torch
from megatron.core import mpu
from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine
from megatron.training import get_args, get_tokenizer
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import is_first_or_last_pipeline_stage

from megatron_paradyse.data.targets import NO_LABEL
from megatron_paradyse.errors import UserError
from megatron_paradyse.strategies.host import to_device
from megatron_paradyse.train.masking import Masking, mask_tokens
from megatron_paradyse.train.model_kind import BERT

BATCH_NAMES = ("tokens", "labels", "position_ids", "loss_mask", "attention_mask")


def document_batch(data_iterator, vp_stage: int | None = None) -> dict[str, torch.Tensor | None]:
    """Read a microbatch on the group's first rank and broadcast it, in Megatron's form.

    Returns tokens, labels, position_ids (int64) and loss_mask (float32), each [b, s]; all None on a
    pipeline stage that needs none of them. loss_mask is 1 where a token is learnt. A BERT's
    attention_mask is [b, s], true where a token is no padding, on every stage; it is None where
    nothing is padded, and always for a GPT, which needs none. Moves at most 8 b (2 s + 1) bytes
    over the group.
    """
    group = mpu.get_tensor_model_parallel_group()
    source = mpu.get_tensor_model_parallel_src_rank()
    device = device_of_rank()
    edge = is_first_or_last_pipeline_stage(vp_stage)
    batch = next(data_iterator) if mpu.get_tensor_model_parallel_rank() == 0 else None
    shape = torch.empty(2, dtype=torch.int64, device=device)
    if batch is not None:
        check_vocabulary(ids_of(batch["tokens"]))
        shape = to_device(np.array(batch["tokens"].shape), device)
    torch.distributed.broadcast(shape, source, group=group)
    # The first rank knows, and need not wait for the device.
    num_sequences, width = shape.tolist() if batch is None else batch["tokens"].shape
    s, masked = width - 1, get_args().paradyse_model == BERT
    columns = (2 * s if masked else s + 1) if edge else 0
    payload = torch.empty(num_sequences, 1 + columns, dtype=torch.int64, device=device)
    if batch is not None:
        payload[:, 0].copy_(batch["lengths"], non_blocking=True)
        if edge:
            own = _masked(batch, s) if masked else batch["tokens"]
            payload[:, 1:].copy_(own, non_blocking=True)
    torch.distributed.broadcast(payload, source, group=group)
    lengths = payload[:, 0]
    count_lengths(lengths, vp_stage)
    padded = masked and min(lengths.tolist()) < s
    positions = torch.arange(s, device=device)
    attention_mask = positions < lengths[:, None] if padded else None
    if not edge:
        return {**dict.fromkeys(BATCH_NAMES), "attention_mask": attention_mask}
    last = get_args().max_position_embeddings - 1
    if masked:
        return derive_masked_batch(payload[:, 1:], attention_mask, max_position=last)
    batch = derive_batch(payload[:, 1:], lengths, max_position=last)
    return batch | {"loss_mask": less_eod(batch["loss_mask"], batch["tokens"])}


def check_vocabulary(tokens: torch.Tensor) -> None:
    """UserError for an id that the embedding lacks: on several ranks it would be a row of zeros."""
    largest, size = int(tokens.max()), get_args().padded_vocab_size
    if largest >= size:
        raise UserError(
            f"the data have the token {largest}, and the vocabulary {size} ids: give the tokenizer "
            "or the --vocab-size that they were prepared with"
        )


def ids_of(tokens: torch.Tensor) -> torch.Tensor:
    """Of tokens that are complements where they are not learnt."""
    return torch.where(tokens < 0, ~tokens, tokens)


def less_eod(loss_mask: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """loss_mask, with --eod-mask-loss less what would be predicted from an end of document."""
    if not get_args().eod_mask_loss:
        return loss_mask
    end = get_tokenizer().eod
    if end is None:
        raise UserError(
            f"--eod-mask-loss with --tokenizer-type {get_args().tokenizer_type}, whose tokenizer "
            "has no end of document: leave it out, or give one that has"
        )
    return loss_mask * (tokens != end)


def _masked(batch: dict, s: int) -> torch.Tensor:
    """[b, 2 s]: a document's tokens less its last one, which ends it, masked; then the labels."""
    args = get_args()
    iteration = getattr(args, "curr_iteration", 0) or 0
    masking = masking_of(iteration if torch.is_grad_enabled() else None)
    return torch.cat(mask_tokens(batch["tokens"][:, :s], batch["lengths"], masking), 1)


def masking_of(iteration: int | None) -> Masking:
    """As the arguments say; None: of an evaluation, which masks alike every time."""
    args = get_args()
    return Masking(
        share=args.mask_prob,
        token=args.paradyse_settings.mask_token or 0,  # given, unless this is a profile
        vocab_size=get_tokenizer().vocab_size,
        seed=args.seed,
        iteration=-1 if iteration is None else iteration,
    )


def derive_masked_batch(
    columns: torch.Tensor, attention_mask: torch.Tensor | None, *, max_position: int
) -> dict:
    """A BERT's microbatch from b rows of s inputs and s labels."""
    inputs, labels = columns.chunk(2, 1)
    positions = torch.arange(inputs.shape[1], device=columns.device).clamp(max=max_position)
    return {
        "tokens": inputs.contiguous(),
        "labels": labels.clamp(min=0),
        "position_ids": positions.expand(inputs.shape[0], -1).contiguous(),
        "loss_mask": (labels != NO_LABEL).float(),
        "attention_mask": attention_mask,
    }


def derive_batch(tokens: torch.Tensor, lengths: torch.Tensor, *, max_position: int) -> dict:
    """Inputs, labels, positions and loss mask from b rows of s + 1 tokens.

    A token that is not learnt is given as its complement, ~token.
    """
    positions = torch.arange(tokens.shape[1] - 1, device=tokens.device)
    positions = positions.expand(tokens.shape[0], -1)
    learnt = (positions < lengths[:, None]) & (tokens[:, 1:] >= 0)
    tokens = ids_of(tokens)
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "position_ids": positions.clamp(max=max_position).contiguous(),
        "loss_mask": learnt.float(),
        "attention_mask": None,
    }


def count_lengths(lengths: torch.Tensor, vp_stage: int | None) -> None:
    """Tell Megatron's FLOP statistics and the meter of documents [n] that are trained on.

    Once for all chunks of an interleaved pipeline, of which each reads them, and for an iteration
    that Megatron runs again to check its results. None are told too: the replicas add up their
    statistics, and Megatron wants to have heard of some on each.
    """
    if vp_stage or not torch.is_grad_enabled():  # an evaluation does not count
        return
    if get_rerun_state_machine().state == RerunState.RERUNNING_IN_PLACE:  # they were told
        return
    starts = torch.zeros(1 if len(lengths) else 2, dtype=lengths.dtype, device=lengths.device)
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


def device_of_rank() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
