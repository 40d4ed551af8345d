"""Which of Megatron's models is trained: a GPT, or a BERT (--paradyse-model)."""

from __future__ import annotations

import argparse

from megatron.training.argument_utils import gpt_config_from_args

GPT, BERT = "gpt", "bert"
MASKS = {GPT: "causal", BERT: "bidirectional"}
SPECS = {
    GPT: ["megatron_paradyse.layer_specs", "gpt_layer_spec"],
    BERT: ["megatron_paradyse.layer_specs", "bert_layer_spec"],
}


def model_config(args: argparse.Namespace):
    """Megatron's configuration of the model that the arguments describe."""
    if getattr(args, "paradyse_model", GPT) != BERT:
        return gpt_config_from_args(args)
    from megatron_paradyse.bert import BertModelConfig

    return gpt_config_from_args(args, model_config_cls=BertModelConfig)
