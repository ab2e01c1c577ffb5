"""Adapters for trainers: moments by path, fused updates, and FP8 by rules of qwix."""
