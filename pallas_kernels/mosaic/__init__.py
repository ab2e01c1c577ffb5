"""Mosaic GPU helpers that the kernels share."""
