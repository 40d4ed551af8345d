"""Workspace by walking each strategy's allocations and releases, in the order of its code.

Every operation of every strategy has two walks over a Ledger, which holds numbers instead of
tensors. Exact for p > 1 and documents=None, for the ledger's rank; what kernels allocate inside,
and dropout's masks, are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_paradyse.strategies.sizes import LayerSizes, Ledger
from megatron_paradyse.strategies.walks import colossal_z, megatron_ts, metp, zero


@dataclass(frozen=True)
class Walk:
    """What one operation holds, beside its input: in the forward, and in the backward.

    The forward tells its Ledger what it would keep; the backward releases that. second_backward:
    of a second run, where it differs.
    """

    forward: Callable[[Ledger, LayerSizes], None]
    backward: Callable[[Ledger, LayerSizes], None]
    second_backward: Callable[[Ledger, LayerSizes], None] | None = None


_ZERO_MLP = Walk(zero.mlp_forward, zero.mlp_backward)

WALKS: dict[tuple[str, str], Walk] = {
    ("megatron_ts", "attention"): Walk(
        megatron_ts.attention_forward, megatron_ts.attention_backward
    ),
    ("megatron_ts", "mlp"): Walk(megatron_ts.mlp_forward, megatron_ts.mlp_backward),
    ("ulysses_z", "attention"): Walk(zero.ulysses_z_forward, zero.ulysses_z_backward),
    ("ulysses_z", "mlp"): _ZERO_MLP,
    ("megatron_cz", "attention"): Walk(zero.megatron_cz_forward, zero.megatron_cz_backward),
    ("megatron_cz", "mlp"): _ZERO_MLP,
    ("colossal_z", "attention"): Walk(colossal_z.forward, colossal_z.backward),
    ("colossal_z", "mlp"): _ZERO_MLP,
    ("metp", "attention"): Walk(
        metp.attention_forward, metp.attention_backward, metp.attention_second_backward
    ),
    ("metp", "mlp"): Walk(metp.mlp_forward, metp.mlp_backward),
}

# Of attention on packed rows, whose sizes tell of documents (LayerSizes.row).
ROW_WALKS = {name: walk for (name, half), walk in WALKS.items() if half == "attention"} | {
    "local_z": Walk(zero.local_z_forward, zero.local_z_backward)
}

# Of what recomputes in tiles; the others' tiles are MLPs of a shorter sequence each, but for METP's
# MLP, which never goes in tiles.
TILED_ZERO_MLP = Walk(zero.mlp_tiles_forward, zero.mlp_tiles_backward)
