"""Studies of trainings and checkpoints: errors, optimizers, recipes and fine-tuning."""
