"""Loops with models that are more or other than Megatron's GPT, and what is refused."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_paradyse.errors import UserError
from megatron_paradyse.library import attach
from tests.train.comparing import compare
from tests.train.own_loops import LENGTHS, configuration, layer, loop, start
from tests.train.synthetic_costs import write_costs


def wrapped(folder: str) -> None:
    """Within a model of images and text, two replicas, gradients summed while the backward runs."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    start(p=1)
    made = loop(configuration(finalize_model_grads_func=finalize_model_grads), layer)

    def train(models: list, plans: dict | None) -> dict:
        settings = DistributedDataParallelConfig(
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            use_distributed_optimizer=True,
            bucket_size=10_000,
        )
        chunks = [DistributedDataParallel(made.config, settings, _Seeing(models[0]))]
        made.config.no_sync_func = chunks[0].no_sync
        planned = None if plans is None else attach(chunks, **plans)
        optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=True), chunks
        )
        if planned is not None:
            planned.hold(optimizer)
        lengths = LENGTHS[torch.distributed.get_rank() :]
        found = {}
        for turn in range(3):
            chunks[0].zero_grad_buffer()
            optimizer.zero_grad()
            found[f"loss {turn}"] = sum(made.run(chunks, [(0, s) for s in lengths[:2]]))
            found[f"norm {turn}"] = torch.tensor(optimizer.step()[1])
        return found

    costs = write_costs(Path(folder, f"costs-{torch.distributed.get_rank()}.json"))
    plans = {"cost_model": str(costs), "accept_costs": True, "memory_budget": "1GB"}
    compare("wrapped", train(made.stock, None), train(made.models, plans))


class _Seeing(torch.nn.Module):
    """Stands for a model of several, one of which is a GPT."""

    def __init__(self, language_model):
        super().__init__()
        self.config, self.model_type = language_model.config, language_model.model_type
        self.vision_model = torch.nn.Linear(4, 4)
        self.vision_model.requires_grad_(False)
        self.language_model = language_model

    def forward(self, *args, **kwargs):
        return self.language_model(*args, **kwargs)

    def set_input_tensor(self, tensor) -> None:
        self.language_model.set_input_tensor(tensor)


def values() -> None:
    """A head of one value for each token in place of the output layer."""
    start(p=2)
    made = loop(configuration(), layer, share_embeddings_and_output_weights=False)
    for models in (made.stock, made.models):
        torch.manual_seed(3)
        models[0].output_layer = _ValueHead(made.config.hidden_size)
        models[0].compute_language_model_loss = lambda labels, logits: (logits[..., 0].t() - 1) ** 2
    expected = made.results(made.stock, LENGTHS)
    attach(made.models, policy="random:8", head_tile=16)
    for turn in range(2):
        compare(f"turn {turn}", expected, made.results(made.models, LENGTHS))


class _ValueHead(torch.nn.Linear):
    def __init__(self, hidden_size: int):
        super().__init__(hidden_size, 1)

    def forward(self, hidden, weight=None, runtime_gather_output=None):
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        whole = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return super().forward(whole), None


def subclassed() -> None:
    """A GPT whose forward takes no more than these, with an embedding and a block of others."""
    start(p=2)
    made = loop(configuration(), layer)
    for models in (made.stock, made.models):
        models[0].__class__ = _narrow(type(models[0]))
        models[0].embedding.__class__ = _scaled(type(models[0].embedding))
        models[0].decoder.__class__ = _by_position(type(models[0].decoder))
    expected = made.results(made.stock, LENGTHS)
    attach(made.models, policy="random:8", head_tile=16)
    for turn in range(2):
        compare(f"turn {turn}", expected, made.results(made.models, LENGTHS))


def _narrow(kind: type) -> type:
    def forward(self, input_ids, position_ids, attention_mask, labels, loss_mask):
        given = {"labels": labels, "loss_mask": loss_mask}
        return kind.forward(self, input_ids, position_ids, attention_mask, **given)

    return type("Narrow", (kind,), {"forward": forward})


def _by_position(kind: type) -> type:
    """As a model of one's own may call its block: hidden states and mask without their names."""

    def call(self, hidden_states, attention_mask, **kwargs):
        return kind.__call__(self, hidden_states, attention_mask, **kwargs)

    return type("ByPosition", (kind,), {"__call__": call})


def _scaled(kind: type) -> type:
    def forward(self, *args, **kwargs):
        return 2 * kind.forward(self, *args, **kwargs)

    return type("Scaled", (kind,), {"forward": forward})


def generating(p: str, embedding: str, head_tile: str, backend: str) -> None:
    """Tokens one by one or two, with the keys of those before them, as stock layers do.

    And a text without such keys, as an engine asks for it. Before and after it the model trains.
    While it generates, Megatron turns sequence parallelism off.
    """
    from megatron.core.inference.contexts import StaticInferenceContext
    from megatron.core.inference.utils import InferenceMode
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.utils import set_model_to_sequence_parallel

    start(p=int(p))
    config = configuration(attention_backend=AttnBackend[backend])
    made = loop(config, layer, position_embedding_type=embedding)
    expected = made.results(made.stock, LENGTHS)
    attach(made.models, policy="fixed:metp", head_tile=head_tile)
    compare("before", expected, made.results(made.models, LENGTHS))

    def logits(model) -> list[torch.Tensor]:
        context, found = StaticInferenceContext(1, 24), []
        if int(p) > 1:
            set_model_to_sequence_parallel(model, False)
        model.eval()
        whole = {"runtime_gather_output": True}
        for first, stop in ((0, 16), (16, 17), (17, 19)):
            given = made.text[None, first:stop], torch.arange(first, stop)[None]
            mask = torch.ones(1, 1, stop - first, stop, dtype=torch.bool).triu(first + 1)
            with torch.no_grad():
                found.append(model(*given, mask, inference_context=context, **whole))
            context.increment_sequence_len_offset(stop - first)
        with torch.no_grad(), InferenceMode.active():
            given = made.text[None, :16], torch.arange(16)[None]
            mask = torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1)
            found.append(model(*given, mask, **whole))
        if int(p) > 1:
            set_model_to_sequence_parallel(model, True)
        model.train()
        return found

    found = [dict(enumerate(logits(models[0]))) for models in (made.stock, made.models)]
    compare("logits", *found)
    compare("after", expected, made.results(made.models, LENGTHS))


def refused() -> None:
    """One line each; no hook is left behind, so that the model then trains as before."""
    start(p=2)
    made = loop(configuration(), layer)
    other = loop(configuration(num_layers=2), layer).models[0]
    cases: dict[str, Callable] = {
        "switchable_spec": lambda: attach(made.stock, policy="fixed:metp"),
        "cost_model": lambda: attach(made.models),
        "did you mean": lambda: attach(made.models, polcy="fixed:metp"),
        "a loop of your own": lambda: attach(made.models, policy="fixed:metp", trace="t.jsonl"),
        "does not choose by cost": lambda: attach(
            made.models, policy="fixed:metp", memory_budget="1GiB"
        ),
        "--qk-clip": lambda: attach(_with(made, "qk_clip", True), policy="fixed:metp"),
        "adapter": lambda: attach(_adapted(made), policy="fixed:metp"),
        "with lora.weight besides": lambda: attach(_adapted_inside(made), policy="fixed:metp"),
        "with a forward hook": lambda: attach(_hooked(made), policy="fixed:metp"),
        "mlp is a Around, which": lambda: attach(_around(other, "mlp"), policy="fixed:metp"),
        "self_attention is a Around, which": lambda: attach(
            _around(other, "self_attention"), policy="fixed:megatron_ts"
        ),
        "core_attention is a Own with": lambda: attach(_other_core(), policy="fixed:metp"),
        "0 GPTModels": lambda: attach([torch.nn.Linear(2, 2)], policy="fixed:metp"),
        "[model]": lambda: attach(made.models[0], policy="fixed:metp"),
        "is empty": lambda: attach([], policy="fixed:metp"),
        "has a NoneType": lambda: attach([None], policy="fixed:metp"),
        "has 2, and its model is of 1": lambda: attach(made.models * 2, policy="fixed:metp"),
        "by a call of its own": lambda: attach([*made.models, other], policy="fixed:metp"),
        "0: give a whole number": lambda: attach(
            made.models, policy="fixed:metp", num_microbatches=0
        ),
        "num_microbatches True": lambda: attach(
            made.models, policy="fixed:metp", num_microbatches=True
        ),
        "seed 'x': give a whole": lambda: attach(made.models, policy="fixed:metp", seed="x"),
    }
    _refuses(cases)
    attention = made.models[0].decoder.layers[1].self_attention
    attention.linear_proj._forward_hooks.clear()
    compare("afterwards", *(made.results(models, LENGTHS) for models in (made.stock, made.models)))
    planned = attach(made.models, policy="fixed:metp")
    cases = {
        "iteration 1.5: give a whole": lambda: setattr(planned, "iteration", 1.5),
        "attach once": lambda: attach(made.models, policy="fixed:megatron_ts"),
        "23 tokens on 2 ranks: pad it": lambda: made.results(made.models, (23,)),
    }
    _refuses(cases)


def held_too_much_on_the_first_stage(models: list) -> None:
    """Both are told: the other would wait for it in their next collective."""
    from megatron.core import mpu

    with tempfile.TemporaryDirectory() as folder:
        costs = write_costs(Path(folder, "costs.json"))
        planned = attach(models, cost_model=costs, accept_costs=True, memory_budget="3MB")
    if mpu.get_pipeline_model_parallel_rank() == 0:
        models[0].register_buffer("more", torch.zeros(1_000_000))
    _refuses({"parameters, gradients and optimizer take 4.": planned.hold})


def _refuses(cases: dict[str, Callable]) -> None:
    for words, run in cases.items():
        try:
            run()
        except UserError as error:
            assert words in str(error) and "\n" not in str(error), (words, error)
        else:
            raise AssertionError(words)


def _with(made, name: str, value):
    setattr(made.config, name, value)
    return made.models


def _adapted(made):
    made.config.qk_clip = False
    attention = made.models[0].decoder.layers[1].self_attention

    class Adapted(torch.nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.to_wrap = linear

        def forward(self, *args, **kwargs):
            return self.to_wrap(*args, **kwargs)

    attention.linear_proj = Adapted(attention.linear_proj)
    return made.models


def _adapted_inside(made):
    attention = made.models[0].decoder.layers[1].self_attention
    attention.linear_proj = attention.linear_proj.to_wrap
    attention.linear_proj.lora = torch.nn.Linear(2, 2)
    return made.models


def _around(model, name: str):
    class Around(torch.nn.Module):
        def __init__(self, half):
            super().__init__()
            self.half = half

    for one in model.decoder.layers:
        setattr(one, name, Around(getattr(one, name)))
    return [model]


def _other_core():
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    own = type("Own", (DotProductAttention,), {"forward": lambda self, query, *_, **__: query})

    def spec(config):
        made = layer(config)
        made.submodules.self_attention.submodules.core_attention = own
        return made

    return loop(configuration(num_layers=1), spec).models


def _hooked(made):
    proj = made.models[0].decoder.layers[1].self_attention.linear_proj
    del proj.lora
    proj.register_forward_hook(lambda module, args, output: output)
    return made.models
