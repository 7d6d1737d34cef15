"""What layers cost, measured; what a pipe of them would cost; and the search for the best one.

Stands above ``Pipe``, which it builds; ``pipekernels.balance`` calls in too.
"""
