"""Started by torchrun on one rank: Megatron on the CPU platform against plain_gpt, in float64."""

import torch

from megatron_paradyse.train import plugin
from tests.train.comparing import relative_error
from tests.train.plain_gpt import plain_losses

TOLERANCE = 1e-5  # float32 against float64 over two layers; measured below 3e-6


def model_of_flags():
    """Megatron's arguments of the command line, a model of them, and its weights in float64."""
    plugin.install()
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import training
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.models.gpt import GPTModelBuilder

    from megatron_paradyse.train.batch import device_of_rank

    args = parse_and_validate_args()
    training.initialize_megatron()
    config = gpt_config_from_args(args)
    config.finalize()
    model = GPTModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    model.to(device_of_rank())
    weights = {
        name: value.detach().double().requires_grad_() for name, value in model.named_parameters()
    }
    return args, model, weights


def main() -> None:
    args, model, weights = model_of_flags()
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    generator = torch.Generator().manual_seed(0)
    text = torch.randint(args.vocab_size, (2, args.seq_length + 1), generator=generator)
    text = text.to(next(model.parameters()).device)
    tokens, labels = text[:, :-1], text[:, 1:]
    positions = torch.arange(args.seq_length, device=text.device).expand(2, -1)
    losses = model(tokens, positions, None, labels=labels)
    losses.mean().backward()
    logged = MTPLossLoggingHelper.tracker.get("loss_values", torch.empty(0, device=text.device))

    num_predictions = args.mtp_num_layers or 0
    plain, *predicted = plain_losses(
        weights,
        tokens,
        labels,
        num_layers=args.num_layers,
        num_heads=args.num_attention_heads,
        num_predictions=num_predictions,
    )
    means = [of_layer.mean() for of_layer in predicted]
    share = args.mtp_loss_scaling_factor / max(num_predictions, 1)
    (plain.mean() + share * sum(means)).backward()
    errors = {"loss": relative_error(losses, plain)}
    for number, (mine, mean) in enumerate(zip(logged, means, strict=True), 1):
        errors[f"loss of prediction {number}"] = relative_error(mine, mean)
    for name, parameter in model.named_parameters():
        errors[name] = relative_error(parameter.grad, weights[name].grad)
    worst = max(errors, key=errors.get)
    print(f"worst of {len(errors)}: {worst} {errors[worst]:.2e}")
    assert errors[worst] < TOLERANCE, (worst, errors[worst])


if __name__ == "__main__":
    main()
