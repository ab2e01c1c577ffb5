"""Differences between versions of JAX and Flax that tests have to know."""

import jax
import pytest
from flax import nnx

from pallas_kernels.versions import kernels_obstacle

# The name was `pure` before flax 0.12.4.
as_pure = getattr(nnx, "as_pure", None) or nnx.pure
# XLA before jax 0.11 rounds a few numbers apart in two programs of the same step.
_ROUNDS_APART = jax.__version_info__ < (0, 11)
ROUNDING = 1e-5 if _ROUNDS_APART else 0.0
same_bits = pytest.mark.skipif(_ROUNDS_APART, reason="older XLA rounds programs apart")
needs_kernels = pytest.mark.skipif(
    kernels_obstacle() is not None, reason=str(kernels_obstacle())
)
