"""The parity check notices deliberately broken strategies: it is not blind."""

from __future__ import annotations

from contextlib import contextmanager
from unittest.mock import patch

import pytest

from megatron_paradyse.strategies import (
    blocks,
    collectives,
    local_attention,
    metp_attention,
    tiled_mlp,
)
from megatron_paradyse.strategies.collectives import Pending, exchange_async, swap_halves
from megatron_paradyse.strategies.output_gate import gate_gradients, with_gate
from megatron_paradyse.strategies.ring import TravellingGradient
from megatron_paradyse.strategies.tiled_mlp import tiles
from tests.strategies.cases import FLOAT32_TOLERANCE, AttentionCase, MlpCase
from tests.strategies.deviations import combine
from tests.strategies.harness import run_ranks
from tests.strategies.layers import run_case

PACKAGE = "megatron_paradyse.strategies"


def _wrong_way_round(x, group):
    p, rank = group.size(), group.rank()
    return exchange_async(x, group, to=(rank - 1) % p, source=(rank + 1) % p)


def _keep_own_part(x, group):
    return x.chunk(group.size())[group.rank()]


def _overwrite(out, lse, block_out, block_lse):
    out.copy_(block_out)
    lse.copy_(block_lse)


class _StaysHere(TravellingGradient):
    def add(self, grad):
        self._sum = grad


def _all_tiles_but_one(*sizes):
    return list(tiles(*sizes))[1:]


def _of_last_tile(of_tile, x, tensors, sums, grad):
    for total in sums:
        total.zero_()
    return ADD_GRADIENTS(of_tile, x, tensors, sums, grad)


def _gate_left_out(grad, out, gate):
    return grad, gate_gradients(grad, out, gate)[1]


def _gate_as_a_constant(grad, out, gate):
    return gate_gradients(grad, out, gate)[0], gate.new_zeros(gate.shape)


def _gate_of_other_heads(out, gate):
    """As if the gate, too, had gone through the exchange of heads."""
    return with_gate(out, gate.unflatten(2, (-1, out.shape[2])).transpose(2, 3).contiguous())


RING, ADD_GRADIENTS = metp_attention._Layer.ring, tiled_mlp._add_gradients
BREAKAGES = {
    "gradient_not_sent_on": {f"{PACKAGE}.routes.TravellingGradient": _StaysHere},
    "ring_direction": {f"{PACKAGE}.ring.ring_exchange_async": _wrong_way_round},
    "row_ring_direction": {f"{PACKAGE}.ring.ring_exchange_async": _wrong_way_round},
    "weight_gradient_not_reduced": {
        f"{PACKAGE}.zero.reduce_gradient_async": lambda x, group: Pending(_keep_own_part(x, group))
    },
    "output_not_reduced": {f"{PACKAGE}.megatron_ts.reduce_scatter": _keep_own_part},
    "not_swapped": {f"{PACKAGE}.megatron_cz.swap_halves": lambda x, group: x},
    "swapped_twice": {f"{PACKAGE}.megatron_cz.swap_halves_back": swap_halves},
    "not_merged": {f"{PACKAGE}.local_attention.merge_": _overwrite},
    "rope_at_local_positions": {
        f"{PACKAGE}.ulysses_z.contiguous_spans": lambda m, p, r: blocks.contiguous_spans(m, p, 0)
    },
    "dropout_at_local_heads": {
        f"{PACKAGE}.ulysses_z.AttentionTask": lambda shape, microbatch, first_head: (
            local_attention.AttentionTask(shape, microbatch)
        )
    },
    "blocks_not_transposed": {
        f"{PACKAGE}.ulysses_z.transpose_blocks": lambda x, group: x.contiguous()
    },
    "gate_left_out": {f"{PACKAGE}.output_gate.gate_gradients": _gate_left_out},
    "gate_left_out_of_block": {f"{PACKAGE}.metp_attention.gate_gradients": _gate_left_out},
    "gate_as_a_constant": {f"{PACKAGE}.output_gate.gate_gradients": _gate_as_a_constant},
    "gate_as_a_constant_of_block": {
        f"{PACKAGE}.metp_attention.gate_gradients": _gate_as_a_constant
    },
    "gate_of_other_heads": {f"{PACKAGE}.zero.with_gate": _gate_of_other_heads},
    "block_not_gated": {f"{PACKAGE}.metp_attention.with_gate": lambda out, gate: out},
    "tile_left_out": {f"{PACKAGE}.zero_tiles.tiles": _all_tiles_but_one},
    "tiles_not_summed": {f"{PACKAGE}.tiled_mlp._add_gradients": _of_last_tile},
    "dropout_of_first_key_head": {
        f"{PACKAGE}.metp_attention._Layer.ring": lambda layer, owner, part=0: RING(layer, owner)
    },
    "input_gradient_not_reduced": {
        f"{PACKAGE}.megatron_ts.reduce_scatter_async": lambda x, group: Pending(
            _keep_own_part(x, group)
        )
    },
}
CASES = {
    "gradient_not_sent_on": AttentionCase("megatron_cz", 4, "causal"),
    "ring_direction": AttentionCase("megatron_cz", 4, "causal"),
    "row_ring_direction": AttentionCase("colossal_z", 4, "causal"),
    "weight_gradient_not_reduced": MlpCase("ulysses_z", 4),
    "output_not_reduced": MlpCase("megatron_ts", 4),
    "not_swapped": AttentionCase("megatron_cz", 4, "causal"),
    "swapped_twice": AttentionCase("megatron_cz", 4, "causal"),
    "not_merged": AttentionCase("megatron_cz", 4, "bidirectional"),
    "rope_at_local_positions": AttentionCase("ulysses_z", 4, rope="half"),
    "dropout_at_local_heads": AttentionCase("ulysses_z", 4, dropout=0.3),
    "blocks_not_transposed": AttentionCase("ulysses_z", 4),
    "gate_left_out": AttentionCase("megatron_cz", 4, gate=True),
    "gate_left_out_of_block": AttentionCase("metp", 4, g=2, gate=True),
    "gate_as_a_constant": AttentionCase("megatron_ts", 4, g=1, gate=True),
    "gate_as_a_constant_of_block": AttentionCase("metp", 4, gate=True),
    "gate_of_other_heads": AttentionCase("ulysses_z", 4, n=8, gate=True),
    "block_not_gated": AttentionCase("metp", 4, gate=True),
    "tile_left_out": MlpCase("ulysses_z+recompute", 4, tile_rows=2),
    "tiles_not_summed": MlpCase("megatron_ts+recompute", 4, tile_rows=2),
    "dropout_of_first_key_head": AttentionCase(
        "metp+recompute", 4, n=8, g=8, dropout=0.3, tile_rows=4
    ),
    "input_gradient_not_reduced": AttentionCase("megatron_ts", 4),
}


@contextmanager
def _broken(replacements):
    patches = [patch(target, replacement) for target, replacement in replacements.items()]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()


def _run(group, case):
    name, is_broken = case
    with _broken(BREAKAGES[name] if is_broken else {}):
        return run_case(group, CASES[name])


@pytest.fixture(scope="module")
def results():
    cases = {f"{name} {broken}": (name, broken) for name in CASES for broken in (True, False)}
    return run_ranks(4, _run, cases)


@pytest.mark.parametrize("name", CASES)
def test_parity_check_notices(results, name):
    """Only the breakage makes the difference: the same case passes without it."""
    broken, sound = (combine(results[f"{name} {is_broken}"]) for is_broken in (True, False))
    assert max(part.relative for part in broken.values()) > 100 * FLOAT32_TOLERANCE
    assert max(part.relative for part in sound.values()) <= FLOAT32_TOLERANCE


def test_every_breakage_has_its_case():
    assert set(CASES) == set(BREAKAGES)
    assert collectives.ring_exchange_async is not _wrong_way_round
