"""Checks of public functions' arguments.

Errors state what is required and what was given.
"""

import operator
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

CODES = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2))
WIDE = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))


def check_dtype(name: str, dtype: DTypeLike, allowed: tuple) -> None:
    """Raises ValueError unless `dtype` is allowed."""
    if jnp.dtype(dtype) not in allowed:
        names = " or ".join(map(str, allowed))
        raise ValueError(f"{name} must be {names}, got {jnp.dtype(dtype)}")


def check_shape(name: str, x: Array | None, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless `x` has this shape, or is None."""
    if x is not None and jnp.shape(x) != shape:
        raise ValueError(f"{name} must have the shape {shape}, got {jnp.shape(x)}")


def check_positive(**sizes: int) -> None:
    """Raises ValueError unless all sizes are positive."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be positive, got {size}")


def check_group(group: Any) -> int:
    """Returns a group size as an integer; raises ValueError unless it is positive."""
    try:
        size = operator.index(group)
    except TypeError:
        size = 0
    if size < 1:
        raise ValueError(f"group must be a positive integer, got {group!r}")
    return size


def scalar(name: str, x: Any, *others: str | None) -> Float[Array, ""] | str | None:
    """Returns a scalar as float32, or one of `others`; else raises ValueError."""
    if (x is None or isinstance(x, str)) and x in others:
        return x
    try:
        number = jnp.asarray(x, jnp.float32)
    except (TypeError, ValueError):
        number = None
    if number is None or number.ndim:
        got = repr(x) if number is None else f"the shape {number.shape}"
        raise ValueError(f"{name} must be a scalar, got {got}")
    return number
