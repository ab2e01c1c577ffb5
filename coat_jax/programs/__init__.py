"""Reads and rewrites jaxprs: a table of primitives, and graphs of equations."""
