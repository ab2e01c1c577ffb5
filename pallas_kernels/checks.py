"""Checks of public functions' arguments.

Errors state what is required and what was given.
"""

import contextlib
import functools
import math
import numbers
import operator
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

CODES = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2))
WIDE = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))


def summary(value: Any) -> str:
    """Returns the repr of a value, or its type if the repr is long or several lines."""
    text = repr(value)
    is_short = len(text) <= 200 and text.isprintable()
    return text if is_short else f"an object of the type {type(value).__name__}"


def check_dtype(name: str, dtype: DTypeLike, allowed: tuple) -> None:
    """Raises ValueError unless `dtype` is allowed."""
    if jnp.dtype(dtype) not in allowed:
        names = " or ".join(str(jnp.dtype(d)) for d in allowed)
        raise ValueError(f"{name} must be {names}, got {jnp.dtype(dtype)}")


def check_shape(name: str, x: Array | None, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless `x` has this shape, or is None."""
    if x is not None and jnp.shape(x) != shape:
        raise ValueError(f"{name} must have the shape {shape}, got {jnp.shape(x)}")


def check_positive(**sizes: Any) -> None:
    """Raises ValueError unless all sizes are positive integers."""
    for name, size in sizes.items():
        positive_int(name, size)


def check_sizes(**sizes: Any) -> None:
    """Raises ValueError unless all sizes are positive integers below 2**31."""
    for name, size in sizes.items():
        if positive_int(name, size) >= 2**31:
            raise ValueError(f"{name} must be below 2**31, got {size}")


def check_floating(**dtypes: Any) -> None:
    """Raises ValueError unless all dtypes are floating."""
    for name, dtype in dtypes.items():
        try:
            actual = jnp.dtype(dtype)
        except TypeError:  # "bf16", for one, is no name of a dtype.
            actual = None
        if actual is None or not jnp.issubdtype(actual, jnp.floating):
            value = repr(dtype) if actual is None else actual
            raise ValueError(f"{name} must be a floating dtype, got {value}")


def positive_int(name: str, value: Any) -> int:
    """Returns a size as an int; raises ValueError unless it is a positive integer.

    NumPy's integers count as integers, bools do not.
    """
    try:
        size = 0 if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        size = 0
    if size < 1:
        raise ValueError(f"{name} must be a positive int, got {value!r}")
    return size


def check_flags(**flags: Any) -> None:
    """Raises ValueError unless all values are bools, such as NumPy's."""
    for name, value in flags.items():
        if not isinstance(value, bool | np.bool_):
            raise ValueError(f"{name} must be True or False, got {summary(value)}")


def is_positive_number(x: Any) -> bool:
    """Returns whether `x` is a positive finite number other than a bool."""
    is_number = isinstance(x, numbers.Real) and not isinstance(x, bool | np.bool_)
    return is_number and 0 < x < math.inf


def scalar(name: str, x: Any, *others: str | None) -> Float[Array, ""] | str | None:
    """Returns a scalar as float32; raises ValueError for anything else.

    `others` are strings, or None, that are allowed in place of a number: such an `x`
    is returned unchanged. `name` is the name of `x` in the message.
    """
    if (x is None or isinstance(x, str)) and x in others:
        return x
    try:
        number = jnp.asarray(x, jnp.float32)
    except (TypeError, ValueError):
        number = None
    if number is None or number.ndim:
        actual = repr(x) if number is None else f"the shape {number.shape}"
        raise ValueError(f"{name} must be a scalar, got {actual}")
    return number


def typed_key(key: Any) -> Key[Array, ""]:
    """Returns a key as a typed key; a raw `jax.random.PRNGKey` is wrapped.

    Raises:
      ValueError: If `key` is not one key.
    """
    if getattr(key, "dtype", None) == jnp.uint32 and jnp.ndim(key) == 1:
        with contextlib.suppress(TypeError, ValueError):  # It has another length.
            key = jax.random.wrap_key_data(key)
    dtype = getattr(key, "dtype", None)
    is_typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not is_typed or jnp.shape(key):
        raise ValueError(f"key must be one jax.random.key, got {key!r}")
    return key


@functools.cache
def warn_once(message: str) -> None:
    """Warns with `message`, once in a process for each message."""
    warnings.warn(message, stacklevel=2)
