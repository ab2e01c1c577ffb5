"""FP8 matrix products, also of groups and of attention heads."""
