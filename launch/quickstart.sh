#!/usr/bin/env bash
# Set up .venv and run the main job: a small Mixture-of-Experts model learns by reinforcement on two CPU cores.
#
#   bash launch/quickstart.sh [key=value ...]        for example run.seed=2 rollout.engine=sglang
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/install.sh
exec .venv/bin/megatron-rl train configs/quickstart.yaml "$@"
