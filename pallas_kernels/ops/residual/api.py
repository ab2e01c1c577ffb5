"""Sums of two arrays, quantized: residual connections, forward and backward."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import dispatch
from pallas_kernels.checks import CODES, WIDE, check_dtype, check_group, scalar
from pallas_kernels.mosaic import elementwise
from pallas_kernels.mosaic.codec import decode, round_to_bfloat16
from pallas_kernels.mosaic.strips import Encoding, Tuning
from pallas_kernels.numerics import Groups
from pallas_kernels.ops.quantize.api import (
    Wanted,
    copies_obstacle,
    copies_of,
    flat,
    flat_obstacle,
    in_tokens,
    wanted,
)
from pallas_kernels.ops.residual import reference
from pallas_kernels.ops.residual.reference import Summed


def add_quantize_groups(
    x: Float[Array, "... n"],
    y: Float[Array, "... n"],
    *,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    group: int = 16,
    implementation: dispatch.Implementation | None = None,
    tuning: Tuning | None = None,
) -> Summed:
    """The sum x + y, rounded to their dtype, and it as `quantize_groups` has it.

    Args:
      x: bfloat16 or float32.
      y: The same dtype and shape.
      dtype: `float8_e4m3fn` or `float8_e5m2`.
      group: Elements of a group.
      implementation: What to run; None means the kernel where it can run.
      tuning: How to lay the kernel over the GPU.

    Raises:
      ValueError: If the arguments contradict each other, or the kernel was named and
        cannot run.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import add_quantize_groups
      >>> x = jnp.ones((2, 16), jnp.bfloat16)
      >>> out = add_quantize_groups(x, 6 * x)
      >>> float(out.total.max()), out.groups.codes.shape, out.groups.scale.shape
      (7.0, (2, 16), (2, 1))
    """
    _check(x, y, dtype)
    group = check_group(group)
    chosen = dispatch.choose(
        implementation,
        flat_obstacle(x, group),
        operation="add_quantize_groups",
        arrays=(x, y),
    )
    if chosen == "reference":
        return reference.add_quantize_groups(x, y, dtype=dtype, group=group)
    (out,) = elementwise.run(
        _sum,
        (flat(x), flat(y)),
        name="add_quantize_groups",
        encoding=Encoding(wide=x.dtype, groups=dtype),
        group=group,
        tuning=tuning,
    )
    codes, scale = out.groups
    groups = Groups(codes.reshape(x.shape), scale.reshape(*x.shape[:-1], -1))
    return Summed(out.wide.reshape(x.shape), groups=groups)


def add_quantize_tensor(
    x: Float[Array, "... n"],
    y: Float[Array, "... n"],
    scale: Float[Array, ""],
    *,
    dtype: DTypeLike = jnp.float8_e5m2,
    copies: Wanted = "row",
    implementation: dispatch.Implementation | None = None,
    tuning: Tuning | None = None,
) -> Summed:
    """The sum x + y, rounded to their dtype, and it as `quantize_tensor` has it.

    Args:
      x: bfloat16 or float32.
      y: The same dtype and shape.
      scale: A float32 scalar, as of `quantize_tensor`.
      dtype: Of the codes, `float8_e4m3fn` or `float8_e5m2`.
      copies: Which of the codes [..., n] and their transpose [n, tokens] to return.
      implementation: What to run; None means the kernel where it can run.
      tuning: How to lay the kernel over the GPU.

    Raises:
      ValueError: If the arguments contradict each other, or the kernel was named and
        cannot run.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import add_quantize_tensor
      >>> x = jnp.ones((2, 16), jnp.bfloat16)
      >>> out = add_quantize_tensor(x, x, jnp.float32(0.5), copies="transposed")
      >>> float(out.largest.max()), float(out.transposed[0, 0])
      (2.0, 4.0)
    """
    _check(x, y, dtype)
    scale = scalar("scale", scale)
    row, transposed = wanted(copies)
    obstacle = copies_obstacle(x.shape, transposed)
    chosen = dispatch.choose(
        implementation, obstacle, operation="add_quantize_tensor", arrays=(x, y)
    )
    if chosen == "reference":
        return reference.add_quantize_tensor(
            x, y, scale, dtype=dtype, row=row, transposed=transposed
        )
    view = in_tokens if transposed else flat
    (out,) = elementwise.run(
        _sum,
        (view(x), view(y)),
        scale,
        name="add_quantize_tensor",
        encoding=Encoding(
            wide=x.dtype,
            row=dtype if row else None,
            transposed=dtype if transposed else None,
            maxima=True,
        ),
        tuning=tuning,
    )
    codes = copies_of(out, x.shape)
    return Summed(
        out.wide.reshape(x.shape),
        row=codes.row,
        transposed=codes.transposed,
        largest=out.maxima,
    )


def _check(x: Array, y: Array, dtype: DTypeLike) -> None:
    check_dtype("codes", dtype, CODES)
    check_dtype("x", x.dtype, WIDE)
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        raise ValueError(
            f"x and y must be alike, got {x.dtype}{x.shape} and {y.dtype}{y.shape}"
        )


def _sum(x: Array, y: Array) -> tuple[Array]:
    total = decode(x) + decode(y)
    return (round_to_bfloat16(total) if x.dtype == jnp.bfloat16 else total,)
