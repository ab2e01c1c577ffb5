"""Compares recipes on a vision-language model that answers questions about images."""
