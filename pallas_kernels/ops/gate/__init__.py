"""Gated activations, forward and backward."""
