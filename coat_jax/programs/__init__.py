"""Reads programs of JAX: one table of operations, one graph."""
