#!/usr/bin/env bash
# Run every benchmark that this machine can run, and save the results to benchmarks/results/.
set -euo pipefail
cd "$(dirname "$0")/.."

for benchmark in overhead strategies parity gpu_ring planner cost_model whole_model head edges \
    simulator dynamic_workload loss_curves max_length; do
    echo "== $benchmark" >&2
    .venv/bin/python "benchmarks/$benchmark.py" --json --save "$@"
done
