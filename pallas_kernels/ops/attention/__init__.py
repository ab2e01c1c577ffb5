"""Attention with soft caps, windows and segments, forward and backward."""
