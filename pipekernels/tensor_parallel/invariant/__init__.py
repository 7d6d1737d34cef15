r"""Layers whose results have the same bits on any number of ranks.

A sum of floating-point numbers depends on its order. So here the order does not depend on the
ranks. The sharded dimension is cut into ``SLABS`` slabs, of which each rank holds the same
number. Products are computed slab by slab: their shapes are always the same, so the library runs
the same kernel with the same blocking. Sums over slabs are kept in float32 (float64 for float64),
and added by one binary tree::

    slab       0   1   2   3   4   5   6   7
                \ /     \ /     \ /     \ /
                 +       +       +       +
                   \   /           \   /
    2 ranks          +               +          each computes its subtree,
                        \         /
                             +                  the all-reduce (``order="tree"``) what remains

Rounding to the layer's dtype comes last. A single rank does the same without peers.

=============  ==============================  ========================================
layer          forward                         backward
=============  ==============================  ========================================
row            tree over slabs, all-reduce     slabs of dX and of dW, side by side
column         slabs of Y, side by side        dX: tree over slabs, all-reduce; slabs of dW
=============  ==============================  ========================================
"""

from __future__ import annotations

from pipekernels.tensor_parallel.invariant.arithmetic import Invariant
from pipekernels.tensor_parallel.invariant.plain import Plain

__all__ = ["Invariant", "Plain", "arithmetic_of"]


def arithmetic_of(invariant: bool) -> type[Plain]:
    """The arithmetic of a layer."""
    return Invariant if invariant else Plain
