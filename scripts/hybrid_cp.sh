#!/usr/bin/env bash
# Megatron's hybrid context parallel schedule and packed ParaDySe, one after the other on the same documents and
# the 8 GPUs of one machine. Not yet run on a GPU: a test checks the flags of both.
#
#   MEGATRON=path/to/Megatron-LM DATA=data/code bash scripts/hybrid_cp.sh
#
# MEGATRON   a checkout of core_v0.19, whose pretrain_gpt.py runs the peer; it needs TransformerEngine
# DATA       prefix of .bin and .idx, as 'megatron-paradyse data prepare' or 'data synthesize' wrote them
# VOCAB      size of their vocabulary                      (default 50257)
# CAP        tokens of a rank of the peer                  (default 2048, as its published benchmark has)
# SEQ        the longest document, and the peer's samples  (default 8192)
# DOCUMENTS  of a global batch of ParaDySe                 (default 512)
# SAMPLES    of SEQ tokens of a global batch of the peer   (default 64: as many tokens where documents have 1024)
# ITERATIONS of each, the first 10 of which warm up        (default 50)
# LOGS       a folder for what both print                  (default hybrid-cp-logs)
# Compare tokens per second: Megatron's line gives ms per iteration, of SAMPLES x SEQ tokens; ParaDySe's tokens/s.
set -euo pipefail

fail() { echo "error: $1" >&2 && exit 2; }
case ${1:-} in
    "") ;;
    -h | --help) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit 0 ;;
    *) fail "hybrid_cp.sh takes no argument, got $1: give variables, such as DATA=data/code bash scripts/hybrid_cp.sh" ;;
esac
[ -n "${MEGATRON:-}" ] || fail "MEGATRON is not set: give a Megatron-LM checkout, such as MEGATRON=../Megatron-LM"
[ -n "${DATA:-}" ] || fail "DATA is not set: give the prefix of .bin and .idx, such as DATA=data/code"
[ -f "$MEGATRON/pretrain_gpt.py" ] || fail "MEGATRON=$MEGATRON has no pretrain_gpt.py: give a Megatron-LM checkout"
for part in bin idx; do
    [ -f "$DATA.$part" ] || fail "$DATA.$part does not exist: give DATA as the prefix of .bin and .idx"
done
VOCAB=${VOCAB:-50257} CAP=${CAP:-2048} SEQ=${SEQ:-8192} DOCUMENTS=${DOCUMENTS:-512} SAMPLES=${SAMPLES:-64}
ITERATIONS=${ITERATIONS:-50} LOGS=${LOGS:-hybrid-cp-logs}
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
mkdir -p "$LOGS"

both=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --swiglu
    --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --bf16
    --use-distributed-optimizer --seq-length "$SEQ" --max-position-embeddings "$SEQ" --micro-batch-size 1
    --train-iters "$ITERATIONS" --lr 1e-4 --eval-iters 0 --eval-interval 1000 --log-interval 1 --split 100,0,0
    --data-path "$DATA" --tokenizer-type NullTokenizer --vocab-size "$VOCAB"
)
torchrun --standalone --nproc-per-node 8 "$MEGATRON/pretrain_gpt.py" "${both[@]}" \
    --tensor-model-parallel-size 1 --hybrid-context-parallel --max-seqlen-per-dp-cp-rank "$CAP" \
    --dataloader-inter-document-masking --calculate-per-token-loss --dataloader-type single \
    --global-batch-size "$SAMPLES" 2>&1 | tee "$LOGS/hybrid-cp.log"
torchrun --standalone --nproc-per-node 8 -m megatron_paradyse.pretrain_gpt "${both[@]}" \
    --tensor-model-parallel-size 8 --sequence-parallel --paradyse --paradyse-sequences packed \
    --global-batch-size "$DOCUMENTS" 2>&1 | tee "$LOGS/paradyse.log"
