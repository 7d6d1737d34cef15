"""What travels between layers: nested containers of tensors, and their way into micro-batches and
back.

Knows nothing of stages or pipes; every other room of the pipeline may call in.
"""
