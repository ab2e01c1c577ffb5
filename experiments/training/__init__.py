"""The trainer and its loop, with data, checkpoints, logs and reports of trainings."""
