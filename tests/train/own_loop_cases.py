"""What a rank with a loop of its own does, by the name of a test.

own_loop_cases <case> [argument ...]; some cases are in own_loop_others.py
"""

from __future__ import annotations

import functools
import itertools
import sys

import torch

from megatron_paradyse.errors import UserError
from megatron_paradyse.library import attach
from tests.train import own_loop_others
from tests.train.comparing import compare
from tests.train.own_loops import LENGTHS, block, configuration, layer, loop, prediction, start

OVERLAPPED = {"batch_p2p_comm": False, "overlap_p2p_comm": True}  # as Megatron's arguments have it


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
    """Two stages of two chunks each, microbatches of different lengths; then one without room."""
    start(stages=2, chunks=2)
    config = configuration(virtual_pipeline_model_parallel_size=2, **OVERLAPPED)
    made = loop(config, layer)
    expected = made.results(made.stock, LENGTHS)
    attach(made.models, policy="random:3")
    for turn in range(3):
        compare(f"turn {turn}", expected, made.results(made.models, LENGTHS))
    own_loop_others.held_too_much_on_the_first_stage(loop(config, layer).models)


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
    """Nothing before a layer that recomputes needs a gradient; hooks change what MLPs return."""
    start(p=2)
    made = loop(configuration(), layer, share_embeddings_and_output_weights=False)
    for models in (made.stock, made.models):
        models[0].embedding.requires_grad_(False)
        models[0].decoder.layers[0].requires_grad_(False)
        models[0].decoder.layers[1].self_attention.requires_grad_(False)
        scale = models[0].decoder.final_layernorm.weight  # no parameter of a layer
        hook = functools.partial(_scaled, scale)
        for one in models[0].decoder.layers:
            one.mlp.register_forward_hook(hook)
    expected = made.results(made.stock, LENGTHS)
    names = "megatron_cz+recompute,metp+recompute,ulysses_z,megatron_ts+recompute,colossal_z"
    attach(made.models, policy="random:5", strategies=names)
    for turn in range(4):
        compare(f"turn {turn}", expected, made.results(made.models, LENGTHS))


def _scaled(scale: torch.Tensor, mlp, given, found):
    """A forward hook that learns."""
    output, bias = found
    return scale * output.tanh(), bias


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
    from megatron.core.parallel_state import get_global_memory_buffer

    start(p=2)
    made = loop(configuration(), layer, position_embedding_type="rope")
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
    made.results(made.models, [16])
    buffer, angles = get_global_memory_buffer().buffer, made.models[0].rotary_pos_emb
    assert buffer and angles._table is not None
    planned.hold()
    assert not buffer and angles._table is None, "plans would count them twice"
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
    optimizer, other = (  # each of half of the parameters
        torch.optim.AdamW(list(model.parameters())[one::2], **rate) for one in (0, 1)
    )
    planned.hold(optimizer, other)
    told = planned._policies.made[0][0].static_bytes
    planned.hold(torch.optim.AdamW(model.parameters(), **rate))
    assert told == planned._policies.made[0][0].static_bytes
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
    model.zero_grad()
    model.requires_grad_(False)
    planned.hold()  # as of a reference model: nothing of tied embeddings waits
    assert planned._policies.made[0][0].static_bytes == sum(x.nbytes for x in parameters)


def packed() -> None:
    """Megatron's packed sequences; stock layers run their documents one by one."""
    from megatron.core.packed_seq_params import PackedSeqParams

    start(p=2)
    for policy, turns, ends in (
        ("random:7", 4, [0, 10, 38, 96]),
        ("fixed:local_z", 1, [0, 10, 48, 96]),  # no document is on both ranks
    ):
        made = loop(configuration(), layer, position_embedding_type="rope")
        lengths = torch.tensor(ends, dtype=torch.int32)
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=lengths,
            cu_seqlens_kv=lengths,
            max_seqlen_q=58,
            max_seqlen_kv=58,
        )
        documents = list(itertools.pairwise(ends))
        expected = made.results(made.stock, documents)
        losses = [expected.pop(f"loss of {index}") for index in range(len(documents))]
        attach(made.models, policy=policy, head_tile=16)
        for turn in range(turns):
            got = made.results(made.models, [(0, 96)], packed_seq_params=params)
            assert abs(float(got.pop("loss of 0") - sum(losses))) < 1e-3
            compare(f"{policy}, turn {turn}", expected, got)


def main() -> None:
    name, *arguments = sys.argv[1:]
    case = globals().get(name) or getattr(own_loop_others, name)
    case(*arguments)
    torch.distributed.barrier()
