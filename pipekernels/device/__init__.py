"""CUDA streams, the copies between devices, and captured graphs, behind interfaces that tests can
record.

Knows tensors only. Called by operations, communicators and the pipeline.
"""
