"""Benchmarks: one file per operation, peers beside ours in the same run."""
