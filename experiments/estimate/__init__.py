"""Predictions of a training step's memory, and their comparison with measured peaks."""
