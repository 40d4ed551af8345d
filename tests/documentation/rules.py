"""How documented commands are run: what is rewritten, and what is not run and why."""

from __future__ import annotations

import re

FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 128 "
    "--max-position-embeddings 128 --tensor-model-parallel-size 4 --sequence-parallel "
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 2 --lr 1e-3 --data-path data/code "
    "--eval-iters 0 --eval-interval 10"
)
# Regular expressions and what takes their place, in this order: words that stand for a reader's
# own, options in brackets, and sizes that would take long.
REWRITTEN = (
    (r"<(the same |your )?(Megatron )?flags>", FLAGS),
    (r"^torchrun \.\.\. --paradyse", "torchrun ... -m megatron_paradyse.pretrain_gpt --paradyse"),
    (r"(-m megatron_paradyse\.pretrain_gpt) --paradyse", rf"\1 {FLAGS} --paradyse"),
    (r"^torchrun \.\.\.", "torchrun --nproc-per-node 4"),
    (r"\bdata \.\.\.", "data --help"),
    (r"--lengths \.\.\.", "--lengths 1K"),
    (r"\[(--[^\]]+)\]", r"\1"),
    (r"hybrid\|paper", "hybrid"),
    (r"\bRUN\.yaml", "configs/train-demo.yaml"),
    (r"\baccuracy FILE", "accuracy costs.json"),
    (r"\bCOMMAND\b", "plan"),
    (r"(megatron-paradyse simulate .*)--lengths \S+", r"\1--lengths 1K,2K,4K,8K"),
    (r"^(megatron-paradyse simulate (?!.*--lengths))", r"\1--lengths 1K,2K,4K,8K "),
    (r"^(megatron-paradyse simulate )", r"\1--strategies megatron_ts,ulysses_z "),
)
# Whole commands (regular expressions) that are not run here, and why.
NOT_RUN = (
    (r"pip (install|check)\b.*", "needs the network; scripts/setup.sh has run before any test"),
    (r"git clone .*", "needs the network; doctor prints the same lines"),
    (r"git apply .*", "tests/train/test_entering.py applies, runs and reverts the patch"),
    (r"megatron-paradyse doctor( --json)?", "tests/test_doctor.py runs it, and what it finds"),
    (r"eval .*|_MEGATRON_PARADYSE_COMPLETE=.*", "tests/test_commands.py completes commands"),
    (r"pytest -m gpu", "needs a GPU"),
    (
        r"megatron-paradyse max-length .* --measure .*",
        "runs sequences that fill 76 GiB; tests/preview/test_measured.py fills 12 MiB",
    ),
    (
        r"([A-Z]+=\S+ )+(bash|sbatch) scripts/launch/.*",
        "needs several machines; tests/test_launch_scripts.py runs the scripts with stand-ins",
    ),
    (r"torchrun", "the program's name, no command"),
    (
        r"python -m megatron_paradyse\.launch path/to/pretrain_gpt\.py",
        "tests/train/test_entering.py launches a checkout's script; alone it has no flags",
    ),
)
# Outputs that are not compared, and why.
OTHER_OUTPUT = (
    (r".*stdlib.*", "depends on the version of Python, which the page names"),
    (
        r".*(--tokenizer (GPT2BPE|HuggingFace)Tokenizer|--source chat) .*",
        "depends on the tokenizer's training",
    ),
)


def rewritten(text: str) -> str:
    for pattern, replacement in REWRITTEN:
        text = re.sub(pattern, replacement, text)
    return text


def reason_not_to_run(text: str) -> str | None:
    return next((why for pattern, why in NOT_RUN if re.fullmatch(pattern, text)), None)


def has_known_output(text: str) -> bool:
    return not any(re.fullmatch(pattern, text) for pattern, _ in OTHER_OUTPUT)
