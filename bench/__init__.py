"""Benchmarks: one file per operation; peers are measured in the same run."""
