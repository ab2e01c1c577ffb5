"""Speed and memory: kernels, optimizer steps, layers and whole models."""
