#!/usr/bin/env bash
# The main job in one run: real documents -> Megatron data -> a GPT trained on 4 ranks, stopped,
# and resumed. No download, no GPU needed. Everything lands in demo-output/.
set -euo pipefail
cd "$(dirname "$0")/.."

RANKS=${RANKS:-4}
ITERATIONS=${ITERATIONS:-44}
STOP_AT=${STOP_AT:-24}
OUT=${OUT:-demo-output}
PYTHON=.venv/bin/python

mkdir -p "$OUT"
rm -rf "$OUT/checkpoint" "$OUT/trace.jsonl"

echo "== 1. The Python standard library's sources become a Megatron data set"
CORPUS=$($PYTHON -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
$PYTHON -m megatron_paradyse data prepare "$CORPUS" --output-prefix "$OUT/corpus" --overwrite
$PYTHON -m megatron_paradyse data lengths "$OUT/corpus"

train() {
    OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore PYTHONUNBUFFERED= .venv/bin/torchrun --standalone --nproc-per-node "$RANKS" \
        -m megatron_paradyse.pretrain_gpt \
        --paradyse --paradyse-config configs/demo.yaml --paradyse-trace "$OUT/trace.jsonl" \
        --data-path "$OUT/corpus" --split 98,1,1 \
        --tensor-model-parallel-size "$RANKS" --sequence-parallel \
        --num-layers 4 --hidden-size 256 --num-attention-heads 8 \
        --seq-length 8192 --max-position-embeddings 8192 \
        --attention-dropout 0 --hidden-dropout 0 \
        --micro-batch-size 1 --global-batch-size 2 --train-iters "$ITERATIONS" \
        --lr 2e-3 --min-lr 2e-4 --lr-warmup-iters 4 --lr-decay-style cosine \
        --log-interval 1 --eval-iters 2 --eval-interval "$ITERATIONS" --num-workers 0 \
        --save "$OUT/checkpoint" --save-interval "$STOP_AT" --load "$OUT/checkpoint" "$@" \
        >"$LOG" 2>&1 &
    local pid=$!
    # Megatron says much more than a reader wants; all of it is in the log.
    tail --pid=$pid -n +1 -f "$LOG" 2>/dev/null |
        grep --line-buffered -E '^(iteration|error|megatron_paradyse|> (train|paradyse))|successfully (saved|loaded)|validation loss at iteration' || true
    if ! wait $pid; then
        echo "training failed; the log is $LOG" >&2
        exit 1
    fi
}

echo "== 2. Train on documents of their own lengths; stop after $STOP_AT iterations"
LOG="$OUT/train-1.log" && : >"$LOG"
train --exit-interval "$STOP_AT"

echo "== 3. Start again from the checkpoint, at the exact document"
LOG="$OUT/train-2.log" && : >"$LOG"
train

$PYTHON - "$OUT/trace.jsonl" <<'PY'
import json, sys

lines = [json.loads(line) for line in open(sys.argv[1])]
rows = [line for line in lines if line["kind"] == "iteration"]
first, last = rows[:5], rows[-5:]
loss = lambda part: sum(r["lm loss"] for r in part) / len(part)
tokens, seconds = sum(r["tokens"] for r in rows), sum(r["seconds"] for r in rows)
shortest = min(r["shortest_sequence_tokens"] for r in rows)
longest = max(r["longest_sequence_tokens"] for r in rows)
print("== Done")
print(f"{len(rows)} iterations, {tokens:,} tokens, {seconds:.0f} s of training")
print(f"documents of {shortest:,} to {longest:,} tokens")
print(f"loss {loss(first):.3f} (first five) -> {loss(last):.3f} (last five)")
PY
echo "logs, checkpoint and trace are in $OUT/"
