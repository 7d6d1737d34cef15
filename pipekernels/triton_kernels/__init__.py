"""The Triton kernels; the only package that imports triton."""
