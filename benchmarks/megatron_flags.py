"""Settings of Megatron's flags: a training with switching against stock Megatron's own.

Each setting is trained twice for three iterations on 2 or 4 CPU ranks, in float32 without dropout:
by stock Megatron, and with a random plan for every layer, operation and microbatch. It is equal
where every loss is within 1e-4 and every gradient norm within 1e-3 of stock Megatron's; refused
where one line says why it does not run; else it differs or has failed. With --combinations, so many
random combinations of two to five of these settings instead, on 2 or 4 ranks.

    .venv/bin/python benchmarks/megatron_flags.py --json
    .venv/bin/python benchmarks/megatron_flags.py --combinations 100 --json
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import count, finish, options
from tests.train.harness import LLAMA, Run, attempt

ITERATIONS = 3
LOSS, GRAD_NORM = 1e-4, 1e-3  # plans add in other orders, and Adam divides by small numbers
TIME_LIMIT_SECONDS = 60
SEED = 1  # of plans, and of combinations
OURS = ["--paradyse", "--paradyse-sequences", "fixed", "--paradyse-policy", f"random:{SEED}"]
COMMON = ["--mock-data", "--sequence-parallel", "--train-iters", str(ITERATIONS)]

ROPE = "--position-embedding-type rope"
YARN = "--position-embedding-type yarn --rotary-scaling-factor 8 --no-rope-fusion "
YARN += "--yarn-original-max-position-embeddings 16"
EXPERTS = "--num-experts 4 --disable-bias-linear"
MOE = f"{EXPERTS} --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
# Over ranks a token whose two best experts tie makes losses jump at a larger learning rate.
OVER_2 = "--expert-model-parallel-size 2 --lr 1e-3 --expert-tensor-parallel-size"
OVER_4 = "--expert-model-parallel-size 4 --lr 1e-3 --expert-tensor-parallel-size 1"
PP2 = "--pipeline-model-parallel-size 2"
VP2 = f"{PP2} --num-layers-per-virtual-pipeline-stage 1"
PER_SAVE = "--save SAVE --save-interval 2"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
FULL = "--recompute-granularity full --recompute-num-layers 1 --recompute-method"
UNFUSED = "--no-bias-gelu-fusion"
TWO_RANKS = {
    "no other flag": "",
    "GPT without biases": "--disable-bias-linear",
    "biases of q, k, v alone": "--add-qkv-bias --disable-bias-linear",
    "LLaMA": " ".join(LLAMA),
    "LLaMA, query and key norms": " ".join([*LLAMA, "--qk-layernorm"]),
    "L2 norms of query and key": "--qk-l2-norm",
    "one key head": "--group-query-attention --num-query-groups 1",
    "RMSNorm": "--normalization RMSNorm",
    "epsilon of norms": "--norm-epsilon 1e-3",
    "unfused": f"{UNFUSED} --no-bias-dropout-fusion --no-masked-softmax-fusion",
    "squared ReLU": f"--squared-relu {UNFUSED}",
    "quick GEGLU": f"--quick-geglu {UNFUSED}",
    "OpenAI's GELU": f"--openai-gelu {UNFUSED}",
    "clamped SwiGLU": "--swiglu --activation-func-clamp-value 7.0",
    "head dim": "--kv-channels 16",
    "ffn": "--ffn-hidden-size 96",
    "RoPE, half": f"{ROPE} --rotary-percent 0.5",
    "RoPE, interleaved": f"{ROPE} --rotary-interleaved --no-rope-fusion",
    "RoPE, scaled": f"{ROPE} --use-rope-scaling",
    "RoPE, base": f"{ROPE} --rotary-base 50000",
    "RoPE, interpolated": f"{ROPE} --rotary-seq-len-interpolation-factor 2",
    "RoPE, not in every layer": f"{ROPE} --no-rope-freq 2",
    "YaRN": YARN,
    "YaRN, scaled otherwise": f"{YARN} --mscale 0.7 --mscale-all-dim 0.2 --yarn-beta-fast 8",
    "positions of three kinds": "--position-embedding-type mrope --mrope-section 1 1 2",
    "no positions": "--position-embedding-type none",
    "positions restart": "--reset-position-ids",
    "losses masked": "--eod-mask-loss",
    "window": "--window-size 8,0",
    "window, every other layer": "--window-size 8,0 --window-attn-skip-freq 2",
    "window, by a list": "--window-size 8,0 --window-attn-skip-freq [1,0,1,0]",
    "softmax in float32": "--attention-softmax-in-fp32",
    "softmax off by one": "--softmax-type off-by-one",
    "learnable softmax": "--softmax-type learnable",
    "softmax, windows, YaRN, experts": f"{YARN} {MOE} {UNFUSED} --softmax-type learnable "
    "--group-query-attention --num-query-groups 4 --window-size 8,0 --window-attn-skip-freq 2 "
    "--quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0",
    "gated attention": "--attention-output-gate",
    "multi-token prediction": f"{ROPE} --mtp-num-layers 1",
    "multi-token prediction, of a LLaMA": f"{' '.join(LLAMA)} --mtp-num-layers 2",
    "multi-token prediction, one layer twice": f"{ROPE} --mtp-num-layers 2 "
    "--mtp-use-repeated-layer",
    "multi-token prediction, detached": f"{ROPE} --mtp-num-layers 1 --mtp-detach-heads",
    "multi-token prediction, all layers again": f"{ROPE} --mtp-num-layers 1 {FULL} uniform",
    "multi-token prediction, some layers again": f"{ROPE} --mtp-num-layers 1 {FULL} block",
    "multi-token prediction, experts": f"{ROPE} {MOE} --mtp-num-layers 1",
    "multi-token prediction, windows": f"{ROPE} --mtp-num-layers 2 --window-size 8,0 "
    "--window-attn-skip-freq 2",
    "multi-token prediction, saved": f"{ROPE} --mtp-num-layers 1 {PER_SAVE}",
    "MuP": "--use-mup --mup-base-hidden-size 16 --mup-embedding-mult 2",
    "hybrid pattern": "--hybrid-layer-pattern *-*-",
    "untied, own learning rate": "--untie-embeddings-and-output-weights --decoupled-lr 1e-3",
    "fused cross entropy": "--cross-entropy-loss-fusion --cross-entropy-fusion-impl native",
    "padded vocabulary": "--make-vocab-size-divisible-by 128",
    "loss per token": "--calculate-per-token-loss",
    "SGD": "--optimizer sgd",
    "no clipping": "--clip-grad 0",
    "weight decay that grows": "--start-weight-decay 0.1 --end-weight-decay 0.2 "
    "--weight-decay-incr-style linear",
    "cosine": "--lr-decay-style cosine --lr-warmup-iters 1",
    "batch that grows": "--step-batch-size-schedule 0:4,512:8",
    "one sequence": "--micro-batch-size 1",
    "one microbatch": "--global-batch-size 2",
    "odd length": "--seq-length 62",
    "core attention again": f"{SELECTIVE} core_attn",
    "MLPs of experts again": f"{MOE} {SELECTIVE} moe",
    "all layers again": f"{FULL} uniform",
    "some layers again": f"{FULL} block",
    "experts": MOE,
    "experts, all-gather": f"{EXPERTS} --moe-router-topk 2 --moe-token-dispatcher-type allgather",
    "experts in some layers": f"{MOE} --moe-layer-freq [0,1,1,1]",
    "experts, auxiliary loss": f"{MOE} --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 0.01",
    "experts, z loss": f"{MOE} --moe-z-loss-coeff 1e-3",
    "experts, Sinkhorn": f"{MOE} --moe-router-load-balancing-type sinkhorn --moe-router-topk 1",
    "experts, shared": f"{MOE} --moe-shared-expert-intermediate-size 64",
    "experts, biased": f"{MOE} --moe-router-enable-expert-bias --moe-router-score-function sigmoid",
    "experts, padded to capacity": f"{MOE} --moe-expert-capacity-factor 2.0 "
    "--moe-pad-expert-input-to-capacity",
    "experts over ranks": f"{MOE} {OVER_2} 1",
    "experts over ranks, shared ones beside": f"{MOE} {OVER_2} 1 --moe-shared-expert-overlap "
    "--moe-shared-expert-intermediate-size 64",
    "every timer": "--timing-log-level 2 --timing-log-option all --log-throughput",
    "norms logged": "--log-params-norm --log-num-zeros-in-grad",
    "garbage by hand": "--manual-gc --manual-gc-interval 2 --empty-unused-memory-level 2",
    "deterministic": "--deterministic-mode",
    "run twice": "--rerun-mode validate_results",
    "evaluations": "--eval-iters 1 --eval-interval 2",
    "profiler": "--profile --use-pytorch-profiler --profile-step-start 1 --profile-step-end 2 "
    "--tensorboard-dir SAVE",
    "saved": PER_SAVE,
    "saved in the background": f"{PER_SAVE} --async-save",
    "saved in torch's format": f"{PER_SAVE} --ckpt-format torch",
    "FP8": "--fp8-format hybrid",
}
FOUR_RANKS = {
    "4 tensor-parallel ranks": "--tensor-model-parallel-size 4",
    "replicas": "",
    "distributed optimizer": "--use-distributed-optimizer",
    "distributed optimizer, overlapped": "--use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather",
    "pipeline": PP2,
    "pipeline, untied": f"{PP2} --untie-embeddings-and-output-weights",
    "pipeline, multi-token prediction": f"{PP2} {ROPE} --mtp-num-layers 1",
    "pipeline, interleaved, multi-token prediction": f"{VP2} {ROPE} --mtp-num-layers 1",
    "pipeline, multi-token prediction by a layout": f"{PP2} {ROPE} --mtp-num-layers 1 "
    "--pipeline-model-parallel-layout Ett|ttmL",
    "pipeline, interleaved": VP2,
    "pipeline, interleaved, all layers again": f"{VP2} {FULL} uniform",
    "pipeline, one layer first": f"{PP2} --decoder-first-pipeline-num-layers 1",
    "pipeline, embedding as a layer": f"{PP2} --account-for-embedding-in-pipeline-split "
    "--num-layers 3",
    "pipeline, loss as a layer": f"{PP2} --account-for-loss-in-pipeline-split --num-layers 3",
    "pipeline, by a layout": f"{PP2} --pipeline-model-parallel-layout Et|tttL",
    "experts over replicas": f"{MOE} {OVER_4}",
    "experts over replicas, distributed optimizer": f"{MOE} {OVER_4} --use-distributed-optimizer "
    "--overlap-grad-reduce --overlap-param-gather",
    "experts over replicas, all-gather of halves": f"{EXPERTS} --moe-router-topk 2 {OVER_2} 2 "
    "--moe-token-dispatcher-type allgather",
    "experts over replicas, losses of three kinds": f"{MOE} {OVER_2} 2 --moe-z-loss-coeff 1e-3 "
    "--moe-router-load-balancing-type aux_loss seq_aux_loss global_aux_loss "
    "--moe-aux-loss-coeff 0.01 0.02 0.03",
    "experts over replicas, padded to capacity": f"{MOE} {OVER_4} "
    "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity",
    "experts over ranks, pipeline, interleaved": f"{MOE} {OVER_2} 1 {VP2}",
    "context parallelism": "--context-parallel-size 2",
}
QUICK = ("no other flag", "clamped SwiGLU")
REFUSED = ("clamped SwiGLU", "positions of three kinds", "FP8", "context parallelism")

Settings = dict[str, tuple[int, str]]  # by name: ranks and flags


def train(folder: Path, flags: list[str], ranks: int) -> Run:
    flags = [str(folder / "saved") if flag == "SAVE" else flag for flag in flags]
    return attempt(folder, *flags, ranks=ranks, timeout_seconds=TIME_LIMIT_SECONDS)


def outcome(folder: Path, text: str, ranks: int) -> dict:
    """{"is": equal | refused | differs | failed, ...} of one setting."""
    given = text.split()
    tensor = "--tensor-model-parallel-size"
    flags = [*COMMON, *([] if tensor in given else [tensor, "2"]), *given]
    ours = train(folder / "ours", [*flags, *OURS], ranks)
    if ours.code:
        errors = [line for line in ours.stderr.splitlines() if line.startswith("error")]
        one_line = ours.code == 2 and len(errors) == 1
        told = errors[0] if errors else f"exit code {ours.code}"
        return {"is": "refused" if one_line else "failed", "message": told}
    stock = train(folder / "stock", flags, ranks)
    if stock.code or len(stock.records) != len(ours.records) or not stock.records:
        return {"is": "failed", "message": f"stock Megatron ended with {stock.code}"}
    loss, norm = (
        float(np.abs(ours.values(name) / stock.values(name) - 1).max())
        for name in ("loss", "grad_norm")
    )
    equal = loss <= LOSS and norm <= GRAD_NORM
    return {"is": "equal" if equal else "differs", "loss": loss, "grad_norm": norm}


def combinations(count: int) -> Settings:
    """Of settings that run alone and have no flag in common."""
    draw = random.Random(SEED)
    found: Settings = {}
    of_two, of_four = (
        [name for name in settings if name not in REFUSED] for settings in (TWO_RANKS, FOUR_RANKS)
    )
    while len(found) < count:
        ranks = draw.choice((2, 4))
        names = [draw.choice(of_four)] if ranks == 4 else []
        names += draw.sample(of_two, draw.choice((2, 3, 4)))
        texts = [(TWO_RANKS | FOUR_RANKS)[name] for name in names]
        flags = [word for text in texts for word in text.split() if word.startswith("--")]
        if len(flags) == len({*flags}):
            found[", ".join(names)] = ranks, " ".join(texts)
    return found


def run(settings: Settings) -> dict:
    rows: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, (ranks, text)) in enumerate(settings.items()):
            rows[name] = outcome(Path(folder, str(number)), text, ranks)
            print(f"{name}: {rows[name]}", file=sys.stderr, flush=True)
    counts = {k: sum(r["is"] == k for r in rows.values()) for k in ("equal", "refused", "differs")}
    equal = [row for row in rows.values() if row["is"] == "equal"]
    return {
        "settings": len(rows),
        **counts,
        "failed": len(rows) - sum(counts.values()),
        "loss_difference_max": max((row["loss"] for row in equal), default=None),
        "grad_norm_difference_max": max((row["grad_norm"] for row in equal), default=None),
        "rows": rows,
    }


def main() -> None:
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--combinations", type=count, metavar="COUNT", help="of several settings")
    arguments = parser.parse_args()
    settings: Settings = {name: (2, text) for name, text in TWO_RANKS.items()}
    settings |= {name: (4, text) for name, text in FOUR_RANKS.items()}
    name, configuration = "megatron_flags", {"iterations": ITERATIONS, "policy": f"random:{SEED}"}
    if arguments.combinations:
        name, settings = f"{name}_combined", combinations(arguments.combinations)
        configuration |= {"seed": SEED}
    elif arguments.quick:
        settings = {name: settings[name] for name in QUICK}
    finish(name, run(settings), {**configuration, "dtype": "float32"}, arguments)


if __name__ == "__main__":
    main()
