"""Models built from the library's blocks."""
