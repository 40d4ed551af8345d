"""What each strategy costs, by formula: FLOPs, bytes sent, bytes kept, workspace.

Per rank and per operation (attention, mlp) of one layer, for documents=None; of packed documents,
what attention sends (packed_attention_sent). The workspace comes from walking the same allocations
and releases as the code, in a Ledger that holds numbers instead of tensors. docs/strategies.md
derives the closed forms. Buffers inside kernels are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, replace
from functools import lru_cache

from megatron_paradyse.errors import UserError
from megatron_paradyse.strategies import RECOMPUTE, offloads, parse_strategy_name
from megatron_paradyse.strategies.sizes import Costs, LayerSizes, Ledger, of_tile
from megatron_paradyse.strategies.walks import ROW_WALKS, TILED_ZERO_MLP, WALKS, Walk
from megatron_paradyse.strategies.walks.aligned import aligned_rows
from megatron_paradyse.strategies.walks.rings import second_half, swaps
from megatron_paradyse.strategies.walks.zero import down_backward, proj_backward

SPLIT_HEADS = ("megatron_ts", "ulysses_z")  # every rank of a group has some heads of its tokens
GATHERED = ("ulysses_z", "megatron_cz", "colossal_z", "local_z")  # weights of attention are, whole
RINGS = ("megatron_cz", "colossal_z", "metp")  # keys and values go between ranks as they are
# Whose ranks hold or send different amounts: the costs are of each quantity the largest.
RANKS_DIFFER = {("megatron_cz", "attention"), ("metp", "attention")}


def operation_costs(strategy: str, operation: str, sizes: LayerSizes) -> Costs:
    """Costs of "attention" or "mlp" under a strategy, +recompute and +offload too, for p > 1."""
    base, _ = parse_strategy_name(strategy)
    if (base, operation) not in WALKS:
        raise UserError(f"no cost formulas for the {operation} of {base}: profile it instead")
    _check_formulas(operation, sizes)
    by_rank = [
        _costs_of_rank(strategy, operation, sizes, rank)
        for rank in (range(sizes.p) if (base, operation) in RANKS_DIFFER else (0,))
    ]
    return Costs(*(max(of_ranks) for of_ranks in zip(*map(astuple, by_rank), strict=True)))


def _check_formulas(operation: str, z: LayerSizes) -> None:
    if z.latent is not None and operation == "attention":  # of which walks know the bytes it holds
        raise UserError("no cost formulas for latent attention: profile it instead")


def _costs_of_rank(strategy: str, operation: str, sizes: LayerSizes, rank: int) -> Costs:
    base, recompute = parse_strategy_name(strategy)
    walk = WALKS[base, operation]
    forward, backward = Ledger(rank), Ledger(rank)
    walk.forward(forward, sizes)
    walk.backward(backward, sizes)
    forward_flops, backward_flops = _flops(base, operation, sizes)
    forward_sent, backward_sent = _sent_bytes(base, operation, sizes, rank)
    costs = Costs(
        forward_flops=forward_flops,
        backward_flops=backward_flops,
        forward_sent_bytes=forward_sent,
        backward_sent_bytes=backward_sent,
        kept_bytes=_kept(forward, base, operation, sizes),
        forward_bytes=forward.peak - forward.kept,
        backward_bytes=backward.peak,
    )
    if not recompute:
        return costs
    if operation == "mlp" and sizes.is_tiled and base != "metp":
        again = _tile_by_tile(base, sizes) if base == "megatron_ts" else _zero_in_tiles(sizes)
    else:
        if walk.second_backward is not None:
            backward = Ledger(rank)
            walk.second_backward(backward, sizes)
            costs = replace(costs, backward_bytes=backward.peak)
        second = _second_run(base, operation, sizes, costs)
        again = _recomputed(
            costs, second, sizes, made_anew=forward.kept, forward_bytes=forward.peak_alone
        )
    if not offloads(strategy):
        return again
    # The input comes back in the backward; the forward's caller holds it while that runs.
    return replace(again, kept_bytes=0, backward_bytes=again.backward_bytes + sizes.x)


Bytes = tuple[int, int, int]  # kept, and the peaks of forward and backward above it


def attention_bytes(strategy: str, z: LayerSizes) -> Bytes:
    """As Costs has them, but of +offload.

    Of a microbatch with shards, whose z has a row; or of one document.
    """
    base, recompute = parse_strategy_name(strategy)
    return _attention_bytes(base, z)[recompute]


@lru_cache(maxsize=4096)  # a plan of a row asks for it and for one document, whose is there mostly
def _attention_bytes(base: str, z: LayerSizes) -> tuple[Bytes, Bytes]:
    """Without and with +recompute."""
    walk = ROW_WALKS[base]
    found = [_bytes_of_rank(walk, base, z, rank) for rank in _ranks_that_differ(base, z)]
    if z.row is not None and base == "colossal_z":  # what is kept differs, and peaks do not
        found.append(_bytes_of_rank(walk, base, replace(z, keys_received=z.row.fewest_keys), 0))
    plain, again = zip(*found, strict=True)
    return _most(plain), _most(again)


def projection_bytes(strategy: str, z: LayerSizes, *, norm: int) -> int:
    """What a backward holds while gradients of proj are made, before those of attention.

    Where proj is gathered, else 0. norm: of the layer's norm, which a second run makes anew too.
    """
    base, recompute = parse_strategy_name(strategy)
    if base not in GATHERED:
        return 0
    m = Ledger()
    proj_backward(m, z)
    made_anew = attention_bytes(base, z)[0] - z.input + norm if recompute else 0
    return made_anew + m.peak


@lru_cache(maxsize=256)  # of a length all strategies and rows ask the same
def down_projection_bytes(z: LayerSizes) -> int:
    """What a layer's backward holds while gradients of weights are made that make latents of x.

    Of a row as of one document.
    """
    if z.latent is None:
        return 0
    c_q, c_kv, c_pe = z.latent_channels
    peaks = []
    for channels in (c_kv + c_pe, c_q if c_q != z.h else 0):  # else x is c_q
        m = Ledger()
        down_backward(m, z, channels)
        peaks.append(m.peak)
    return max(peaks)


def _most(found: Iterable[Bytes]) -> Bytes:
    kept, forward, backward = map(max, zip(*found, strict=True))
    return kept, forward, backward


def _ranks_that_differ(base: str, z: LayerSizes) -> Iterable[int]:
    """Those among which are the ranks that hold most: in a ring the first and the middle one."""
    if base == "metp" and z.g % z.p:
        if z.row is None:
            return range(z.p)
        rows = aligned_rows(z.n, z.g, z.d, z.p, z.gate)
        return [rank for rank, mine in enumerate(rows) if mine not in rows[:rank]]
    if z.row is not None or (base, "attention") not in RANKS_DIFFER:
        return (0,)
    return range(z.p) if z.p % 2 else (0, z.p // 2)


def _bytes_of_rank(walk: Walk, base: str, z: LayerSizes, rank: int) -> tuple[Bytes, Bytes]:
    forward, backward = Ledger(rank), Ledger(rank)
    walk.forward(forward, z)
    walk.backward(backward, z)
    plain = _kept(forward, base, "attention", z), forward.peak - forward.kept, backward.peak
    if walk.second_backward is not None and z.is_tiled:
        backward = Ledger(rank)
        walk.second_backward(backward, z)
    again = forward.kept + max(forward.peak - forward.kept, backward.peak)
    return plain, (z.input, forward.peak_alone, again)


def _kept(forward: Ledger, base: str, operation: str, z: LayerSizes) -> int:
    """What the forward keeps, and its input, unless a swapped one is kept instead."""
    keeps_swapped = (base, operation) in RANKS_DIFFER and swaps(forward.rank, z)
    if keeps_swapped:
        return forward.kept
    return forward.kept + (z.input if operation == "attention" else z.x)


def _recomputed(
    costs: Costs, second: Costs, z: LayerSizes, *, made_anew: int, forward_bytes: int
) -> Costs:
    """Keeps x; the backward first makes anew what the forward would have kept."""
    return Costs(
        forward_flops=costs.forward_flops,
        backward_flops=second.forward_flops + costs.backward_flops,
        forward_sent_bytes=costs.forward_sent_bytes,
        backward_sent_bytes=second.forward_sent_bytes + costs.backward_sent_bytes,
        kept_bytes=z.x,
        forward_bytes=forward_bytes,
        backward_bytes=made_anew + max(second.forward_bytes, costs.backward_bytes),
    )


def _zero_in_tiles(z: LayerSizes) -> Costs:
    """Of the MLP of zero_tiles.py."""
    forward, backward = Ledger(), Ledger()
    TILED_ZERO_MLP.forward(forward, z)
    TILED_ZERO_MLP.backward(backward, z)
    fc1, fc2 = (2 * z.rows * z.h * rows for rows in (z.fc1_rows, z.f))
    sent, _ = _weights_sent("ulysses_z", z, z.fc1_weight + z.fc2_weight, z.fc1_rows)
    return Costs(
        forward_flops=fc1 + fc2,
        backward_flops=fc1 + 2 * (fc1 + fc2),
        forward_sent_bytes=sent,
        backward_sent_bytes=sent + z.wide(sent),
        kept_bytes=z.x,
        forward_bytes=forward.peak,
        backward_bytes=backward.peak,
    )


def _tile_by_tile(base: str, z: LayerSizes) -> Costs:
    """Of tile_by_tile in tiled_mlp.py: the whole output, then the whole gradient of x.

    The tile's output and gradients are beside them, and the sums of the weights' gradients.
    """
    name, whole = base + RECOMPUTE, of_tile(z)
    count, rest = divmod(z.s, whole.s)
    tile = operation_costs(name, "mlp", whole)
    last = operation_costs(name, "mlp", replace(z, s=rest)) if rest else None

    def total(quantity: str) -> int:
        return count * getattr(tile, quantity) + (getattr(last, quantity) if last else 0)

    sums = z.wide(z.fc1_weight + z.fc2_weight + z.fc1_bias) // z.p
    return Costs(
        forward_flops=total("forward_flops"),
        backward_flops=total("backward_flops"),
        forward_sent_bytes=total("forward_sent_bytes"),
        backward_sent_bytes=total("backward_sent_bytes"),
        kept_bytes=z.x,
        forward_bytes=z.x + tile.forward_bytes,
        backward_bytes=z.x + sums + tile.backward_bytes,
    )


def _second_run(base: str, operation: str, z: LayerSizes, costs: Costs) -> Costs:
    """The forward that +recompute runs in the backward; nobody reads the output of an MLP then.

    So METP's does nothing, and the others end before fc2; its workspace is below the backward's.
    """
    if operation != "mlp":
        return costs
    if base == "metp":
        return replace(costs, forward_flops=0, forward_sent_bytes=0, forward_bytes=0)
    sent = (z.p - 1) * z.x
    if base != "megatron_ts":
        sent, _ = _weights_sent(base, z, z.fc1_weight, z.fc1_rows)
    fc1 = 2 * z.rows * z.h * z.fc1_rows
    return replace(costs, forward_flops=fc1, forward_sent_bytes=sent, forward_bytes=0)


def _flops(base: str, operation: str, z: LayerSizes) -> tuple[int, int]:
    """Matrix products only: 2 per multiply-add; the gradient of a linear costs two linears."""
    if operation == "mlp":
        linear = 2 * z.rows * z.h * (z.fc1_rows + z.f)
        again = 2 * z.rows * z.h * z.fc1_rows if base == "metp" else 0
        return linear, 2 * linear + again
    heads = z.kv_heads_sent if base == "metp" else z.g
    qkv = 2 * z.rows * z.h * z.qkv_rows(heads)
    linear = qkv + 2 * z.rows * z.h * z.n * z.d
    scores = z.rows * z.n * z.s
    if z.causal and base != "colossal_z":
        scores = z.b * z.n * z.s * (z.s + 1) // (2 * z.p)
    product = 2 * z.d * scores
    if base == "colossal_z":  # the last rank's: its queries see chunks of keys before them
        return linear + 2 * product, 2 * linear + 4 * product
    # Fused kernels compute the scores again in the backward: five products instead of four.
    return linear + 2 * product, 2 * linear + 5 * product + (qkv if base == "metp" else 0)


def _sent_bytes(base: str, operation: str, z: LayerSizes, rank: int) -> tuple[int, int]:
    forward, backward = _sent_whatever_is_packed(base, operation, z)
    if (base, operation) == ("metp", "attention"):
        aligned, aligned_back = _aligning_sent(z)[rank]
        forward, backward = forward + aligned, backward + aligned_back
    if operation == "mlp" or base not in RINGS:
        return forward, backward
    swapped = 0
    if base in ("megatron_cz", "metp") and swaps(rank, z):
        swapped = 2 * second_half(z, z.x)
    ring = (z.p - 1) * (z.kv_sent if base == "metp" else z.kv)
    return forward + swapped + ring, backward + swapped + ring + z.wide(ring)


def packed_attention_sent(
    strategy: str,
    z: LayerSizes,
    *,
    keys_sent: int,
    keys_received: int,
    across_groups: tuple[int, int] = (0, 0),
) -> tuple[int, int]:
    """Bytes that a rank sends for a microbatch with shards, in the forward and in the backward.

    Weights included; exact but of METP with g % p != 0, where they count as those of the rank that
    sends most. keys_sent, keys_received: tokens whose keys and values it sends and receives
    (packing/work.py); the gradients of what it received go back in the backward. across_groups: of
    a wide microbatch, those that its group sends to and receives from others, of which each rank
    has its heads where these are split; z is of one group. The MLP sends what operation_costs says.
    """
    base, recompute = parse_strategy_name(strategy)
    _check_formulas("attention", z)
    forward, backward = _sent_whatever_is_packed(base, "attention", z)
    if base == "metp":
        aligned, aligned_back = map(max, zip(*_aligning_sent(z), strict=True))
        forward, backward = forward + aligned, backward + aligned_back
    token = (z.kv_sent if base == "metp" else z.kv) // z.rows
    if base in SPLIT_HEADS:
        keys_sent, keys_received = across_groups
        token = z.kv_sent // (z.rows * z.p)
    if base in RINGS or base in SPLIT_HEADS:
        forward += keys_sent * token
        backward += keys_sent * token + z.wide(keys_received * token)
    return forward, backward + (forward if recompute else 0)


def _sent_whatever_is_packed(base: str, operation: str, z: LayerSizes) -> tuple[int, int]:
    """What depends on the sizes alone: no keys and values of rings, swaps, nor aligned rows."""
    others = z.p - 1
    if base == "megatron_ts":
        heads = others * z.mixed if operation == "attention" and z.g < z.p else 0
        return 2 * others * z.x + heads, 3 * others * z.x + heads
    if operation == "mlp":
        return _weights_sent(base, z, z.fc1_weight + z.fc2_weight, z.fc1_rows)
    heads = z.kv_heads_sent if base == "metp" else z.g
    rows = z.qkv_rows(heads)
    qkv_weight = rows * z.h * z.element_bytes
    forward, backward = _weights_sent(base, z, qkv_weight + z.proj_weight, rows)
    if z.offset and base not in SPLIT_HEADS:
        offsets = others * z.n // z.p * z.wide_bytes
        forward, backward = forward + offsets, backward + offsets
    if base == "ulysses_z":
        inner = others * (z.q + z.kv_sent + z.q) // z.p
        return forward + inner, backward + inner
    return forward, backward


def _weights_sent(base: str, z: LayerSizes, weights: int, bias_rows: int) -> tuple[int, int]:
    """Shards of weights and bias gathered or passed on; once more, and their wide gradients."""
    bias = bias_rows * z.element_bytes if z.bias else 0
    forward = (z.p - 1) * (weights + bias) // z.p
    again = forward if base == "metp" else (z.p - 1) * weights // z.p
    return forward, again + z.wide(forward)


def _aligning_sent(z: LayerSizes) -> list[tuple[int, int]]:
    """By rank, of METP's rows of qkv that change ranks, when shards of them are not whole heads."""
    if z.g % z.p == 0:
        return [(0, 0)] * z.p
    row = (z.h + (1 if z.bias else 0)) * z.element_bytes
    return [
        (of.sent_away * row, of.sent_away * row + z.wide(of.received_here * row))
        for of in aligned_rows(z.n, z.g, z.d, z.p, z.gate)
    ]
