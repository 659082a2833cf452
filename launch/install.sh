#!/usr/bin/env bash
# Set up .venv for CPU: everything that the quick start and the tests need. Does nothing when it is up to date.
#
#   bash launch/install.sh [--python python3.12] [--system]
#
# --python  the interpreter of the environment (default: python3; 3.11 and 3.12 are supported)
# --system  also install the Debian packages that the Slurm tests need (as root, through apt)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=python3
system=no
while [ $# -gt 0 ]; do
  case "$1" in
    --python) python="$2"; shift 2 ;;
    --system) system=yes; shift ;;
    *) echo "install.sh: unknown option $1 (see the top of the file)" >&2; exit 2 ;;
  esac
done

log="${TMPDIR:-/tmp}/megatron-rl-install.$$.log"
trap 'rm -f "$log"' EXIT

step() { # step "what it does" command...
  local what="$1" start=$SECONDS
  shift
  printf '%s ... ' "$what" >&2
  if ! "$@" >"$log" 2>&1; then
    printf 'failed\n' >&2
    tail -n 30 "$log" >&2
    exit 1
  fi
  printf '%d s\n' $((SECONDS - start)) >&2
}

if [ "$system" = yes ]; then
  missing=()
  command -v slurmctld >/dev/null || missing+=(slurm-wlm)
  command -v munged >/dev/null || missing+=(munge)
  command -v shellcheck >/dev/null || missing+=(shellcheck)
  command -v ip >/dev/null || missing+=(iproute2)
  if [ ${#missing[@]} -gt 0 ]; then
    if [ "$(id -u)" != 0 ]; then
      echo "install.sh: install ${missing[*]} first (apt-get install ${missing[*]}), or run as root" >&2
      exit 1
    fi
    step "Debian package lists" apt-get update
    step "Debian packages ${missing[*]}" env DEBIAN_FRONTEND=noninteractive \
      apt-get install -y --no-install-recommends "${missing[@]}"
  fi
fi

version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
case "$version" in
  3.11|3.12) ;;
  *) echo "install.sh: Python $version is not supported; use --python with 3.11 or 3.12" >&2; exit 1 ;;
esac

stamp=".venv/.installed"
wanted="$version $(cat setup.py launch/requirements-*.txt launch/install.sh | sha256sum | cut -d' ' -f1)"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
  exit 0
fi
if [ -x .venv/bin/python ] && [ "$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')" != "$version" ]; then
  rm -rf .venv
fi

export PIP_DISABLE_PIP_VERSION_CHECK=1
[ -x .venv/bin/python ] || step "virtual environment .venv (Python $version)" "$python" -m venv .venv
step "Python packages (about 2 GB)" .venv/bin/python -m pip install -r launch/requirements-cpu.txt
step "SGLang for CPU" .venv/bin/python -m pip install --no-deps -r launch/requirements-sglang-cpu.txt
step "megatron-rl" .venv/bin/python -m pip install --no-deps -e .
echo "$wanted" >"$stamp"
