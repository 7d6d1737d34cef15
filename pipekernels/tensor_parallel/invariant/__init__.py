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

``invariant_row_linear`` and ``invariant_column_linear`` are the steps ``row_linear`` and
``column_linear`` of :mod:`pipekernels.tensor_parallel.functional` in this order.
"""
