"""The weights of linear layers: a file for each format.

A layer makes a :class:`Weight` of its tensors, and calls that for every product. CONTRIBUTING.md
says what a new format touches.
"""

from pipekernels.ops.weights.base import Weight
from pipekernels.ops.weights.dense import DenseWeight
from pipekernels.ops.weights.integers import IntegerWeight
from pipekernels.ops.weights.operators import weight_of

__all__ = ["DenseWeight", "IntegerWeight", "Weight", "weight_of"]
