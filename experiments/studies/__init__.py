"""Studies with trainings: curves of optimizers, and errors in trained models."""
