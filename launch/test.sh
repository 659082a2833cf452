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

echo "GPU tests are deselected: run launch/gpu_check.sh on a machine with a GPU" >&2
export OMP_NUM_THREADS=1
run=(.venv/bin/python -m pytest -m "not gpu and not slow" --durations=15)
[ $# -eq 0 ] || exec "${run[@]}" "$@"

# Two halves side by side: each waits for about half of its time. Only the first to start uses Ray, whose shared memory its
# tests count.
services_log=$(mktemp)
trap 'rm -f "$services_log"' EXIT
layouts=tests/distributed/test_layouts.py
second=(tests/e2e tests/sglang tests/slurm tests/distributed "--ignore=$layouts")
"${run[@]}" "${second[@]}" >"$services_log" 2>&1 &
services=$!
trap 'kill -INT "$services" 2>/dev/null || true; wait "$services" || true; rm -f "$services_log"' INT TERM
failed=0
.venv/bin/ruff check . || failed=$?
.venv/bin/mypy || failed=$?
"${run[@]}" tests/architecture tests/unit tests/golden "$layouts" || failed=$?
echo "== ${second[*]}" >&2
tail --lines=+1 --follow --pid="$services" "$services_log" || true
wait "$services" || failed=$?
exit "$failed"
