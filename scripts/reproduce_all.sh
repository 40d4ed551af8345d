#!/usr/bin/env bash
# Every result of the paper, from scratch: what the four scripts beside this one write, for ours and
# as published. The same options; --simulate also makes the estimate of Megatron's own scheduler.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -n "${PYTHON:-}" ] || [ -x .venv/bin/python ] || { echo "error: .venv is missing: run make setup first" >&2; exit 2; }
PYTHON=${PYTHON:-.venv/bin/python}
simulated=false
for option in "$@"; do
    case $option in
        -h | --help) exec "$PYTHON" -m reproduction table3 --help ;; # each takes the same options
        --simulate) simulated=true ;;
    esac
done
if $simulated; then
    rm -rf build/reproduction # costs that are kept
fi

start=$SECONDS
run() {
    echo "== $*" >&2
    "$PYTHON" -m reproduction "$@"
}
run table3 "$@"
run figure2 "$@"
run table5 "$@"
run case_study "$@"
if $simulated; then
    run peer "$@"
fi
echo "$((SECONDS - start)) s" >&2
