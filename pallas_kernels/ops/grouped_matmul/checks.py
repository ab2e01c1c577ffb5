"""Checks of the arguments of grouped matmuls."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.checks import CODES, check_dtype, check_positive, check_shape


def checked_scale(name: str, scale: Any, *shapes: tuple[int, ...]) -> Array | None:
    """Returns a scale in float32; raises ValueError unless it has one of `shapes`."""
    if scale is None:
        return None
    scale = jnp.asarray(scale, jnp.float32)
    if scale.shape not in shapes:
        allowed = " or ".join(map(str, shapes))
        raise ValueError(f"{name} must have the shape {allowed}, got {scale.shape}")
    return scale


def check_groups(group_sizes: Array, groups: int) -> None:
    """Raises ValueError unless there is an int32 size for each of the groups."""
    check_shape("group_sizes", group_sizes, (groups,))
    check_dtype("group_sizes", group_sizes.dtype, (jnp.dtype(jnp.int32),))
    check_positive(groups=groups)


def check_operands(a: Array, b: Array) -> None:
    """Raises ValueError unless both are bfloat16, or codes with at least one e4m3."""
    dtypes = {jnp.dtype(a.dtype), jnp.dtype(b.dtype)}
    if dtypes == {jnp.dtype(jnp.bfloat16)}:
        return
    if not dtypes <= set(CODES) or CODES[0] not in dtypes:
        raise ValueError(
            "a and b must be e4m3, or one of them e5m2, or both bfloat16, got "
            f"{a.dtype} and {b.dtype}"
        )
