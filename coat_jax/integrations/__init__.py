"""Adapters for trainers and libraries that look for moments or matmuls by name."""
