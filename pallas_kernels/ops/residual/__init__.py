"""Residual additions that quantize their sum."""
