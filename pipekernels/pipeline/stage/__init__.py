"""One stage on one micro-batch: layers, forward, recomputation, backward, random numbers, skips.

Does not depend on the pipe; called by the engine, placement and SPMD.
"""
