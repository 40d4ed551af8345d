"""A rank with one model and many plans; every plan must give the same loss and gradients.

    compare_plans <Megatron flags>

The first plan is Megatron's own forward (megatron_ts) and, without dropout, the oracle before it
is Megatron's own layer spec on the same parameters.
"""

from __future__ import annotations

import functools
import itertools

import torch

from megatron_paradyse.plan import LayerChoice, Plan
from megatron_paradyse.strategies import sizes, strategy_names
from megatron_paradyse.train import plugin
from tests.train.comparing import compare

NUM_MICROBATCHES = 2


class ChosenPolicy:
    """Runs whatever plans it is given, one per microbatch, over and over."""

    def __init__(self):
        self.plans = []
        self._turn = itertools.count()

    def plan(self, batch_size, seq_length, layer_numbers, **_):
        return self.plans[next(self._turn) % len(self.plans)]

    def choose(self, plans):
        self.plans, self._turn = plans, itertools.count()


def plans_to_compare(num_layers: int) -> dict[str, list[Plan]]:
    """Uniform plans, mixes over layers, over operations, and over microbatches."""
    names = [name for base in strategy_names() for name in (base, base + "+recompute")]
    uniform = {
        name: Plan({i: LayerChoice(name, name) for i in range(1, num_layers + 1)}) for name in names
    }
    numbers = range(1, num_layers + 1)

    def pick(index: int) -> str:
        return names[index % len(names)]

    by_layer = Plan({i: LayerChoice(pick(2 * i), pick(2 * i)) for i in numbers})
    by_operation = [
        Plan({i: LayerChoice(pick(i + shift), pick(3 * i + 7 * shift)) for i in numbers})
        for shift in range(NUM_MICROBATCHES)
    ]
    offloading = {
        1: LayerChoice("ulysses_z+offload", "metp"),  # one half
        2: LayerChoice("megatron_ts+offload", "metp+recompute"),  # a layer: attention decides
        3: LayerChoice("metp+recompute", "megatron_cz+offload"),  # a layer that stays
        4: LayerChoice("megatron_cz", "megatron_ts+offload"),
    }
    return {
        **{name: [plan] for name, plan in uniform.items()},
        "metp+offload": [Plan(dict.fromkeys(numbers, LayerChoice("metp+offload", "metp+offload")))],
        "offload beside others": [Plan({i: offloading[(i - 1) % 4 + 1] for i in numbers})],
        "mixed over layers": [by_layer],
        "mixed over layers and operations": [by_operation[1]],
        "another at every microbatch": by_operation,
    }


def recomputes_somewhere(name: str) -> bool:
    """Each strategy, and together with others."""
    return name.endswith("+recompute") or name.startswith("offload")


def gradients(args, model, batches):
    """The loss, and the gradient of every parameter, complete over the tensor-parallel group."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_paradyse.train.gpt import forward_step

    for chunk in model:
        chunk.zero_grad_buffer()
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter([dict(batch) for batch in batches]),
        model=model,
        num_microbatches=len(batches),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=False,
    )
    loss = torch.stack([part["lm loss"] for part in losses]).sum(0)
    grads = {name: p.main_grad.clone() for name, p in model[0].named_parameters()}
    return {"loss": loss[0] / loss[1], **grads}


def begin():
    """Megatron begun by the flags of the command line: its arguments."""
    plugin.install()
    from megatron.training import training
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args()
    training.initialize_megatron()
    args.check_for_nan_in_loss_and_grad = False  # its check wants to run inside train_step
    return args


def build(args, *hooks, spec=None):
    """A model as trainings make it, with these hooks; spec: of its layers, None: the flags' own."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.enums import ModelType
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.utils import get_model_config
    from megatron.training import training
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )

    container = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    container.model.pre_wrap_hooks += hooks
    if spec is not None:
        container.model.transformer_layer_spec = spec
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model, _, _ = training.setup_model_and_optimizer(
        ModelType.encoder_or_decoder, cfg_container=container, pg_collection=groups
    )
    get_model_config(model[0]).finalize_model_grads_func = finalize_model_grads
    return model


def main() -> None:
    args = begin()
    from megatron.training import initialize
    from megatron.training.models.gpt import default_layer_spec

    from megatron_paradyse.hook import attach_hooks
    from megatron_paradyse.train.loop_counts import loop_counts
    from megatron_paradyse.train.model_layers import count_layers

    policy = ChosenPolicy()
    hook = functools.partial(attach_hooks, policy_of=lambda _: policy, counts=loop_counts)
    model = build(args, hook)
    generator = torch.Generator().manual_seed(1)
    batches = []
    for length in (24, 40):
        rows = args.micro_batch_size
        tokens = torch.randint(args.padded_vocab_size, (rows, length + 1), generator=generator)
        lengths = torch.tensor([length - 3 * i for i in range(rows)])
        batches.append({"tokens": tokens, "lengths": lengths})
    run = functools.partial(gradients, args, batches=batches)

    def seeded(model):
        initialize._set_random_seed(args.seed)
        return run(model=model)

    results = {}
    if not (args.attention_dropout or args.hidden_dropout):
        stock = build(args, spec=default_layer_spec)
        for mine, theirs in zip(model[0].parameters(), stock[0].parameters(), strict=True):
            theirs.data.copy_(mine.data)
        results["stock Megatron"] = seeded(stock)
    compared = plans_to_compare(count_layers(args))
    for name, plans in compared.items():
        policy.choose(plans)
        results[name] = seeded(model)
    sizes.TILE_ROWS = 4
    in_tiles = args.tensor_model_parallel_size == 2 and not args.attention_dropout
    for name in filter(recomputes_somewhere, compared if in_tiles else ()):
        policy.choose(compared[name])
        results[f"{name}, in tiles"] = seeded(model)
    expected = next(iter(results.values()))
    for name, found in results.items():
        compare(name, expected, found)
