"""Tuning of FP8 matmuls' tiles, and the GPU resources of all kernels."""
