"""Machine code of the CUDA kernels: where it is built, how it is read, and the rules on it."""
