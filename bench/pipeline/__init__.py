"""Benchmarks of pipes; those of everything else are one level up."""
