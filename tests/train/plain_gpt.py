"""A GPT in plain PyTorch, float64, from a Megatron state dict: the oracle of the CPU platform."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def plain_losses(weights: dict[str, torch.Tensor], tokens, labels, *, num_layers, num_heads):
    """Per-token losses [b, s] of a LayerNorm, GELU, learned-position, tied-embedding GPT."""
    embedding = weights["embedding.word_embeddings.weight"]
    positions = weights["embedding.position_embeddings.weight"]
    x = embedding[tokens] + positions[: tokens.shape[1]]  # [b, s, h]
    for layer in range(num_layers):
        w = {
            name.removeprefix(f"decoder.layers.{layer}."): value
            for name, value in weights.items()
            if name.startswith(f"decoder.layers.{layer}.")
        }
        x = x + _attention(_norm(x, w, "input_layernorm"), w, num_heads)
        hidden = _linear(_norm(x, w, "pre_mlp_layernorm"), w, "mlp.linear_fc1")
        x = x + _linear(F.gelu(hidden, approximate="tanh"), w, "mlp.linear_fc2")
    x = _norm(x, weights, "decoder.final_layernorm")
    return F.cross_entropy((x @ embedding.T).transpose(1, 2), labels, reduction="none")


def _attention(x, w, num_heads):
    b, s, h = x.shape
    qkv = _linear(x, w, "self_attention.linear_qkv").view(b, s, num_heads, 3, h // num_heads)
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(3))  # [b, n, s, d]
    scores = q @ k.transpose(2, 3) / (h // num_heads) ** 0.5
    mask = torch.ones(s, s, dtype=torch.bool).tril()
    probabilities = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    out = (probabilities @ v).transpose(1, 2).reshape(b, s, h)
    return _linear(out, w, "self_attention.linear_proj")


def _linear(x, w, name):
    return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])


def _norm(x, w, name):
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])
