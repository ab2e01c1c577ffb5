"""Fuses FP8 matmuls of a program with the operations around them."""
