#!/usr/bin/env bash
# The whole story in one run: real documents -> costs measured -> plans -> a GPT trained under a memory
# budget with switching, beside two fixed strategies -> report. No download, no GPU needed.
#
# RANKS, BUDGET, ITERATIONS, LENGTHS, OUT and MODEL (Megatron flags) change it: on 8 GPUs, for instance,
#   RANKS=8 BUDGET=40GiB MODEL="--num-layers 16 --hidden-size 4096 ... --bf16" make demo
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "error: $*" >&2; exit 2; }
case ${1:-} in
    "") ;;
    -h | --help) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit 0 ;;
    *) fail "demo.sh takes no argument, got $1: give variables, such as RANKS=8 bash scripts/demo.sh" ;;
esac
[ -x .venv/bin/python ] || { echo "error: .venv is missing: run make setup first" >&2; exit 2; }

RANKS=${RANKS:-4}
ITERATIONS=${ITERATIONS:-10}
LENGTHS=${LENGTHS:-128,512,2K,4K,8K} # at which costs are measured
BUDGET=${BUDGET:-128MiB}
OUT=${OUT:-demo-output}
MARK=.paradyse-demo # in a folder that a demo has made
FIRST=${FIRST:-megatron_ts} # fast, and short of memory
SECOND=${SECOND:-metp}      # frugal, and slow
MODEL=${MODEL:---num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 8192
    --max-position-embeddings 8192 --attention-dropout 0 --hidden-dropout 0}
PARADYSE=".venv/bin/python -m megatron_paradyse"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONWARNINGS=ignore PYTHONUNBUFFERED=

for name in RANKS ITERATIONS; do
    [[ ${!name} =~ ^[1-9][0-9]*$ ]] || fail "$name=${!name} is no number: give 1 or more"
done
# What an earlier demo has written is written anew; nothing else is removed.
if [ "$OUT" != demo-output ] && [ -e "$OUT" ] && [ ! -e "$OUT/$MARK" ] && [ "$(ls -A "$OUT")" ]; then
    fail "OUT=$OUT is there and not of an earlier demo: give another name, or remove it"
fi
rm -rf "$OUT" && mkdir -p "$OUT" && touch "$OUT/$MARK"
read -r -a model <<<"$(tr '\n' ' ' <<<"$MODEL")"
grid=(--tensor-model-parallel-size "$RANKS" --sequence-parallel --micro-batch-size 1)

echo "== 1. The Python standard library's sources become a Megatron data set"
corpus=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
$PARADYSE data prepare "$corpus" --output-prefix "$OUT/corpus" --overwrite
$PARADYSE data lengths "$OUT/corpus"

echo "== 2. Measure what every strategy costs here, and fit it"
$PARADYSE profile --nproc "$RANKS" --output "$OUT/costs-raw.json" --lengths "$LENGTHS" \
    "${model[@]}" "${grid[@]}" --data-path "$OUT/corpus"
$PARADYSE fit "$OUT/costs-raw.json" -o "$OUT/costs.json" >"$OUT/fit.log"

echo "== 3. What it would run at which length, within $BUDGET a rank"
$PARADYSE plan "$OUT/costs.json" --lengths "$LENGTHS" --memory-budget "$BUDGET"

# train NAME FLAGS...: the same documents for everyone; the log is NAME.log, the trace NAME.jsonl.
train() {
    local name=$1 log="$OUT/$1.log"
    shift
    : >"$log"
    .venv/bin/torchrun --standalone --nproc-per-node "$RANKS" -m megatron_paradyse.pretrain_gpt \
        --paradyse --paradyse-config configs/demo.yaml --paradyse-memory-budget "$BUDGET" \
        --paradyse-trace "$OUT/$name.jsonl" --data-path "$OUT/corpus" --split 100,0,0 \
        "${model[@]}" "${grid[@]}" --global-batch-size 2 --train-iters "$ITERATIONS" \
        --lr 2e-3 --min-lr 2e-4 --lr-warmup-iters $((ITERATIONS > 2 ? 2 : 0)) --lr-decay-style cosine \
        --log-interval 1 --eval-iters 0 --eval-interval 1000 --num-workers 0 "$@" >"$log" 2>&1 &
    local pid=$!
    # Megatron says much more than a reader wants; all of it is in the log.
    tail --pid=$pid -n +1 -f "$log" 2>/dev/null |
        grep --line-buffered -E '^(iteration|error|paradyse:|> paradyse)|^  (megatron|ulysses|colossal|metp)[a-z_+]* +[-+0-9]|^  (predicted|estimated)' || true
    wait $pid
}

echo "== 4. Train with switching: $ITERATIONS iterations"
if ! train paradyse --paradyse-policy optimal --paradyse-cost-model "$OUT/costs.json"; then
    echo "training failed; the log is $OUT/paradyse.log" >&2
    exit 1
fi

echo "== 5. The same documents with $FIRST alone, in the same memory"
train first --paradyse-policy "fixed:$FIRST" || true # it may well run out of memory

echo "== 6. The same documents with $SECOND alone"
train second --paradyse-policy "fixed:$SECOND" || true

echo "== 7. The report"
$PARADYSE report "$OUT/paradyse.jsonl" --costs "$OUT/costs.json" --output "$OUT/report.html"

.venv/bin/python - "$OUT" "$FIRST" "$SECOND" <<'PY'
import json, sys

out, first, second = sys.argv[1:]


def read(name):
    rows = [json.loads(line) for line in open(f"{out}/{name}.jsonl")]
    return ([r for r in rows if r["kind"] == kind] for kind in ("iteration", "microbatch", "out_of_memory"))


ours, microbatches, _ = read("paradyse")
seconds, tokens = sum(r["seconds"] for r in ours), sum(r["tokens"] for r in ours)
longest = max(r["longest_sequence_tokens"] for r in ours)
plans = len({r["plan"] for r in microbatches})
print("== Done")
print(f"ParaDySe: {tokens:,} tokens in {seconds:.0f} s, {plans} plans, documents up to {longest:,} tokens")
for name, strategy in (("first", first), ("second", second)):
    rows, _, failed = read(name)
    own = sum(r["seconds"] for r in rows)
    same = sum(r["seconds"] for r in ours[: len(rows)])
    if failed:
        text = f"out of memory at iteration {failed[0]['iteration']}, a document of {failed[0]['seq_length']:,} tokens"
        text += f"; until then {same / own:.2f} of its time" if rows else ""
    else:
        text = f"{own:.0f} s for the same documents: ParaDySe took {same / own:.2f} of that"
    print(f"{strategy}: {text}")
losses = f"losses: {ours[0]['lm loss']:.3f} -> {ours[-1]['lm loss']:.3f}"
if rows:
    difference = max(abs(a["lm loss"] / b["lm loss"] - 1) for a, b in zip(ours, rows))
    losses += f"; from {second}'s they differ by at most {difference:.0e}"
print(losses)
print(f"report: {out}/report.html; logs, traces and costs beside it")
PY
