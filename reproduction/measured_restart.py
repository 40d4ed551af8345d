"""One rank of reproduction/measured.py case_study: a start of the training, part by part."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from megatron_paradyse.profiler.flags import megatron_flags

DOCUMENTS, TOKENS = 200, 500


def main() -> None:
    started = float(os.environ["REPRODUCTION_STARTED"])
    task = json.loads(os.environ["REPRODUCTION"])
    data = Path(task["output"]).with_name("corpus")
    seconds: dict[str, float] = {}

    def note(part: str) -> None:
        nonlocal started
        now = time.time()
        seconds[part] = now - started
        started = now

    from megatron_paradyse.train import plugin

    plugin.install()
    import torch
    from megatron.training import get_args, training
    from megatron.training.arguments import parse_and_validate_args

    from megatron_paradyse.train.datasets import document_provider

    note("imports")
    sys.argv[1:] = megatron_flags(
        sys.argv[1:], model_path=None, ranks=int(os.environ["WORLD_SIZE"])
    )
    sys.argv += ["--data-path", str(data), "--split", "1,0,0"]
    if os.environ["RANK"] == "0":
        _write(data)
        started = time.time()  # the data of a restart are there already
    else:
        _wait(data)
        started = time.time()
    parse_and_validate_args()
    training.initialize_megatron()
    note("processes")
    optimizer = training.get_megatron_optimizer

    def timed(*arguments, **options):
        note("model")
        return optimizer(*arguments, **options)

    training.get_megatron_optimizer = timed
    from megatron_paradyse.profiler.model import build_model

    build_model(get_args().num_layers)
    note("optimizer")
    get_args().skip_train, get_args().eval_iters = False, 0
    next(document_provider()((10, 0, 0))[0])
    note("data")
    if torch.distributed.get_rank() == 0:
        Path(task["output"]).write_text(json.dumps(seconds))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _write(data: Path) -> None:
    from megatron_paradyse.data.writer import DatasetWriter

    rng = np.random.default_rng(0)
    with DatasetWriter(str(data), 257) as writer:
        for _ in range(DOCUMENTS):
            writer.add_tokens(rng.integers(256, size=TOKENS))
            writer.end_document()
        writer.commit(
            tokenizer="none",
            tokenizer_parameters={},
            vocab_size=257,
            eod=None,
            append_eod=False,
            num_empty_documents=0,
            source="random tokens",
            source_parameters={},
        )


def _wait(data: Path) -> None:
    deadline = time.monotonic() + 60
    while not data.with_name(data.name + ".json").exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{data} is not being written")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
