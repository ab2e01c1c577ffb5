"""What is saved for backward, at which granularity, and what gradients lose by it."""
