"""Transformer layers by recipe: FP8 matmuls, segments and the decoder layer."""
