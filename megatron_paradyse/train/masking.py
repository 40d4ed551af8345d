"""Masked tokens for BERT: which are predicted, and what stands in their place.

Of the tokens of a document, Megatron's --mask-prob (0.15), at least one, are predicted. Of these
0.8 become the mask token, 0.1 a random one, 0.1 stay. From "BERT: Pre-training of Deep
Bidirectional Transformers for Language Understanding" (Devlin et al., 2019).
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

BECOME_MASK, BECOME_RANDOM = 0.8, 0.1
NOT_PREDICTED = -1


def mask_tokens(
    tokens: Tensor,
    lengths: Tensor,
    *,
    share: float,
    mask_token: int,
    vocab_size: int,
    seed: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """tokens [b, s] on the CPU -> inputs and labels [b, s], NOT_PREDICTED where nothing is.

    lengths [b]: tokens without padding. The same tokens and seed give the same masks, wherever
    they are read: on every pipeline stage, and after a restart.
    """
    inputs, labels = tokens.numpy().copy(), np.full(tokens.shape, NOT_PREDICTED)
    for i, length in enumerate(lengths.tolist()):
        row = np.ascontiguousarray(inputs[i, :length])
        digest = hashlib.sha256(repr(seed).encode() + row.tobytes()).digest()
        rng = np.random.default_rng(int.from_bytes(digest[:8]))
        chosen = rng.choice(length, size=max(1, round(share * length)), replace=False)
        labels[i, chosen] = row[chosen]
        fate = rng.random(len(chosen))
        inputs[i, chosen[fate < BECOME_MASK]] = mask_token
        random = chosen[(fate >= BECOME_MASK) & (fate < BECOME_MASK + BECOME_RANDOM)]
        inputs[i, random] = rng.integers(vocab_size, size=len(random))
    return torch.from_numpy(inputs), torch.from_numpy(labels)
