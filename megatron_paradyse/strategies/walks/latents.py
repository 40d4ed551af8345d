"""Heads of latents (latents.py), their gradients, and values narrower than their heads.

parts: of which a rank takes one, of METP's blocks of heads.
"""

from __future__ import annotations

from megatron_paradyse.strategies.sizes import LayerSizes, Ledger
from megatron_paradyse.strategies.walks.steps import turn_backward


def hold_products(m: Ledger, z: LayerSizes) -> None:
    """Holds "mixed": what gathered weights make of c_q and c_kv."""
    (of_queries, of_keys), (q, kv) = z.up_weights, z.products
    m.hold(q_up=of_queries, kv_up=of_keys, q_product=q)
    m.drop("q_up")
    m.hold(kv_product=kv)
    m.drop("kv_up", "q_product", "kv_product")
    m.hold(mixed=q + kv)


def hold_block(m: Ledger, z: LayerSizes, *, parts: int) -> None:
    """Holds "mixed": the products of a block, and c_pe beside them, copied into one."""
    products = sum(z.products) // parts
    m.hold(products=products)
    m.hold(mixed=products + _of_positions(z))
    m.drop("products")


def heads_backward(
    m: Ledger,
    z: LayerSizes,
    *,
    parts: int = 1,
    q_stays: bool = False,
    k_stays: bool = False,
    grads_stay: bool = False,
) -> None:
    """From "grad_qkv" to "grad_q_product", "grad_kv_product" and "grad_pe"; see split_backward.

    grads_stay: a caller holds the first too.
    """
    q, kv = z.q // parts, z.kv // parts
    turn_backward(m, z, q=q, kv=kv, rows=z.positions, q_stays=q_stays, k_stays=k_stays)
    of_q, of_kv = (product // parts for product in z.products)
    m.hold(grad_q_product=of_q, grad_kv_product=of_kv, grad_pe=_of_positions(z))
    m.touch(_of_positions(z))
    m.drop("turned_q", "turned_k", *([] if grads_stay else ["grad_qkv", "grad_gate"]))


def block_backward(m: Ledger, z: LayerSizes, *, parts: int) -> None:
    """split_backward of a block: holds "grad_mixed"."""
    heads_backward(m, z, parts=parts, q_stays=True, k_stays=True, grads_stay=True)
    m.hold(grad_mixed=sum(z.products) // parts + _of_positions(z))
    m.drop("grad_q_product", "grad_kv_product", "grad_pe", "grad_qkv", "grad_gate")


def widen(m: Ledger, z: LayerSizes, name: str) -> None:
    """What `name` holds, the gradient of values, becomes that of whole heads."""
    if z.narrow_values:
        m.hold(widened=z.q)
        m.drop(name, "widened")
        m.hold(**{name: z.q})


def _of_positions(z: LayerSizes) -> int:
    """c_pe."""
    return z.latents(z.latent_channels[2])
