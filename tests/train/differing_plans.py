"""A rank of a group whose ranks plan alike, and then not."""

import sys

from megatron_paradyse.train import plugin


def main() -> None:
    sys.argv = ["differing_plans", *sys.argv[1:]]
    plugin.install()
    from megatron.core import mpu
    from megatron.training import training
    from megatron.training.arguments import parse_and_validate_args

    from megatron_paradyse.errors import UserError
    from megatron_paradyse.hook import Planned, _verify
    from megatron_paradyse.plan import uniform_plan
    from megatron_paradyse.train.batch import device_of_rank

    parse_and_validate_args()
    training.initialize_megatron()
    group = mpu.get_tensor_model_parallel_group()
    for names in (("metp", "metp"), ("metp", "ulysses_z")):
        plan = uniform_plan([1, 2], names[group.rank()])
        try:
            _verify(Planned(0, 0, 1, 64, plan, 0.0), group, device_of_rank())
            print("alike: no error", flush=True)
        except UserError as error:
            print(error, flush=True)
