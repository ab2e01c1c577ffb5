"""The trainer, and what trainings share: data, loop, checkpoints, rows, reports."""
