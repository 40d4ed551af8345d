"""Synthetic tables of costs from known laws; not measurements of anything.

Laws have the form that docs/strategies.md derives: time = overhead + linear + quadratic, a peak is
the largest of a few sums of weights and activations. Noise multiplies times only.
"""

import numpy as np

from megatron_paradyse.costs.description import Description, Hardware, ModelShape
from megatron_paradyse.costs.table import Constants, CostTable, Measurement

DESCRIPTION = Description(
    model=ModelShape(
        num_layers=4,
        hidden_size=256,
        num_heads=8,
        num_kv_heads=8,
        head_dim=32,
        ffn_size=1024,
        gated=False,
        vocab_size=512,
        normalization="layernorm",
        biases=True,
        position_embedding="rope",
    ),
    p=4,
    dtype="float32",
    attention_mask="causal",
    attention_kernel="torch",
    hardware=Hardware(name="synthetic", kind="cpu", memory_bytes=1 << 33, num_devices=4),
    interconnect="none",
    versions={"torch": "2.15.0"},
    source="simulated",
    date="2026-01-01",
)
CONSTANTS = Constants(static_bytes=1e8, optimizer_seconds=0.01, host_bytes_per_second=2e9)
LENGTHS = tuple(128 * 2**i for i in range(9))
STRATEGIES = (
    "megatron_ts",
    "ulysses_z",
    "megatron_cz",
    "colossal_z",
    "metp",
    *(f"{name}+recompute" for name in ("megatron_ts", "ulysses_z", "megatron_cz", "metp")),
)


def law(strategy, operation):
    """time(s, b) and bytes(s, b) -> (kept, forward, backward), without noise."""
    i = STRATEGIES.index(strategy) if strategy in STRATEGIES else 0
    quadratic = operation in ("attention", "layer")
    overhead, per_token = 2e-3 * (1 + i / 3), 2e-6 * (1 - i / 20)
    per_pair = 1.5e-10 * (1 + i / 15) if quadratic else 0.0
    gathers = strategy.endswith("_z") or strategy.endswith("cz")
    weights = (1 << 20) if gathers else (1 << 16)
    unit, scores = 256.0, 16.0 if strategy == "colossal_z" and quadratic else 0.0

    def seconds(s, b):
        return overhead + b * (per_token * s + per_pair * s * s)

    def sizes(s, b):
        tokens = s * b
        kept = (1 if "+" in strategy else 5 + i % 3) * unit * tokens + scores * s * tokens
        forward_peak = max(weights + 6 * unit * tokens, weights / 4 + 9 * unit * tokens)
        backward_peak = max(3 * weights + 7 * unit * tokens, weights + 16 * unit * tokens)
        square = 2 * scores * s * tokens
        return kept, forward_peak + square, backward_peak + square + kept

    return seconds, sizes


def measure(strategy, operation, s, b=1, *, noise=0.0, steps=0.0, rng=None):
    """One measurement; steps: times are longer by this share from 1K to 8K."""
    seconds, sizes = law(strategy, operation)
    rng = rng or np.random.default_rng(0)
    stair = 1 + steps * (1024 <= s < 8192)
    forward, backward = (
        share * seconds(s, b) * stair * np.exp(noise * rng.standard_normal())
        for share in (0.4, 0.6)
    )
    kept, forward_bytes, backward_bytes = sizes(s, b)
    return Measurement(
        strategy,
        operation,
        s,
        b,
        "ok",
        float(forward),
        float(backward),
        float(kept),
        float(forward_bytes),
        float(backward_bytes),
    )


def make_table(
    lengths=LENGTHS,
    strategies=STRATEGIES,
    operations=("attention", "mlp"),
    batch_sizes=(1,),
    *,
    noise=0.0,
    steps=0.0,
    seed=0,
    model_parts=True,
):
    rng = np.random.default_rng(seed)
    pairs = [(strategy, operation) for strategy in strategies for operation in operations]
    pairs += [("model", "embedding"), ("model", "head")] if model_parts else []
    measurements = [
        measure(strategy, operation, s, b, noise=noise, steps=steps, rng=rng)
        for strategy, operation in pairs
        for b in batch_sizes
        for s in lengths
    ]
    return CostTable(DESCRIPTION, measurements, CONSTANTS)
