"""A rank of the tests of agreement, without a training: agreeing DIFFERENCE RANK FOLDER."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from megatron_paradyse.settings import Settings
from megatron_paradyse.train import agreement, uncaught
from megatron_paradyse.train.data_files import DATA_FLAGS


def main() -> None:
    uncaught.SECONDS_TO_BE_ENDED = 2  # no torchrun ends the others here
    difference, odd, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    rank = int(os.environ["RANK"])
    args = argparse.Namespace(lr=0.1, rank=rank, tensorboard_dir=f"here-{rank}")
    vars(args).update({flag[2:].replace("-", "_"): None for flag in DATA_FLAGS})
    settings = {"policy": "plan:" + str(folder / f"plan-{rank}"), "trace": f"trace-{rank}"}
    if rank == odd and difference == "flag":
        args.lr = 0.2
    if rank == odd and difference == "setting":
        settings["order"] = "bucketed"
    if rank == odd and difference == "code":
        agreement.code_digest = lambda: "another"
    if rank == odd and difference == "late":
        return
    args.paradyse_settings = Settings(**settings)
    agreement.agree(args, seconds=1.5 if difference == "late" else 30)
    print(f"rank {rank} agrees", flush=True)
