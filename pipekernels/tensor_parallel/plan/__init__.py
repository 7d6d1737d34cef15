"""Shards whole models by a plan, and undoes it."""
