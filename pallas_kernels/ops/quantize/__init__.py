"""Quantization per group, token, column, block and tensor, and transposed codes."""
