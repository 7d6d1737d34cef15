"""Measures the cost of layers, predicts that of pipes, and searches for the best pipe.

Depends on ``Pipe``, which it builds, except for ``cuts.py``, which ``Pipe`` and
``pipekernels.balance`` use.
"""
