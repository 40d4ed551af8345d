"""Megatron's flags for a profile: the user's, less what a profile decides itself."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from megatron_paradyse.errors import UserError
from megatron_paradyse.flag_file import read_flags
from megatron_paradyse.settings import PACKED, load_yaml_settings
from megatron_paradyse.train.data_files import DATA_FLAGS

# Flags that have no meaning in a profile, and how many values follow: None, as many as there are.
DROPPED = {
    "--paradyse": 0,
    "--paradyse-policy": 1,
    "--paradyse-mask-token": 1,
    "--paradyse-cost-model": 1,
    "--paradyse-memory-budget": 1,
    "--paradyse-smoothing": 1,
    "--paradyse-accept-costs": 0,
    "--paradyse-granularity": 1,
    "--paradyse-mixing-gain": 1,
    "--paradyse-memory-margin": 1,
    "--paradyse-host-memory": 1,
    "--paradyse-over-budget": 1,
    "--paradyse-verify-plans": 0,
    "--paradyse-balance": 0,
    "--paradyse-no-correction": 0,
    "--paradyse-no-profile": 0,
    "--paradyse-offload": 0,
    "--paradyse-no-offload": 0,
    "--paradyse-config": 1,
    "--paradyse-trace": 1,
    "--paradyse-log": 1,
    "--paradyse-strategies": 1,
    "--paradyse-pack-tokens": 1,
    "--paradyse-spread": 1,
    "--pipeline-model-parallel-size": 1,
    "--num-layers-per-virtual-pipeline-stage": 1,
    "--num-virtual-stages-per-pipeline-rank": 1,
    "--decoder-first-pipeline-num-layers": 1,
    "--decoder-last-pipeline-num-layers": 1,
    "--pipeline-model-parallel-layout": 1,
    "--overlap-p2p-communication-warmup-flush": 0,
    "--overlap-param-gather-with-optimizer-step": 0,  # of interleaved stages
    "--num-distributed-optimizer-instances": 1,  # of replicas, of which a profile has one
    "--global-batch-size": 1,
    "--eval-global-batch-size": 1,
    "--eval-micro-batch-size": 1,
    "--rampup-batch-size": None,
    "--step-batch-size-schedule": 1,
    "--train-iters": 1,
    "--train-samples": 1,
    "--phase-transition-iterations": 1,
    "--lr-warmup-iters": 1,
    "--lr-warmup-samples": 1,
    "--lr-warmup-fraction": 1,
    "--lr-warmup-init": 1,
    "--lr-decay-style": 1,
    "--lr-decay-iters": 1,
    "--lr-decay-samples": 1,
    "--lr-wsd-decay-style": 1,
    "--lr-wsd-decay-iters": 1,
    "--lr-wsd-decay-samples": 1,
    "--save": 1,
    "--load": 1,
    "--init-model-with-meta-device": 0,  # which takes a checkpoint, as this makes one:
    "--moe-use-upcycling": 0,
    "--save-interval": 1,
    "--exit-interval": 1,
    "--tensorboard-dir": 1,
    "--wandb-project": 1,
}
# What Megatron asks for and a profile does not depend on; the user's own come after and win.
ASSUMED = {
    "--micro-batch-size": "1",
    "--lr": "1e-4",
    "--eval-iters": "0",
    "--eval-interval": "1000",
    "--num-workers": "0",
}


def megatron_flags(given: Sequence[str], *, model_path: str | None, ranks: int) -> list[str]:
    """The flags that the ranks parse: those of the model file, then the given ones.

    What a profile depends on of a --paradyse-config among them stands as flags in its place.
    """
    flags = [*(read_flags(model_path) if model_path else []), *given]
    flags = [*_of_settings_file(flags), *_without(DROPPED, flags)]
    names = {flag.partition("=")[0] for flag in flags}
    if "--vocab-size" in names:  # all that data tell; those of a run file need not be here
        flags = _without(dict.fromkeys(DATA_FLAGS), flags)
    assumed = [text for pair in ASSUMED.items() if pair[0] not in names for text in pair]
    if "--tensor-model-parallel-size" not in names:
        assumed += ["--tensor-model-parallel-size", str(ranks)]
    if ranks > 1 and "--sequence-parallel" not in names:
        assumed.append("--sequence-parallel")
    if "--vocab-size" in names and "--tokenizer-type" not in names:
        assumed += ["--tokenizer-type", "NullTokenizer"]
    elif not names & {*DATA_FLAGS, "--tokenizer-type"}:
        raise UserError(
            "the size of the vocabulary is missing: give --vocab-size, or the data or the "
            "--tokenizer-type of the training"
        )
    last = ["--train-iters", "1000", "--paradyse", "--paradyse-policy", "fixed:megatron_ts"]
    if last_value("--paradyse-sequences", flags) == PACKED:  # rows are measured anyway
        last += ["--paradyse-sequences", "documents"]
    return [*assumed, *flags, *last]


def _of_settings_file(flags: Sequence[str]) -> list[str]:
    """Its loss head and its sequences."""
    path = last_value("--paradyse-config", flags)
    if path is None:
        return []
    settings = load_yaml_settings(path, "--paradyse-config")
    wanted = {name: settings[name] for name in ("head_tile", "sequences") if name in settings}
    return [
        text
        for name, value in wanted.items()
        for text in (f"--paradyse-{name.replace('_', '-')}", str(value))
    ]


def last_value(name: str, flags: Sequence[str]) -> str | None:
    """What the last of these flags says, which wins in Megatron too."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(name, dest="value")
    return parser.parse_known_args(flags)[0].value


def _without(dropped: Mapping[str, int | None], flags: list[str]) -> list[str]:
    """dropped: as DROPPED."""
    kept: list[str] = []
    values_to_drop: float = 0
    for flag in flags:
        name, equals, _ = flag.partition("=")
        if name.startswith("--"):
            values_to_drop = 0
        elif values_to_drop > 0:
            values_to_drop -= 1
            continue
        if name in dropped:
            count = dropped[name]
            values_to_drop = 0 if equals else float("inf") if count is None else count
        else:
            kept.append(flag)
    return kept
