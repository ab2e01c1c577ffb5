"""Fine-tuning on questions and answers, and its exact match."""
