"""Attention heads side by side again, with rotary embeddings undone."""
