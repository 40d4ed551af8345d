#!/usr/bin/env bash
# Make .venv with Python 3.12 and install the package with its development tools into it.
set -euo pipefail
case ${1:-} in
    "") ;;
    -h | --help) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit 0 ;;
    *) echo "error: setup.sh takes no argument, got $1: leave it out" >&2; exit 2 ;;
esac
cd "$(dirname "$0")/.."

is_python_312() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; }

make_venv() {
    if is_python_312 .venv/bin/python; then return; fi
    local candidate
    for candidate in python3.12 python3 python; do
        if is_python_312 "$candidate"; then "$candidate" -m venv --clear .venv; return; fi
    done
    if command -v pyenv >/dev/null; then
        for candidate in "$(pyenv root)"/versions/3.12*/bin/python; do
            if is_python_312 "$candidate"; then "$candidate" -m venv --clear .venv; return; fi
        done
    fi
    if command -v uv >/dev/null; then uv venv --seed --clear --python 3.12 .venv; return; fi
    echo "Python 3.12 not found: install it (Debian: apt install python3.12-venv; or: pyenv install 3.12; or install uv), then run make again" >&2
    exit 1
}

make_venv
echo "installing into .venv (the first time downloads about 5 GB and takes some minutes)"
.venv/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
