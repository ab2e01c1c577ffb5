"""Renders the headline table of README.md, and experiments/README.md."""
