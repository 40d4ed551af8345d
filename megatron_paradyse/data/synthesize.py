"""Synthetic documents: published lengths, and tokens that a model can learn to predict.

The tokens are a Markov chain of order 1. The ids but the last are a ring in a shuffled order; from
one id the chain goes to one of NUM_STEPS others, at distances and with probabilities that are the
same for every id. So the loss of a model that has learned it is the entropy of the steps (1.30
nats), and of one that has not log(vocab_size). The last id ends a document.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_paradyse.data.distributions import DISTRIBUTIONS, MIN_DOCUMENT_TOKENS, draw_lengths
from megatron_paradyse.data.metadata import DatasetMetadata
from megatron_paradyse.data.progress import Progress
from megatron_paradyse.data.tokenizers import TokenArray
from megatron_paradyse.data.writer import MAX_DOCUMENT_TOKENS, DatasetWriter
from megatron_paradyse.errors import UserError

NUM_STEPS = 6
CHUNK_TOKENS = 1 << 20
MAX_VOCAB_SIZE = 1 << 20
MAX_DOCUMENTS = 10_000_000  # whose index takes about 1 GB of memory


@dataclass(frozen=True)
class MarkovChain:
    """The chain: ids in ring order, and the steps along the ring with their probabilities."""

    ring: TokenArray
    steps: TokenArray
    probabilities: np.ndarray[Any, np.dtype[np.float64]]

    @classmethod
    def create(cls, num_ids: int, rng: np.random.Generator) -> MarkovChain:
        num_steps = min(NUM_STEPS, num_ids)
        weights = 0.5 ** np.arange(num_steps)
        return cls(
            ring=rng.permutation(num_ids),
            steps=rng.choice(num_ids, size=num_steps, replace=False),
            probabilities=weights / weights.sum(),
        )

    @property
    def entropy_nats(self) -> float:
        """The least loss per token that a model can reach, in nats."""
        return float(-(self.probabilities * np.log(self.probabilities)).sum())

    def walk(self, num_tokens: int, rng: np.random.Generator) -> Iterator[TokenArray]:
        """One walk from a random id, in arrays of at most CHUNK_TOKENS ids."""
        position = int(rng.integers(len(self.ring)))
        bounds = np.cumsum(self.probabilities)[:-1]
        for start in range(0, num_tokens, CHUNK_TOKENS):
            size = min(CHUNK_TOKENS, num_tokens - start)
            taken = self.steps[np.searchsorted(bounds, rng.random(size), side="right")]
            positions = (position + np.cumsum(taken, dtype=np.int64)) % len(self.ring)
            position = int(positions[-1])
            yield self.ring[positions]


def synthesize(
    prefix: str,
    *,
    distribution: str,
    num_documents: int,
    scale: float = 1.0,
    seed: int = 0,
    max_tokens: int | None = None,
    vocab_size: int = 256,
    overwrite: bool = False,
    quiet: bool = False,
) -> DatasetMetadata:
    """Write PREFIX.bin, .idx and .json with documents drawn like a published distribution.

    Lengths (draw_lengths) include the end-of-document token; longer ones are cut to max_tokens.
    The same arguments give the same bytes. Raises UserError for arguments that cannot be.
    """
    if not 1 <= num_documents <= MAX_DOCUMENTS:
        raise UserError(
            f"1 to {MAX_DOCUMENTS:,} documents can be made, got --documents {num_documents}: give "
            "another number"
        )
    if not 3 <= vocab_size <= MAX_VOCAB_SIZE:
        raise UserError(
            f"synthetic text has 3 to {MAX_VOCAB_SIZE:,} ids, got --vocab-size {vocab_size}: give "
            "another number"
        )
    if max_tokens is not None and max_tokens < MIN_DOCUMENT_TOKENS:
        raise UserError(
            f"documents have at least {MIN_DOCUMENT_TOKENS} tokens, got --max-tokens {max_tokens}"
        )
    if seed < 0:
        raise UserError(f"a seed is 0 or more, got {seed}")
    rng = np.random.default_rng(seed)
    lengths = draw_lengths(distribution, num_documents, scale, rng)
    if max_tokens is not None:
        lengths = np.minimum(lengths, max_tokens)
    if lengths.max() > MAX_DOCUMENT_TOKENS:
        raise UserError(
            f"--scale {scale:g} makes a document of {lengths.max():,} tokens, and Megatron's index "
            f"holds at most {MAX_DOCUMENT_TOKENS:,}: give a smaller one, or --max-tokens"
        )
    eod = vocab_size - 1
    chain = MarkovChain.create(eod, rng)
    with (
        DatasetWriter(prefix, vocab_size, overwrite=overwrite) as writer,
        Progress("synthesizing", int(lengths.sum()), quiet=quiet) as progress,
    ):
        for length in lengths.tolist():
            for tokens in chain.walk(length - 1, rng):
                writer.add_tokens(tokens)
            writer.add_tokens(np.array([eod]))
            writer.end_document()
            progress.update(writer.num_tokens, writer.num_documents, writer.num_tokens)
        return writer.commit(
            tokenizer="synthetic",
            tokenizer_parameters={},
            vocab_size=vocab_size,
            eod=eod,
            append_eod=True,
            num_empty_documents=0,
            source="synthetic",
            source_parameters={
                "distribution": DISTRIBUTIONS[distribution].title,
                "scale": scale,
                "seed": seed,
                "max_tokens": max_tokens,
                "entropy_nats_per_token": round(chain.entropy_nats, 6),
            },
        )
