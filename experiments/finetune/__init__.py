"""Fine-tuning on conversations, and the exact match of generated answers."""
