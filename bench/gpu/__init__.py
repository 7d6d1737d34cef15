"""The checks and benchmarks of `make gpu-check`; one file per benchmark."""

import os

# Kernels of ranks that share a GPU wait for each other; they may deadlock if their streams share
# a hardware queue (by default there are 8). CUDA reads this when it is initialised.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
