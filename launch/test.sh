#!/usr/bin/env bash
# The first tier of tests: every mechanism once, on real parts, on two CPU cores. Sets up the machine first.
#
#   bash launch/test.sh [--python python3.12] [pytest arguments ...]
#
# The GPU tests are deselected here; launch/gpu_check.sh runs them. The long campaigns are in launch/acceptance.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

install=(--system)
if [ "${1:-}" = --python ]; then
  install+=(--python "$2")
  shift 2
fi
bash launch/install.sh "${install[@]}"

.venv/bin/ruff check .
.venv/bin/mypy
echo "GPU tests are deselected: run launch/gpu_check.sh on a machine with a GPU" >&2
export OMP_NUM_THREADS=1
suites=(tests/architecture tests/unit tests/golden tests/distributed tests/e2e tests/sglang tests/slurm)
[ $# -gt 0 ] || set -- "${suites[@]}"
exec .venv/bin/python -m pytest -m "not gpu and not slow" --durations=15 "$@"
