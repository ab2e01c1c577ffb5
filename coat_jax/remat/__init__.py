"""Implements `fp8_remat`, which saves FP8 residuals for any function or module."""
