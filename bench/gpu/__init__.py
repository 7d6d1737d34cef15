"""What `make gpu-check` runs on a GPU: checks, and benchmarks with a file per operation."""

import os

# Ranks that share a GPU wait for each other on it. Streams that share one of its queues, of which there
# are 8 by default, would wait for each other in another order. Read when CUDA starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
