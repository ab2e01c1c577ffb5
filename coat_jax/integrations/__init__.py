"""Adapters for trainers and libraries that have places of their own for a change."""
