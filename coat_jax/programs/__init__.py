"""Reads jaxprs: a table of primitives, and graphs of equations."""
