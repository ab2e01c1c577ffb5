"""Fuses FP8 matmuls of a program with what surrounds them."""
