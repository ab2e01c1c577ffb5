"""Quantization per group, token and tensor, amax, scales and transposes."""
