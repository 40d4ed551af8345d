"""A rank that trains through an entry point and writes what every iteration measured.

    driver RECORD (module | bert | script PATH) <Megatron flags>

RECORD.json gets a list of {iteration, loss, grad_norm} in full precision from the last rank.
"""

import json
import os
import runpy
import sys

from megatron_paradyse.train import plugin


def record_iterations(path: str) -> None:
    from megatron.training import training

    original = training.training_log
    records = []

    def training_log(*args, **kwargs):
        loss_dict, iteration, grad_norm = args[0], args[3], args[7]
        loss = loss_dict.get("lm loss")
        records.append(
            {
                "iteration": iteration,
                "loss": None if loss is None else float(loss),
                "grad_norm": None if grad_norm is None else float(grad_norm),
                "tokens": kwargs.get("total_real_tokens_in_batch"),
            }
        )
        if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            with open(path, "w") as file:
                json.dump(records, file)
        return original(*args, **kwargs)

    training.training_log = training_log


def main() -> None:
    record, entry = sys.argv[1], sys.argv[2]
    plugin.install(model="bert" if entry == "bert" else None)
    record_iterations(record)
    if entry in ("module", "bert"):
        sys.argv = ["pretrain", *sys.argv[3:]]
        from megatron_paradyse.train.gpt import pretrain

        pretrain()
    else:
        script = sys.argv[3]
        sys.argv = [script, *sys.argv[4:]]
        sys.path.insert(0, os.path.dirname(script))
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
