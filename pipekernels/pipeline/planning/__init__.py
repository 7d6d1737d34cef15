"""Measures the cost of layers, predicts that of pipes, and searches for the best pipe.

Depends on ``Pipe``, which it builds; ``pipekernels.balance`` uses the measurements too.
"""
