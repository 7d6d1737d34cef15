"""One stage on one microbatch: layers, forward, recomputation, backward, random numbers, skips.

Does not depend on the pipe; called by the engine, placement and SPMD.
"""
