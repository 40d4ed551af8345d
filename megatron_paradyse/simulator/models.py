"""Models by name, as Megatron flags: those of the ParaDySe paper's evaluation.

Hidden sizes, heads, norms and positions as the paper gives them, or as they follow from heads and
layers; ffn sizes and vocabularies are those of the published models. Layers are the number that
the paper trained on one node of 8 GPUs: --num-layers changes that. Learned positions have 8192
rows, the last of which stands for all beyond it, as Megatron's --max-position-embeddings here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_paradyse.errors import UserError
from megatron_paradyse.flag_file import read_flags
from megatron_paradyse.profiler.flags import last_value, megatron_flags

GROUP_FLAGS = ["--fake-process-group"]  # of p ranks, of which this is one; it moves nothing
NO_DROPOUT = {"--attention-dropout": 0, "--hidden-dropout": 0}


MODELS: dict[str, dict[str, Any]] = {
    "bert": {
        "--paradyse-model": "bert",
        "--num-layers": 24,
        "--hidden-size": 1024,
        "--num-attention-heads": 16,
        "--vocab-size": 30522,
        "--max-position-embeddings": 8192,
    },
    "llama": {
        "--num-layers": 8,
        "--hidden-size": 8192,
        "--num-attention-heads": 64,
        "--ffn-hidden-size": 22016,
        "--vocab-size": 32000,
        "--max-position-embeddings": 8192,
        "--swiglu": True,
        "--normalization": "RMSNorm",
        "--position-embedding-type": "rope",
        "--disable-bias-linear": True,
        "--untie-embeddings-and-output-weights": True,
    },
    "gpt": {
        "--num-layers": 8,
        "--hidden-size": 12288,
        "--num-attention-heads": 96,
        "--vocab-size": 50257,
        "--max-position-embeddings": 8192,
    },
}
MASKS = {"causal": "gpt", "bidirectional": "bert"}  # the model that has it
DEFAULTS = {"--seq-length": "2048", "--max-position-embeddings": "8192"}
DTYPES = {"bfloat16": ["--bf16"], "float16": ["--fp16"], "float32": []}


def model_flags(
    model: str | None,
    given: Sequence[str],
    *,
    ranks: int,
    dtype: str,
    mask: str | None = None,
    alone: bool = True,
) -> list[str]:
    """Megatron's flags of a named model, a YAML file, or neither.

    mask: "causal" or "bidirectional" whatever the model's is. alone: one process in the place of a
    rank, whose parameters need no values. The given flags come last and win.
    """
    flags: list[str] = []
    if model in MODELS:
        for name, value in {**MODELS[model], **NO_DROPOUT}.items():
            flags += [name] if value is True else [name, str(value)]
    elif model is not None:
        if not model.endswith((".yaml", ".yml")):
            raise UserError(
                f"no model named {model!r}: use one of {', '.join(MODELS)}, or a YAML file of flags"
            )
        flags += read_flags(model)
    if not {"--bf16", "--fp16"} & {*flags, *given}:
        flags += DTYPES[dtype]
    flags += [*(["--paradyse-model", MASKS[mask]] if mask else []), *given]
    names = {flag.partition("=")[0] for flag in flags}
    for name, value in DEFAULTS.items():
        if name not in names:
            flags += [name, value]
    if alone:
        check_group(flags, ranks)
        flags += ["--no-initialization", *GROUP_FLAGS]
    return megatron_flags(flags, model_path=None, ranks=ranks)


def check_group(flags: Sequence[str], p: int) -> None:
    """UserError where flags name a tensor-parallel group of another size than p."""
    size = last_value("--tensor-model-parallel-size", flags)
    if size is not None and size != str(p):
        raise UserError(
            f"--tensor-model-parallel-size {size} with a group of {p} ranks: "
            f"give --tensor-model-parallel-size {p}, or ask for {size} ranks"
        )
