"""A GPT and a BERT in plain PyTorch, float64, from a Megatron state dict: the oracles."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def plain_losses(
    weights: dict[str, torch.Tensor], tokens, labels, *, num_layers, num_heads, num_predictions=0
) -> list[torch.Tensor]:
    """Per-token losses [b, s] of a LayerNorm, GELU, tied-embedding GPT; positions learned or none.

    Then those of each layer of multi-token prediction [b, s - 1], [b, s - 2] and so on.
    """
    embedding = weights["embedding.word_embeddings.weight"]
    x = embedding[tokens]  # [b, s, h]
    positions = weights.get("embedding.position_embeddings.weight")
    if positions is not None:
        x = x + positions[: tokens.shape[1]]
    visible = torch.ones(2 * tokens.shape[1:], dtype=torch.bool, device=tokens.device).tril()
    for layer in range(num_layers):
        x = _layer(x, _below(weights, f"decoder.layers.{layer}."), num_heads, visible)
    x = _norm(x, weights, "decoder.final_layernorm")
    losses = [_of_head(x, embedding, labels)]
    for layer in range(num_predictions):
        x, tokens, labels, visible = x[:, :-1], tokens[:, 1:], labels[:, 1:], visible[1:, 1:]
        w = _below(weights, f"mtp.layers.{layer}.")
        both = torch.cat((_norm(embedding[tokens], w, "enorm"), _norm(x, w, "hnorm")), -1)
        x = F.linear(both, w["eh_proj.weight"])
        x = _layer(x, _below(w, "mtp_model_layer."), num_heads, visible)
        x = _norm(x, w, "final_layernorm")
        losses.append(_of_head(x, embedding, labels))
    return losses


def _of_head(x, embedding, labels):
    return F.cross_entropy((x @ embedding.T).transpose(1, 2), labels, reduction="none")


def plain_masked_losses(weights, tokens, labels, lengths, *, num_layers, num_heads):
    """Per-token losses [b, s] of a BERT of such layers, bidirectional over lengths [b] tokens."""
    embedding = weights["embedding.word_embeddings.weight"]
    positions = weights["embedding.position_embeddings.weight"]
    x = embedding[tokens] + positions[: tokens.shape[1]]
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    visible = (columns < lengths[:, None])[:, None, None, :]
    for layer in range(num_layers):
        x = _layer(x, _below(weights, f"encoder.layers.{layer}."), num_heads, visible)
    x = _norm(x, weights, "encoder.final_layernorm")
    x = _norm(F.gelu(_linear(x, weights, "lm_head.dense")), weights, "lm_head.layer_norm")
    logits = x @ embedding.T + weights["output_layer.bias"]
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


def _below(weights, prefix):
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}


def _layer(x, w, num_heads, visible):
    x = x + _attention(_norm(x, w, "input_layernorm"), w, num_heads, visible)
    hidden = _linear(_norm(x, w, "pre_mlp_layernorm"), w, "mlp.linear_fc1")
    return x + _linear(F.gelu(hidden, approximate="tanh"), w, "mlp.linear_fc2")


def _attention(x, w, num_heads, visible):
    b, s, h = x.shape
    qkv = _linear(x, w, "self_attention.linear_qkv").view(b, s, num_heads, 3, h // num_heads)
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(3))  # [b, n, s, d]
    scores = q @ k.transpose(2, 3) / (h // num_heads) ** 0.5
    probabilities = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    out = (probabilities @ v).transpose(1, 2).reshape(b, s, h)
    return _linear(out, w, "self_attention.linear_proj")


def _linear(x, w, name):
    return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])


def _norm(x, w, name):
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])
