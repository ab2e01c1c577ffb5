"""The names under which pickled states of version 0 look for their classes."""

from coat_jax.optimizers.checkpoint import MuScaling, ScaleByFP8AdamState

__all__ = ["MuScaling", "ScaleByFP8AdamState"]
