"""Converts existing models to FP8 matmuls and FP8 residuals, block by block."""
