"""Transformer layers: the decoder layer, its recipes, and the parts they use."""
