"""Binds the ranks of a host to its cores and memory: what ``pipekernels run`` does.

torchrun binds ranks by the index of a GPU. Ranks on CPUs that float over the sockets of a server
read half of their operands from another socket's memory.
"""
