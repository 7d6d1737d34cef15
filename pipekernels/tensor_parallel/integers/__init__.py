r"""Sharded layers with weights of 8- or 4-bit integers, for inference.

Decoding a token takes as long as reading the weights. Here a weight is ``W s``: ``W`` of integers,
and ``s`` a scale for each *group* of elements of an output feature: all its ``K`` elements (8 bits,
unless a group is asked for), or ``G``, a multiple of 32. Scales belong to the *full* weight, so
that the gathered weight does not depend on the number of ranks. With ``R`` ranks, of a full layer:

===========  =================================  ==================================
tensor       column-parallel                    row-parallel
===========  =================================  ==================================
weight       ``[M / R, K]``, int8               ``[M, K / R]``, int8
scale        ``[M / R, 1]``                     ``[M, 1]``, replicated
scale        ``[M / R, K / G]``                 ``[M, K / R / G]``
===========  =================================  ==================================

These are the shapes in full state dicts. Ranks keep their parts in the kernel's order
(:mod:`pipekernels.ops.weights.integers`, which has the error model).
"""
