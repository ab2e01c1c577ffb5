"""Benchmarks of speed and memory: kernels, optimizer steps, layers and models."""
