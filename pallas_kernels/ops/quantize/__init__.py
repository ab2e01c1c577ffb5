"""Quantization by group, row and tensor, maxima, scales and transposes."""
