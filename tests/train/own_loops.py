"""A training loop of its own on a rank: megatron-core's models and schedules, no arguments.

Losses and every gradient of a model with switchable layers are compared with those of Megatron's
own spec on the same parameters.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_paradyse.library import switchable_spec

VOCAB_SIZE = 64
LENGTHS = (24, 40, 96, 16)


@dataclasses.dataclass
class Loop:
    """A stock model and a switchable one of the same parameters, and microbatches for both."""

    config: Any
    stock: list
    models: list
    text: torch.Tensor

    def results(self, models: list, lengths: Sequence[int | tuple[int, int]], **given: Any) -> dict:
        """The losses, and the gradient of every parameter, complete over the group.

        lengths: from the first token of the text on, or which of its tokens.
        """
        from megatron.core import mpu

        for model in models:
            model.zero_grad()
        spans = [(0, one) if isinstance(one, int) else one for one in lengths]
        losses = self.run(models, spans, **given)
        found = {f"loss of {index}": loss for index, loss in enumerate(losses)}
        for chunk, model in enumerate(models):
            for name, parameter in model.named_parameters():
                if parameter.grad is None:
                    continue
                grad = parameter.grad.clone()
                if getattr(parameter, "sequence_parallel", False):
                    torch.distributed.all_reduce(grad, group=mpu.get_tensor_model_parallel_group())
                found[f"{chunk}: {name}"] = grad
        return found

    def run(self, models: list, spans: list[tuple[int, int]], **given: Any) -> list[torch.Tensor]:
        """By Megatron's schedule, as it runs a pipeline or none."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        count = len(spans)  # by which the schedule divides

        def step(iterator, model):
            first, stop = next(iterator)
            tokens = self.text[None, first : stop + 1]
            positions = torch.arange(stop - first)[None]
            mask = torch.ones(1, stop - first)
            output = model(
                tokens[:, :-1], positions, None, labels=tokens[:, 1:], loss_mask=mask, **given
            )
            return output, lambda losses: (losses.sum() * count, {"loss": losses.detach().sum()})

        several = len(models) > 1
        iterators = [iter(spans) for _ in models]
        reports = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if several else iterators[0],
            model=models if several else models[0],
            num_microbatches=count,
            seq_length=max(stop - first for first, stop in spans),
            micro_batch_size=1,
            forward_only=False,
        )
        return [report["loss"] for report in reports]


def start(*, p: int = 1, stages: int = 1, chunks: int | None = None) -> None:
    from megatron.core import mpu, tensor_parallel

    torch.distributed.init_process_group("gloo")
    mpu.initialize_model_parallel(p, stages, virtual_pipeline_model_parallel_size=chunks)
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def configuration(**given: Any):
    from megatron.core import mpu
    from megatron.core.transformer.transformer_config import TransformerConfig

    p = mpu.get_tensor_model_parallel_world_size()
    stages = mpu.get_pipeline_model_parallel_world_size()
    fields: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "tensor_model_parallel_size": p,
        "sequence_parallel": p > 1,
        "pipeline_model_parallel_size": stages,
        "pipeline_dtype": torch.float32,
        "variable_seq_lengths": stages > 1,
        "moe_token_dispatcher_type": "alltoall",
        "use_cpu_initialization": True,
    }
    return TransformerConfig(**(fields | given))


def loop(config, spec, *, prediction: Callable | None = None, **given: Any) -> Loop:
    """spec: Megatron's, of this config and pipeline chunk (vp_stage)."""
    from megatron.core import mpu
    from megatron.core.models.gpt import GPTModel

    chunks = config.virtual_pipeline_model_parallel_size or 1

    def build(switch: bool) -> list:
        models = []
        for index in range(chunks):
            vp_stage = index if chunks > 1 else None
            wrap = functools.partial(switchable_spec, config=config, vp_stage=vp_stage)
            own = wrap if switch else lambda spec: spec
            last = mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
            options = dict(given)
            if prediction is not None and last:
                options["mtp_block_spec"] = own(prediction(config))
            models.append(
                GPTModel(
                    config=config,
                    transformer_layer_spec=own(spec(config)),
                    vocab_size=VOCAB_SIZE,
                    max_sequence_length=256,
                    pre_process=mpu.is_pipeline_first_stage(
                        ignore_virtual=False, vp_stage=vp_stage
                    ),
                    post_process=last,
                    vp_stage=vp_stage,
                    **({"share_embeddings_and_output_weights": True} | options),
                )
            )
        return models

    stock, models = build(False), build(True)
    for model, other in zip(models, stock, strict=True):
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.data.copy_(theirs.data)
    text = torch.randint(VOCAB_SIZE, (256,), generator=torch.Generator().manual_seed(1))
    return Loop(config, stock, models, text)


def layer(config):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm)


def block(config):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(config, use_transformer_engine=False)


def prediction(config):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    return get_gpt_mtp_block_spec(config, layer(config), use_transformer_engine=False)
