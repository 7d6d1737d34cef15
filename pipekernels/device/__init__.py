"""CUDA streams and copies between devices, behind interfaces that tests can record."""
