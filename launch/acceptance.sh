#!/usr/bin/env bash
# The second tier: long campaigns on real parts. Each prints one JSON line per run (figures, command, seed, revision) and
# fails when a figure misses its bound. docs/measurements.md holds the figures.
#
#   bash launch/acceptance.sh              the list of campaigns
#   bash launch/acceptance.sh quickstart   one of them
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/install.sh
exec .venv/bin/python -m tests.acceptance.campaigns "$@"
