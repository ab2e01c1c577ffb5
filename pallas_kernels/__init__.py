"""Pallas kernels for NVIDIA Hopper GPUs. Raw arrays in, raw arrays out."""
