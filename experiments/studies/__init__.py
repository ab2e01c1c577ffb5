"""Questions that a training answers: curves of optimizers, errors of trained models."""
