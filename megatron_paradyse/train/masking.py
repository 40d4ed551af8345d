"""Masked tokens for BERT: which are predicted, and what stands in their place.

Of the tokens of a document, Megatron's --mask-prob (0.15), at least one, are predicted. Of these
0.8 become the mask token, 0.1 a random one, 0.1 stay. From "BERT: Pre-training of Deep
Bidirectional Transformers for Language Understanding" (Devlin et al., 2019).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_paradyse.data.targets import NO_LABEL, ids_of

BECOME_MASK, BECOME_RANDOM = 0.8, 0.1


@dataclass(frozen=True)
class Masking:
    """share: of the tokens that are predicted. token: the mask. vocab_size: of random tokens.

    Seed and iteration, with the tokens of a document, say which are masked, wherever they are read:
    on every pipeline stage, packed or not, and after a restart.
    """

    share: float
    token: int
    vocab_size: int
    seed: int
    iteration: int


def mask_document(tokens: np.ndarray, masking: Masking) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels of a document, int64 [s] each, NO_LABEL where nothing is predicted.

    Complements of tokens are not.
    """
    inputs, labels = ids_of(tokens).astype(np.int64), np.full(tokens.shape, NO_LABEL)
    seed = repr((masking.seed, masking.iteration)).encode() + inputs.tobytes()
    rng = np.random.default_rng(int.from_bytes(hashlib.sha256(seed).digest()[:8]))
    candidates = np.flatnonzero(tokens >= 0)
    number = min(max(1, round(masking.share * len(tokens))), len(candidates))
    chosen = candidates[rng.choice(len(candidates), size=number, replace=False)]
    labels[chosen] = tokens[chosen]
    fate = rng.random(number)
    inputs[chosen[fate < BECOME_MASK]] = masking.token
    random = chosen[(fate >= BECOME_MASK) & (fate < BECOME_MASK + BECOME_RANDOM)]
    inputs[random] = rng.integers(masking.vocab_size, size=len(random))
    return inputs, labels


def mask_tokens(tokens: Tensor, lengths: Tensor, masking: Masking) -> tuple[Tensor, Tensor]:
    """tokens [b, s] on the CPU, lengths [b] without padding -> inputs and labels [b, s]."""
    inputs, labels = tokens.numpy().copy(), np.full(tokens.shape, NO_LABEL)
    for i, length in enumerate(lengths.tolist()):
        masked = mask_document(inputs[i, :length], masking)
        inputs[i, :length], labels[i, :length] = masked
    return torch.from_numpy(inputs), torch.from_numpy(labels)
