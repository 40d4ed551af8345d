"""What an attention mask of Megatron's says of padding; strategies know no other masks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_paradyse.errors import UserError

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from torch import Tensor

QUERIES = 1024  # of which so many at a time are compared


def documents_of_mask(
    mask: Tensor | None, *, batch_size: int, causal: bool
) -> tuple[tuple[tuple[int, int], ...], ...] | None:
    """Each sequence's tokens as one document (start, stop); None where nothing is padded.

    mask [b or 1, 1, s or 1, s], bool, true where a query does not see a key. UserError for one that
    hides more or less than padding at the ends and, causal, later tokens: no strategy would heed
    it. What padding itself sees does not matter. Causal, one for all queries is refused too: to
    Megatron's own attention that shows later tokens, to TransformerEngine's it does not.
    """
    if mask is None:
        return None
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1] != 1:
        kinds = "[b, 1, s, s]" if causal else "[b, 1, 1, s] or [b, 1, s, s]"
        raise UserError(
            f"an attention mask of {mask.dtype} and shape {list(mask.shape)}: --paradyse takes "
            f"{kinds} of torch.bool, or none"
        )
    mask = mask[:, 0]
    num_queries, s = mask.shape[1:]
    if causal and num_queries == 1 < s:
        raise UserError(
            f"an attention mask of shape {[len(mask), 1, 1, s]} shows later tokens to a causal "
            "model: give none, for padding at the end is later than all that is learnt"
        )
    valid = ~(mask[:, 0] if num_queries == 1 else mask.diagonal(dim1=1, dim2=2))
    lengths, keys = valid.sum(1), torch.arange(s, device=mask.device)
    beyond = keys >= lengths[:, None]
    inner = (valid & beyond).any()
    other = torch.zeros_like(inner)
    for first in range(0, num_queries if num_queries > 1 else 0, QUERIES):
        part = mask[:, first : first + QUERIES]
        queries = keys[first : first + QUERIES, None]
        hidden = beyond[:, None] | (keys > queries) if causal else beyond[:, None]
        other |= ((part != hidden) & (queries < lengths[:, None, None])).any()
    if bool(inner):
        raise UserError("padding inside a sequence: --paradyse takes padding at its end only")
    if bool(other):
        what = "later tokens and padding" if causal else "padding"
        raise UserError(
            f"an attention mask that hides other keys than {what}, which strategies would not "
            "heed: give none, and documents in one sequence as packed_seq_params"
        )
    found = lengths.tolist()
    if min(found) == s:
        return None
    return tuple(((0, length),) for length in found) * (1 if len(found) > 1 else batch_size)


def check_of_generation(mask: Tensor | None, packed: PackedSeqParams | None) -> None:
    """UserError for a mask [b or 1, 1, s, s of all keys] that attention by position would not heed.

    That hides later tokens and, of a prompt, padding at its end. Queries are the last of the keys.
    And for packed documents, which are known with a plan alone.
    """
    if packed is not None and packed.cu_seqlens_q is not None:
        raise UserError(
            "packed_seq_params while text is generated, with an inference context or in "
            "InferenceMode: leave these off, and run packed documents under torch.no_grad()"
        )
    if mask is None:
        return
    if mask.dim() != 4 or mask.shape[-2] == mask.shape[-1]:
        documents_of_mask(mask, batch_size=len(mask), causal=True)
        return
    num_queries, s = mask.shape[-2:]
    positions = torch.arange(s, device=mask.device)
    later = positions > positions[s - num_queries :, None]
    if bool((mask != later).any()):
        raise UserError(
            "an attention mask that hides other keys than later tokens while text is generated, "
            "which attention without scores would not heed: give none, or "
            "attention_backend=AttnBackend.unfused in the TransformerConfig"
        )
