"""One drawing per strategy: attention and MLP, as strategies/ runs them."""

from __future__ import annotations

from canvas import (
    ACTIVATION,
    MUTED,
    SENT,
    WEIGHT,
    WHOLE,
    P,
    arrow,
    columns,
    half_rows,
    label,
    middle,
    ring,
    rows,
    square,
)
from matplotlib.axes import Axes
from panel import BOTTOM, TOP, Compute, Send, Tensor, draw_panel, finish_panel

X = Tensor("x\n[s/p, b, h]", rows)
Y = Tensor("output\n[s/p, b, h]", rows)


def megatron_ts(attention: Axes, mlp: Axes) -> None:
    """strategies/megatron_ts.py: _ColumnLinear, attention over own heads, _RowLinear."""
    gather = Send("all_gather x", "all")
    scatter = Send("reduce_scatter", "all")
    whole = Tensor("x of all ranks\n[s, b, h]", lambda rank: WHOLE)
    sums = Tensor("partial sums\n[s, b, h]", lambda rank: WHOLE, partial=True)
    heads = Tensor("q, k, v: own heads\n[s, b, n/p, d]", columns)
    out = Tensor("own heads\n[s, b, n/p, d]", columns)
    draw_panel(
        attention,
        "MegatronTS attention",
        [X, gather, whole, Compute("qkv", "shard"), heads, Compute("attention"), out,
         Compute("proj", "shard"), sums, scatter, Y],
        "all_gather the gradient and, because only the shard was kept, x again; reduce_scatter the "
        "gradient of x.\nWeights and their gradients stay where they are.",
    )  # fmt: skip
    features = Tensor("own features\n[s, b, f/p]", columns)
    draw_panel(
        mlp,
        "MegatronTS MLP",
        [X, gather, whole, Compute("fc1", "shard"), features,
         Compute("activation,\nfc2", "shard"), sums, scatter, Y],
        "as in the attention.",
    )  # fmt: skip


def ulysses_z(attention: Axes, mlp: Axes) -> None:
    """strategies/ulysses_z.py."""
    mine = Tensor("q, k, v: all heads\n[s/p, b, n, d]", rows)
    heads = Tensor("own heads\n[s, b, n/p, d]", columns)
    back = Tensor("all heads\n[s/p, b, n, d]", rows)
    draw_panel(
        attention,
        "UlyssesZ attention",
        [X, Compute("all_gather W\nqkv", "gathered"), mine, Send("all_to_all q, k, v", "all"),
         heads, Compute("attention"), heads, Send("all_to_all", "all"), back,
         Compute("all_gather W\nproj", "gathered"), Y],
        "the two all_to_alls the other way round; all_gather each weight again, reduce_scatter its "
        "gradient in float32.",
    )  # fmt: skip
    zero_mlp(mlp, "UlyssesZ MLP: ZeRO-3")


def megatron_cz(attention: Axes, mlp: Axes) -> None:
    """strategies/megatron_cz.py and ring_attention.py; causal, so that halves are swapped."""
    swapped = Tensor("early and late half\n[s/p, b, h]", half_rows)
    mine = Tensor("q, k, v: all heads\n[s/p, b, n, d]", half_rows)
    out = Tensor("all heads\n[s/p, b, n, d]", half_rows)
    before = Tensor("[s/p, b, h]", half_rows)
    draw_panel(
        attention,
        "MegatronCZ attention, causal (without a causal mask nothing is swapped)",
        [X, Send("swap_halves", "swap"), swapped, Compute("all_gather W\nqkv", "gathered"), mine,
         Send("k, v go round:\np-1 hops", "ring"), out, Compute("all_gather W\nproj", "gathered"),
         before, Send("swap_halves_back", "swap"), Y],
        "k and v go round again, and their gradients one hop behind, in float32; halves are "
        "swapped at both ends;\nall_gather each weight again, reduce_scatter its gradient in "
        "float32.",
    )  # fmt: skip
    zero_mlp(mlp, "MegatronCZ MLP: ZeRO-3")


def colossal_z(attention: Axes, mlp: Axes) -> None:
    """strategies/colossal_z.py: whole score rows [s/p, s] per head."""
    mine = Tensor("q, k, v: all heads\n[s/p, b, n, d]", rows)
    scores = Tensor("whole score rows\n[b, n, s/p, s], kept", rows)
    out = Tensor("all heads\n[s/p, b, n, d]", rows)
    draw_panel(
        attention,
        "ColossalZ attention",
        [X, Compute("all_gather W\nqkv", "gathered"), mine,
         Send("k goes round:\np-1 hops, softmax", "ring"), scores,
         Send("v goes round:\np-1 hops", "ring"), out, Compute("all_gather W\nproj", "gathered"),
         Y],
        "v, then k go round again, each with its gradient one hop behind, in float32; all_gather "
        "each weight again,\nreduce_scatter its gradient in float32.",
    )  # fmt: skip
    zero_mlp(mlp, "ColossalZ MLP: ZeRO-3")


def local_z(attention: Axes, mlp: Axes) -> None:
    """strategies/local_z.py."""
    mine = Tensor("q, k, v of whole\ndocuments\n[s/p, b, n, d]", rows)
    out = Tensor("all heads\n[s/p, b, n, d]", rows)
    draw_panel(
        attention,
        "LocalZ attention: of packed documents, each on one rank",
        [X, Compute("all_gather W\nqkv", "gathered"), mine, Compute("attention"), out,
         Compute("all_gather W\nproj", "gathered"), Y],
        "all_gather each weight again, reduce_scatter its gradient in float32. Keys and values "
        "never leave their rank.",
    )  # fmt: skip
    zero_mlp(mlp, "LocalZ MLP: ZeRO-3")


def zero_mlp(ax: Axes, title: str) -> None:
    """strategies/zero.py: zero_mlp."""
    features = Tensor("all features\n[s/p, b, f]", rows)
    draw_panel(
        ax,
        title,
        [X, Compute("all_gather W\nfc1", "gathered"), features,
         Compute("activation;\nall_gather W, fc2", "gathered"), Y],
        "all_gather each weight again, reduce_scatter its gradient in float32. Activations never "
        "leave their rank.",
    )  # fmt: skip


def metp(attention: Axes, mlp: Axes) -> None:
    """strategies/metp_attention.py (blocks broadcast) and metp_mlp.py (blocks hop)."""
    _blocks(attention, hopping=False)
    finish_panel(
        attention,
        "METP attention: block by block of n/p heads, each on all ranks at once; causal: halves "
        "swapped before and after",
        "blocks are broadcast again; q, k, v of a block are computed again, k, v and their "
        "gradients go round; each block's\nweight gradient is summed into its owner in float32.",
    )
    _blocks(mlp, hopping=True)
    finish_panel(
        mlp,
        "METP MLP: block by block of f/p features, every rank at another one",
        "blocks hop again, fc1 and the activation run again; a block's gradient hops with it, in "
        "float32, and its owner is the\nlast to add.",
    )


def _blocks(ax: Axes, *, hopping: bool) -> None:
    step_width = 2.35
    for rank in range(P):
        label(ax, -0.62, middle(rank), f"rank {rank}", MUTED, ha="right", fontsize=7)
        square(ax, 0, middle(rank), rows(rank), ACTIVATION)
        square(ax, 11.2, middle(rank), rows(rank), ACTIVATION)
    label(ax, 0, BOTTOM - 0.02, "x\n[s/p, b, h]", va="top", fontsize=7)
    label(ax, 11.2, BOTTOM - 0.02, "sum of all steps\n[s/p, b, h]", va="top", fontsize=7)
    for step in range(P):
        left = 1.0 + step * step_width
        _block_step(ax, left, step, hopping)
    for rank in range(P):
        arrow(ax, (10.25, middle(rank)), (10.75, middle(rank)), MUTED)


def _block_step(ax: Axes, left: float, step: int, hopping: bool) -> None:
    weights, result = left + 0.2, left + 1.42
    for rank in range(P):
        block = (rank - step) % P if hopping else step
        square(ax, weights, middle(rank), rows(block), WEIGHT, side=0.56)
        label(ax, weights, middle(rank) - 0.4, f"block {block}", fontsize=6)
        arrow(ax, (weights + 0.34, middle(rank)), (result - 0.42, middle(rank)), MUTED, size=5)
        square(ax, result, middle(rank), ((block / P, rank / P, 1 / P, 1 / P),), ACTIVATION)
    if hopping:
        _hops(ax, weights, step)
        name = f"step {step + 1}"
        label(ax, left + 0.8, TOP + 0.12, name if step == 0 else f"{name}: after a hop")
        label(ax, result, BOTTOM - 0.02, "[s/p, b, f/p]", va="top", fontsize=7)
        return
    label(ax, left + 0.8, TOP + 0.12, f"step {step + 1}: rank {step} broadcasts", SENT)
    arrow(ax, (weights - 0.4, middle(0) + 0.2), (weights - 0.4, middle(P - 1) - 0.2), SENT,
          head="<|-|>")  # fmt: skip
    ring(ax, result + 0.5)
    label(ax, result + 0.06, BOTTOM - 0.02, "n/p heads;\nk, v go round", va="top", fontsize=7)


def _hops(ax: Axes, x: float, step: int) -> None:
    """From the step before, to the next rank: arrows come in from the left."""
    if step == 0:
        return
    for rank in range(P):
        before = middle((rank - 1) % P)
        arrow(ax, (x - 0.68, before), (x - 0.31, middle(rank)), SENT, lw=0.7, size=5)


DRAWINGS = {
    "megatron_ts": megatron_ts,
    "ulysses_z": ulysses_z,
    "megatron_cz": megatron_cz,
    "colossal_z": colossal_z,
    "metp": metp,
    "local_z": local_z,
}
