"""Functions that have other names in older versions of Flax."""

from flax import nnx

# The name was `pure` before flax 0.12.4.
as_pure = getattr(nnx, "as_pure", None) or nnx.pure
