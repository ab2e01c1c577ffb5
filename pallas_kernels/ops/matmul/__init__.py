"""FP8 matmuls, whose result can be per-group codes or attention heads."""
