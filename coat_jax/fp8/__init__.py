"""FP8 matmuls, forward and backward."""
