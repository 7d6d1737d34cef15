"""The weights of linear layers: a file for each format.

A layer makes a :class:`Weight` of its tensors, and calls that for every product. CONTRIBUTING.md
says what a new format touches.
"""

from pipekernels.ops.weights.base import Weight
from pipekernels.ops.weights.dense import DenseWeight
from pipekernels.ops.weights.int8 import Int8Weight
from pipekernels.ops.weights.operators import weight_of

__all__ = ["DenseWeight", "Int8Weight", "Weight", "weight_of"]
