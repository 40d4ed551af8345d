"""A rank of a BERT whose every plan must give the losses and gradients of a plain one, in float64.

    compare_bert <Megatron flags>

On one rank also those of megatron.core's BertModel, which must take the same state dict.
"""

import torch
from megatron.core import mpu

from megatron_paradyse.train import plugin
from tests.train.compare_plans import ChosenPolicy, plans_to_compare
from tests.train.comparing import relative_error
from tests.train.plain_gpt import plain_masked_losses

TOLERANCE = 1e-5  # float32 against float64
LENGTHS = (40, 33)  # the second sequence is padded
PREDICTED = 0.4


def main() -> None:
    plugin.install(model="bert")
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import training
    from megatron.training.arguments import parse_and_validate_args

    from megatron_paradyse.bert import BertModelBuilder
    from megatron_paradyse.hook import attach_hooks
    from megatron_paradyse.model_edges import attach_edges
    from megatron_paradyse.train.batch import device_of_rank
    from megatron_paradyse.train.loop_counts import loop_counts
    from megatron_paradyse.train.model_kind import model_config

    args = parse_and_validate_args()
    training.initialize_megatron()
    config = model_config(args)
    config.finalize()
    model = BertModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    device = device_of_rank()
    model.to(device)
    for parameter in model.parameters():  # no bias or norm may be where it changes nothing
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=_generator(1)).to(device)
        torch.distributed.broadcast(parameter.data, 0) if not _is_shard(parameter) else None
    policy = ChosenPolicy()
    attach_hooks([model], policy_of=lambda _: policy, counts=loop_counts)
    attach_edges([model], head_tile=args.paradyse_settings.head_tile)

    s = max(LENGTHS)
    tokens = torch.randint(args.vocab_size, (2, s), generator=_generator(2))
    labels = torch.randint(args.vocab_size, (2, s), generator=_generator(3))
    lengths = torch.tensor(LENGTHS)
    valid = torch.arange(s) < lengths[:, None]
    mask = valid & (torch.rand(2, s, generator=_generator(4)) < PREDICTED)
    positions = torch.arange(s).expand(2, -1)
    tokens, labels, lengths, valid, mask, positions = (
        x.to(device) for x in (tokens, labels, lengths, valid, mask, positions)
    )

    def run(module, *inputs):
        module.zero_grad()
        losses = module(*inputs)
        losses = losses[0] if isinstance(losses, tuple) else losses
        (losses * mask).sum().div(mask.sum()).backward()
        return losses.detach()

    whole = {name: _whole(p.detach(), p).double() for name, p in model.named_parameters()}
    whole = {name: value.requires_grad_() for name, value in whole.items()}
    plain = plain_masked_losses(
        whole,
        tokens,
        labels,
        lengths,
        num_layers=args.num_layers,
        num_heads=args.num_attention_heads,
    )
    (plain * mask).sum().div(mask.sum()).backward()

    def compare(name, module, losses):
        errors = {"loss": relative_error((losses * mask), plain.detach() * mask)}
        for parameter_name, parameter in module.named_parameters():
            grad = parameter.grad
            if getattr(parameter, "sequence_parallel", False) and config.sequence_parallel:
                torch.distributed.all_reduce(grad)  # as Megatron does after the backward
            errors[parameter_name] = relative_error(
                _whole(grad, parameter), whole[parameter_name].grad
            )
        worst = max(errors, key=errors.__getitem__)
        if torch.distributed.get_rank() == 0:
            print(f"compared {name}: {errors[worst]:.1e} {worst}", flush=True)
        assert errors[worst] <= TOLERANCE, (name, worst, errors[worst])

    for name, plans in plans_to_compare(args.num_layers).items():
        policy.choose(plans)
        compare(name, model, run(model, tokens, positions, valid, labels, mask.float()))
    if torch.distributed.get_world_size() == 1:
        stock = _stock(config, device)
        stock.load_state_dict(model.state_dict(), strict=True)
        losses = run(stock, tokens, valid, None, labels)
        compare("stock Megatron", stock, losses)


def _stock(config, device):
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    model = BertModel(
        config=config.transformer,
        num_tokentypes=0,
        transformer_layer_spec=bert_layer_local_spec,
        vocab_size=config.vocab_size,
        max_sequence_length=config.seq_length,
        share_embeddings_and_output_weights=True,
        add_binary_head=False,
    )
    return model.to(device)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _is_shard(parameter) -> bool:
    return getattr(parameter, "tensor_model_parallel", False)


def _whole(tensor, parameter):
    """The tensor of all ranks, where the parameter is a rank's shard."""
    if not _is_shard(parameter):
        return tensor
    group = mpu.get_tensor_model_parallel_group()
    shards = [torch.empty_like(tensor) for _ in range(group.size())]
    torch.distributed.all_gather(shards, tensor.contiguous(), group=group)
    return torch.cat(shards, parameter.partition_dim)
