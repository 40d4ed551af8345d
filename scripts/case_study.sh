#!/usr/bin/env bash
# The paper's case study: what a restart to change strategy costs, against a switch while training.
#   --simulate | --scale tiny (2 CPU cores, the default) | --scale full (8 GPUs)
#   --as-published, --models bert,llama,gpt, --distributions githubcode,grch38, --output results/
# Writes CSV files, figures and RESULTS.md: docs/reproduction.md.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -n "${PYTHON:-}" ] || [ -x .venv/bin/python ] || { echo "error: .venv is missing: run make setup first" >&2; exit 2; }
exec "${PYTHON:-.venv/bin/python}" -m reproduction case_study "$@"
