#!/usr/bin/env bash
# Each mechanism once on one GPU, under eight minutes, one JSON line. Without a GPU it says what it would check.
#   launch/gpu_check.sh [--json] [--cpu] [--only NAME]...
# PYTHON is the interpreter (default: .venv's, else python3). megatron-core may be an unpacked wheel on PYTHONPATH.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-}"
if [[ -z "$python" ]]; then
    python="$root/.venv/bin/python"
    [[ -x "$python" ]] || python=python3
fi
export PYTHONPATH="$root:$root/tests/gpu${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONWARNINGS="${PYTHONWARNINGS:-ignore}" # Megatron warns about every absent package
exec timeout --kill-after=10 480 "$python" -m gpu_check "$@"
