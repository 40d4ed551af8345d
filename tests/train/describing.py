"""A rank whose model, built by flags, is described by the flags and by the model alone: alike.

describing <Megatron flags>
"""

from __future__ import annotations

import dataclasses

from tests.train.compare_with_plain import model_of_flags


def main() -> None:
    args, model, _ = model_of_flags()
    from megatron_paradyse.train.describe import describe
    from megatron_paradyse.train.model_arguments import arguments_of
    from megatron_paradyse.train.model_layers import count_layers

    own = arguments_of(model, args.paradyse_settings, num_microbatches=1)
    by_flags, by_model = (
        dataclasses.asdict(describe(one, count_layers(one))) for one in (args, own)
    )
    assert by_flags == by_model, {
        name: (value, by_model[name]) for name, value in by_flags.items() if by_model[name] != value
    }
    print(f"compared {by_model['model']} {by_model['halves']}", flush=True)
