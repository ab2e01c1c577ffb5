"""FP8 matmuls, with a matrix or attention heads as the result."""
