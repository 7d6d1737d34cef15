"""Demonstration: train through a pipeline, generate with tensor parallelism, draw the timeline."""
