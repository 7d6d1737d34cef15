#!/usr/bin/env bash
# Builds for the GPU at hand, in place and with the Python that is there (torch with CUDA, pytest,
# hypothesis, pybind11, CMake, Ninja, no network), then runs the CUDA tests and benchmarks.
# Results go to $OUT if set, else to bench/results/<gpu>/.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

if ! architecture=$("$python" -c '
try:
    import torch
except ImportError:
    raise SystemExit(1)
if not torch.cuda.is_available():
    raise SystemExit(1)
print("%d%d" % torch.cuda.get_device_capability())'); then
  echo "gpu-check: $python has no torch that sees a CUDA GPU. Run it on a machine with one, with" \
    "PYTHON=<a Python whose torch has CUDA>; make cuda-check compiles without a GPU." >&2
  exit 1
fi

CUDAARCHS=$architecture PIPEKERNELS_CUDA=1 "$python" setup.py -q build_ext --inplace
folder=$("$python" -c 'from bench import harness; print(harness.results_folder())')
mkdir -p "$folder"
"$python" -m pipekernels info | tee "$folder/gpu_check.txt"
timeout 300 "$python" -m pytest -m cuda 2>&1 | tee -a "$folder/gpu_check.txt"
timeout 180 "$python" -m bench micro_batch 2>&1 | tee -a "$folder/gpu_check.txt"
