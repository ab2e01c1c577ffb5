"""Computes FP8 matmuls, with their backward passes."""
