"""A rank whose model, built by flags, is described by the flags and by the model alone: alike.

describing <Megatron flags>
"""

from __future__ import annotations

import dataclasses

from megatron_paradyse.train import plugin


def main() -> None:
    plugin.install()
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import training
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.models.gpt import GPTModelBuilder

    from megatron_paradyse.train.describe import describe
    from megatron_paradyse.train.model_arguments import arguments_of
    from megatron_paradyse.train.model_layers import count_layers

    args = parse_and_validate_args()
    training.initialize_megatron()
    config = gpt_config_from_args(args)
    config.finalize()
    model = GPTModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    own = arguments_of(model, args.paradyse_settings, num_microbatches=1)
    by_flags, by_model = (
        dataclasses.asdict(describe(one, count_layers(one))) for one in (args, own)
    )
    assert by_flags == by_model, {
        name: (value, by_model[name]) for name, value in by_flags.items() if by_model[name] != value
    }
    print(f"compared {by_model['model']} {by_model['halves']}", flush=True)
