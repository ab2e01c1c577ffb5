"""Experiments on saved activations: memory, granularity and errors of gradients."""
