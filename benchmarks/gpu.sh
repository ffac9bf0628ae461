#!/usr/bin/env bash
# Which forms of the decoder are exact on this machine's GPU, and what they cost: about ten minutes on one card.
#
#   bash benchmarks/gpu.sh [--quick]
#
# Needs Python 3.11 or newer, a package index and an NVIDIA driver. JAX for CUDA goes into .venvs/gpu, never into .venv.
# JAX_GPU chooses another build (default: cuda13; an older driver wants cuda12, an AMD card rocm). PYTHON chooses the
# interpreter; SKIP_INSTALL=1 uses the one in PYTHON as it is.
#
# Three processes: one as JAX comes; a second like it, to see whether kernels chosen by timing differ from process to
# process; and one with the flags that pin the choice, to see whether they help and what they cost. Results:
# benchmarks/results/gpu-exact-{default,again,pinned}.json.
set -euo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-python3}"
if [ -z "${SKIP_INSTALL:-}" ]; then
  venv=.venvs/gpu
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --editable . "jax[${JAX_GPU:-cuda13}]"
  python="$venv/bin/python"
fi

results="${RESULTS:-benchmarks/results}"
pinned="--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"
# A card is not a processor: where JAX finds none, these flags are unknown and the run says what it ran on.
export XLA_PYTHON_CLIENT_PREALLOCATE=false

run() {
  local name="$1"; shift
  echo "== $name"
  "$python" benchmarks/gpu_exact.py --out "$results/gpu-exact-$name.json" "$@"
}

run default "$@"
run again --compare "$results/gpu-exact-default.json" "$@"
if "$python" -c 'import sys, jax; sys.exit(jax.default_backend() != "gpu")'; then
  XLA_FLAGS="${XLA_FLAGS:-} $pinned" run pinned --compare "$results/gpu-exact-default.json" "$@"
else
  echo "no GPU: the flags that pin its kernels are not tried"
fi
