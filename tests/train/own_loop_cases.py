"""What a rank with a loop of its own does, by the name of a test.

own_loop_cases <case> [cost file or folder]
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_paradyse.errors import UserError
from megatron_paradyse.library import attach
from tests.train.comparing import compare
from tests.train.own_loops import configuration, loop, start
from tests.train.synthetic_costs import write_costs

LENGTHS = (24, 40, 96, 16)
OVERLAPPED = {"batch_p2p_comm": False, "overlap_p2p_comm": True}  # as Megatron's arguments have it


def layer(config):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm)


def block(config):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(config, use_transformer_engine=False)


def prediction(config):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    return get_gpt_mtp_block_spec(config, layer(config), use_transformer_engine=False)


def gpt() -> None:
    """Random plans, another at each microbatch."""
    start(p=2)
    made = loop(configuration(), layer)
    expected = made.results(made.stock, LENGTHS)
    planned = attach(made.models, policy="random:1", head_tile="off")
    seen = set()
    for turn in range(6):
        compare(f"turn {turn}", expected, made.results(made.models, LENGTHS))
        assert planned.last is not None and planned.last.seq_length == LENGTHS[-1]
        seen.add(planned.last.plan.runs())
    assert len(seen) == 6, seen


def llama() -> None:
    """Grouped key heads, RoPE, gates, experts in every other layer, loss head in tiles."""
    start(p=2)
    config = configuration(
        num_query_groups=4,
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        num_moe_experts=4,
        moe_layer_freq=[0, 1, 0, 1],
        moe_router_load_balancing_type="none",
    )
    options = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False}
    made = loop(config, block, **options)
    expected = made.results(made.stock, LENGTHS)
    attach(made.models, policy="random:2", head_tile=16)
    for turn in range(4):
        compare(f"turn {turn}", expected, made.results(made.models, LENGTHS))


def pipeline() -> None:
    """Two stages of two chunks each, microbatches of different lengths."""
    start(stages=2, chunks=2)
    config = configuration(virtual_pipeline_model_parallel_size=2, **OVERLAPPED)
    made = loop(config, layer)
    expected = made.results(made.stock, LENGTHS)
    attach(made.models, policy="random:3")
    for turn in range(3):
        compare(f"turn {turn}", expected, made.results(made.models, LENGTHS))


def predicting() -> None:
    start(p=2)
    config = configuration(num_layers=2, mtp_num_layers=2)
    made = loop(config, layer, prediction=prediction, position_embedding_type="rope")
    expected = made.results(made.stock, LENGTHS)
    planned = attach(made.models, policy="random:4", head_tile=16)
    for turn in range(4):
        compare(f"turn {turn}", expected, made.results(made.models, LENGTHS))
    assert planned.last is not None and len(planned.last.plan.layers) == 4


def frozen() -> None:
    """Nothing before a layer that recomputes needs a gradient."""
    start(p=2)
    made = loop(configuration(), layer, share_embeddings_and_output_weights=False)
    for models in (made.stock, made.models):
        models[0].embedding.requires_grad_(False)
        models[0].decoder.layers[0].requires_grad_(False)
        models[0].decoder.layers[1].self_attention.requires_grad_(False)
    expected = made.results(made.stock, LENGTHS)
    names = "megatron_cz+recompute,metp+recompute,ulysses_z,megatron_ts+recompute,colossal_z"
    attach(made.models, policy="random:5", strategies=names)
    for turn in range(4):
        compare(f"turn {turn}", expected, made.results(made.models, LENGTHS))


def dropout() -> None:
    """The same of an iteration that is run again, under another plan too; another of the next."""
    start(p=2)
    made, again = (loop(configuration(attention_dropout=0.3), layer) for _ in range(2))
    again.models[0].load_state_dict(made.models[0].state_dict())
    names = "megatron_cz,metp+recompute"
    planned = attach(made.models, policy="random:6", strategies=names)
    other = attach(again.models, policy="random:7", strategies=names)
    first = made.results(made.models, LENGTHS)
    planned.iteration = 1
    following = made.results(made.models, LENGTHS)
    planned.iteration = 0
    compare("iteration 0 again", first, made.results(made.models, LENGTHS))
    planned.iteration = 0  # as after an error in it
    compare("and once more", first, made.results(made.models, LENGTHS))
    planned.iteration = 1
    compare("iteration 1 again", following, made.results(made.models, LENGTHS))
    other.iteration = 1
    compare("other plans", following, made.results(again.models, LENGTHS))
    assert other.last is not None and planned.last is not None
    assert other.last.plan.runs() != planned.last.plan.runs()
    assert float((first["loss of 0"] - following["loss of 0"]).abs()) > 1e-4


def checkpointed() -> None:
    """A checkpoint around the model: the gradients of none, or a line where scores are dropped."""
    start(p=2)
    for dropout in (0.0, 0.3):
        made = loop(configuration(attention_dropout=dropout), layer)
        attach(made.models, policy="fixed:ulysses_z")
        plain, found = [], []
        for gradients, run in ((plain, _called), (found, _checkpointed)):
            made.models[0].zero_grad()
            try:
                run(made.models[0], made.text[None, :33]).backward()
            except UserError as error:
                assert dropout and "with attention_dropout 0.3, which" in str(error), error
            gradients += [parameter.grad for parameter in made.models[0].parameters()]
        if not dropout:
            numbered = [{str(i): g.clone() for i, g in enumerate(of)} for of in (plain, found)]
            compare("checkpointed", *numbered)
        else:
            assert all(gradient is not None for gradient in plain)
            assert found[-1] is None, "refused in the backward"


def _called(model, text: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(text.shape[1] - 1)[None]
    return model(text[:, :-1], positions, None, labels=text[:, 1:]).sum()


def _checkpointed(model, text: torch.Tensor) -> torch.Tensor:
    return torch.utils.checkpoint.checkpoint(_called, model, text, use_reentrant=False)


def by_costs(path: str) -> None:
    """Several strategies, short and long; what else lies in memory leaves less for them."""
    start(p=2)
    made = loop(configuration(), layer)
    lengths = (16, 128, 250)
    expected = made.results(made.stock, lengths)
    planned = attach(made.models, cost_model=path, accept_costs=True, memory_budget="180MB")
    compare("as the file says", expected, made.results(made.models, lengths))
    longest = planned.last
    seen = {}
    for length in lengths:
        made.results(made.models, [length])
        seen[length] = planned.last.plan.runs()
    assert len(set(seen.values())) > 1, seen
    planned.hold()
    compare("as is held", expected, made.results(made.models, lengths))
    assert planned.last.peak_bytes < longest.peak_bytes, (planned.last, longest)
    assert planned.last.peak_bytes < 1.8e8


def optimizers(path: str) -> None:
    """PyTorch's: what gradients and states will take is told before there are any."""
    start(p=1)
    made = loop(configuration(), layer)
    model = made.models[0]
    model.embedding.position_embeddings.requires_grad_(False)
    planned = attach(made.models, cost_model=path, accept_costs=True)
    rate = {"lr": 1e-3}
    for make, states in (
        (lambda x: torch.optim.AdamW(x, **rate), 2),
        (lambda x: torch.optim.Adam(x, **rate, amsgrad=True), 3),
        (lambda x: torch.optim.SGD(x, **rate, momentum=0.9), 1),
        (lambda x: torch.optim.SGD(x, **rate), 0),
    ):
        model.zero_grad()
        optimizer = make(model.parameters())
        parameters = list(model.parameters())
        trained = sum(x.nbytes for x in parameters if x.requires_grad)
        waiting = model.shared_embedding_or_output_weight().nbytes
        expected = sum(x.nbytes for x in parameters) + (1 + states) * trained + waiting
        for turn in range(2):
            planned.hold(optimizer)
            told = planned._policies.made[0][0].static_bytes
            buffers = told - expected  # of the model, and counts of the optimizer's steps
            assert 0 <= buffers < 1000, (type(optimizer), states, turn, buffers)
            made.results(made.models, (24, 40))
            optimizer.step()
    try:
        planned.hold([optimizer])
    except UserError as error:
        assert "hold(list): give Megatron's optimizer or PyTorch's" in str(error), error
    else:
        raise AssertionError("held a list")


def packed() -> None:
    """Megatron's packed sequences; stock layers run their documents one by one."""
    from megatron.core.packed_seq_params import PackedSeqParams

    start(p=2)
    made = loop(configuration(), layer, position_embedding_type="rope")
    ends = torch.tensor([0, 10, 38, 96], dtype=torch.int32)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=58,
        max_seqlen_kv=58,
    )
    documents = list(itertools.pairwise(ends.tolist()))
    expected = made.results(made.stock, documents)
    losses = [expected.pop(f"loss of {index}") for index in range(len(documents))]
    attach(made.models, policy="random:7", head_tile=16)
    for turn in range(4):
        got = made.results(made.models, [(0, 96)], packed_seq_params=params)
        assert abs(float(got.pop("loss of 0") - sum(losses))) < 1e-3
        compare(f"turn {turn}", expected, got)


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
            overlap_grad_reduce=True, use_distributed_optimizer=True, bucket_size=10_000
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
    """A GPT whose forward takes no more than these, with an embedding of another class."""
    start(p=2)
    made = loop(configuration(), layer)
    for models in (made.stock, made.models):
        models[0].__class__ = _narrow(type(models[0]))
        models[0].embedding.__class__ = _scaled(type(models[0].embedding))
    expected = made.results(made.stock, LENGTHS)
    attach(made.models, policy="random:8", head_tile=16)
    for turn in range(2):
        compare(f"turn {turn}", expected, made.results(made.models, LENGTHS))


def _narrow(kind: type) -> type:
    def forward(self, input_ids, position_ids, attention_mask, labels, loss_mask):
        given = {"labels": labels, "loss_mask": loss_mask}
        return kind.forward(self, input_ids, position_ids, attention_mask, **given)

    return type("Narrow", (kind,), {"forward": forward})


def _scaled(kind: type) -> type:
    def forward(self, *args, **kwargs):
        return 2 * kind.forward(self, *args, **kwargs)

    return type("Scaled", (kind,), {"forward": forward})


def generating(p: str, embedding: str, head_tile: str) -> None:
    """Tokens one by one, each with the keys of those before it, as stock layers do.

    Before and after it the model trains. While it generates, Megatron turns sequence parallelism
    off.
    """
    from megatron.core.inference.contexts import StaticInferenceContext
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.utils import set_model_to_sequence_parallel

    start(p=int(p))
    config = configuration(attention_backend=AttnBackend.unfused)
    made = loop(config, layer, position_embedding_type=embedding)
    expected = made.results(made.stock, LENGTHS)
    attach(made.models, policy="fixed:metp", head_tile=head_tile)
    compare("before", expected, made.results(made.models, LENGTHS))

    def logits(model) -> list[torch.Tensor]:
        context, found = StaticInferenceContext(1, 24), []
        if int(p) > 1:
            set_model_to_sequence_parallel(model, False)
        model.eval()
        for first, stop in ((0, 16), (16, 17), (17, 18)):
            positions = torch.arange(first, stop)[None]
            mask = torch.ones(1, 1, stop - first, stop, dtype=torch.bool).triu(first + 1)
            with torch.no_grad():
                tokens = made.text[None, first:stop]
                found.append(model(tokens, positions, mask, inference_context=context))
            context.increment_sequence_len_offset(stop - first)
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
        "0 GPTModels": lambda: attach([torch.nn.Linear(2, 2)], policy="fixed:metp"),
        "[model]": lambda: attach(made.models[0], policy="fixed:metp"),
        "is empty": lambda: attach([], policy="fixed:metp"),
        "has a NoneType": lambda: attach([None], policy="fixed:metp"),
        "has 2, and its model is of 1": lambda: attach(made.models * 2, policy="fixed:metp"),
        "by a call of its own": lambda: attach([*made.models, other], policy="fixed:metp"),
        "whole number": lambda: attach(made.models, policy="fixed:metp", num_microbatches=0),
    }
    for words, run in cases.items():
        try:
            run()
        except UserError as error:
            assert words in str(error) and "\n" not in str(error), (words, error)
        else:
            raise AssertionError(words)
    attention = made.models[0].decoder.layers[1].self_attention
    attention.linear_proj._forward_hooks.clear()
    compare("afterwards", *(made.results(models, LENGTHS) for models in (made.stock, made.models)))
    attach(made.models, policy="fixed:metp")
    try:
        attach(made.models, policy="fixed:megatron_ts")
    except UserError as error:
        assert "attach once" in str(error), error
    else:
        raise AssertionError("attached twice")


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


def _hooked(made):
    proj = made.models[0].decoder.layers[1].self_attention.linear_proj
    del proj.lora
    proj.register_forward_hook(lambda module, args, output: output)
    return made.models


def main() -> None:
    globals()[sys.argv[1]](*sys.argv[2:])
    torch.distributed.barrier()
