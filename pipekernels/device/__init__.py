"""CUDA streams, copies between devices, and captured graphs, behind interfaces that tests can
record."""
