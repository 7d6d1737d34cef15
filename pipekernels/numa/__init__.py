"""Binds the ranks of a host to its cores and memory: what ``pipekernels run`` does.

torchrun binds ranks by GPU index. CPU ranks that move between the sockets of a server read half of
their operands from another socket's memory.
"""
