r"""Sharded layers with weights of int8, for inference.

Decoding a token takes as long as reading the weights. Here a weight is ``W s``: ``W`` of int8, and
``s`` a float32 scale for each output feature, ``max |w| / 127`` over the *full* weight, so that the
gathered weight does not depend on the number of ranks. With ``R`` ranks:

===========  ==============================  ==============================================
tensor       column-parallel                 row-parallel
===========  ==============================  ==============================================
weight       ``[M / R, K]``, int8            ``[M, K / R]``, int8
scale        ``[M / R]``                     ``[M]``, the largest of all ranks, replicated
===========  ==============================  ==============================================

An output differs from that of the float layer by at most ``s / 2 * sum |x|``, over all input
features, and by rounding.
"""

from pipekernels.tensor_parallel.int8.layers import Int8Experts, Int8Linear
from pipekernels.tensor_parallel.int8.quantize import quantize_weights

__all__ = ["Int8Experts", "Int8Linear", "quantize_weights"]
