"""What `make gpu-check` runs on a GPU: checks, and benchmarks with a file per operation."""
