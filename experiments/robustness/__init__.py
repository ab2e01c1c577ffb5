"""Programs that try to break the training program."""
