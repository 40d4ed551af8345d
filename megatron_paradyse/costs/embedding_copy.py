"""The copy that Megatron's embedding makes of several sequences, for costs of one.

It looks words up in [b, s, h] and brings the sequence first: of one sequence that is the same
memory, of several a copy beside it. Costs of b = 1 have no term for that. Microbatches that go in
tiles (edges/embedding.py) are looked up with the sequence first.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_paradyse.costs.description import ELEMENT_BYTES, Description


@dataclass(frozen=True)
class EmbeddingCopy:
    """bytes_per_token: of the microbatch's s b; most_tokens: of what is not in tiles.

    With p ranks the copy is there before the rank's share of it, which is kept.
    """

    bytes_per_token: float
    most_tokens: float

    def __call__(self, seq_length: int, batch_size: int) -> float:
        tokens = seq_length * batch_size
        return self.bytes_per_token * tokens if batch_size > 1 and tokens <= self.most_tokens else 0


def embedding_copy(d: Description) -> EmbeddingCopy | None:
    """None where the dtype is not known."""
    if d.dtype not in ELEMENT_BYTES:
        return None
    bytes_per_token = float(d.model.hidden_size * ELEMENT_BYTES[d.dtype])
    share = (d.p - 1) / d.p if d.p > 1 else 1.0
    return EmbeddingCopy(bytes_per_token * share, d.edge_tile_tokens)
