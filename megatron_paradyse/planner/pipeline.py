"""What earlier microbatches hold on a pipeline stage while another one runs."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_paradyse.costs.description import LATENT_ROTATED, Description, ModelShape

UNLIMITED = 1 << 62  # the bytes of a CPU without --paradyse-memory-budget
KEPT_SHARE = 0.75  # of the room of several microbatches: what may be kept between their walks


def warmup_forwards(stage: int, num_stages: int, *, num_chunks: int, group_size: int | None) -> int:
    """How many forwards a stage runs before its first backward (stages count from 0).

    1F1B: one per later stage. Interleaved, with num_chunks model chunks per stage: two per later
    stage, and group_size (None: num_stages) microbatches through every chunk but the last.
    """
    if not 0 <= stage < num_stages:
        raise ValueError(f"stages are numbered 0 to {num_stages - 1}, got {stage}")
    later = num_stages - stage - 1
    if num_chunks == 1:
        return later
    return 2 * later + (num_chunks - 1) * (group_size or num_stages)


def in_flight(
    stage: int,
    num_stages: int,
    num_microbatches: int,
    *,
    num_chunks: int = 1,
    group_size: int | None = None,
) -> int:
    """The most forwards of (microbatch, chunk) that wait for their backward, the current included.

    With 1F1B: min(stages from here to the last, microbatches).
    """
    warmup = warmup_forwards(stage, num_stages, num_chunks=num_chunks, group_size=group_size)
    return min(warmup + 1, num_microbatches * num_chunks)


def held_besides(
    stage: int,
    num_stages: int,
    num_microbatches: int,
    *,
    num_chunks: int = 1,
    group_size: int | None = None,
) -> float:
    """What Megatron's schedule holds besides, for each forward in flight: so many inputs of layers.

    The gradient of an input stays until that of the next is there. Interleaved, every chunk has its
    last input and that one's gradient, and an input and a gradient have come early. On all stages
    but the last this is no more than outputs that count as kept and are gone once they are sent.
    """
    if stage < num_stages - 1 or num_stages == 1 or num_microbatches == 1:
        return 0.0
    if num_chunks == 1:
        return 1.0
    forwards = in_flight(
        stage, num_stages, num_microbatches, num_chunks=num_chunks, group_size=group_size
    )
    sent = forwards - 1  # the last chunk's output goes to the loss
    return max(0, 2 * num_chunks + 3 - sent) / forwards


def shares(room_bytes: int, num_in_flight: int) -> tuple[int, int]:
    """(what the others may hold, what must stay free above what this one keeps).

    Microbatches of any lengths then fit together, though each is planned alone: with c the n-th
    part of KEPT_SHARE of the room, each keeps at most c in the end, and its own walk leaves
    (n - 1) c for the others. The first number is added to base_bytes, the second is tail_bytes.
    """
    if num_in_flight == 1:
        return 0, 0
    each = int(max(room_bytes, 0) * KEPT_SHARE) // num_in_flight
    return (num_in_flight - 1) * each, max(room_bytes, 0) - num_in_flight * each


def parameters(description: Description, num_layers: int, *, edge: bool = True) -> int:
    """About how many a stage of so many layers has, over all ranks; edge: embedding or head.

    Matrices only, a vocabulary's once: what a cost file's description tells.
    """
    shape = description.model
    h = shape.hidden_size
    mlp = (3 if shape.gated else 2) * h * shape.ffn_size
    gate = h * shape.head_dim * shape.num_heads if description.output_gate else 0
    layer = _of_attention(shape, description.latents) + gate + mlp
    return num_layers * layer + (h * shape.vocab_size if edge else 0)


def _of_attention(shape: ModelShape, latents: Mapping[str, int] | None) -> int:
    h, n = shape.hidden_size, shape.num_heads
    if latents is None:
        return 2 * h * shape.head_dim * (n + shape.num_kv_heads)
    keys, positions, value = (
        latents[name] for name in ("kv_lora_rank", LATENT_ROTATED, "v_head_dim")
    )
    content, queries = latents["qk_head_dim"], latents["q_lora_rank"]
    query = n * (content + positions)
    of_queries = queries * (h + query) if queries else h * query
    return of_queries + h * (keys + positions) + keys * n * (content + value) + n * value * h
