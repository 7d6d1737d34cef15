"""One stage on one micro-batch: its layers, forward, recomputation, backward, random numbers,
skips.

Knows one task at a time and no pipe; called by the engine, CUDA graphs, planning, placement and
SPMD.
"""
