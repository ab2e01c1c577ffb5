"""A step of Adam on 8-bit moments."""
