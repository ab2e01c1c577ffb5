"""Tiles of FP8 matmuls, and what kernels take of a GPU."""
