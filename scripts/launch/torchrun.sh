#!/usr/bin/env bash
# Train on several nodes with torchrun. Run the same line on every node, on HEAD first or within a minute of it:
#
#   HEAD=node0 bash scripts/launch/torchrun.sh --num-layers 32 --hidden-size 4096 ... --data-path /shared/corpus
#
# The nodes meet at HEAD:PORT; HEAD is one of them, under the name that the others know. What follows are
# Megatron's flags, without the three of the grid, which come from these variables:
#
#   NNODES=2   GPUS=8 (of a node)   PP=1 (pipeline stages)
#   TP=$GPUS   the tensor-parallel group, over which strategies choose. Ranks are numbered node by node, and
#              Megatron deals tensor-parallel groups first, so that TP=8 on nodes of 8 GPUs stays inside a
#              node (the quick links) and data and pipeline parallelism cross the network. TP=16 is one
#              group of two nodes: longer sequences, but every layer then waits for the network.
#   PORT=29400   JOB=paradyse (another for each job that meets at the same HEAD)
#
# Costs belong to one grid. Measure them where the group runs, then give --paradyse-cost-model costs.json:
#   TP inside a node:  megatron-paradyse profile --nproc 8 --output costs-raw.json <Megatron flags>
#   TP across nodes:   the same variables, PROFILE=costs-raw.json bash scripts/launch/torchrun.sh <Megatron flags>
set -euo pipefail
case ${1:-} in
    -h | --help) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit 0 ;;
esac

NNODES=${NNODES:-2} GPUS=${GPUS:-8} PP=${PP:-1} PORT=${PORT:-29400} JOB=${JOB:-paradyse}
TP=${TP:-$GPUS}

fail() { echo "error: $1" >&2 && exit 2; }
for name in NNODES GPUS TP PP PORT; do
    [[ ${!name} =~ ^[1-9][0-9]*$ ]] || fail "$name=${!name} is not a number above 0: set it, such as $name=8"
done
[ -n "${HEAD:-}" ] || fail "HEAD is not set: give the name of one of the nodes, such as HEAD=node0"
ranks=$((NNODES * GPUS))
((GPUS % TP == 0 || TP % GPUS == 0)) || fail "TP=$TP on nodes of $GPUS GPUs: give a divisor or a multiple of $GPUS"
((ranks % (TP * PP) == 0)) || fail "TP=$TP x PP=$PP does not divide $NNODES x $GPUS ranks: change TP or PP"

# As Megatron asks for with sequence parallelism; Blackwell GPUs do not need it.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
# Not set here, because only you know: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME name the network interface
# where nodes have several; NCCL_DEBUG=INFO tells which links NCCL took.

if [ -n "${PROFILE:-}" ]; then
    program=(megatron_paradyse profile --output "$PROFILE")
else
    program=(megatron_paradyse.pretrain_gpt --paradyse)
fi
exec torchrun --nnodes "$NNODES" --nproc-per-node "$GPUS" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:$PORT" --rdzv-id "$JOB" -m "${program[@]}" \
    --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP" --sequence-parallel "$@"
