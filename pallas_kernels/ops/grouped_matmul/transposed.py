"""Transposed copies of grouped rows, with groups at multiples of 128."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.checks import CODES
from pallas_kernels.ops.grouped_matmul.checks import check_groups
from pallas_kernels.ops.grouped_matmul.tiles import padded_rows, padded_starts
from pallas_kernels.ops.quantize.tensor import quantize_tensor, transpose


def grouped_transpose(
    x: Float[Array, "rows n"],
    group_sizes: Int[Array, " groups"],
    scale: Float[Array, ""] | None = None,
    *,
    dtype: DTypeLike = jnp.float8_e4m3fn,
) -> Float[Array, "n padded"]:
    """Transposes rows in groups, for `grouped_weight_gradient`.

    The columns of each group begin at a multiple of 128, after the group before. The
    columns between groups and after them are zeros. There are `padded_rows(rows,
    groups)` columns.

    Args:
      x: Rows that are sorted by group, bfloat16 or float32; without a scale they may
        also be codes. Rows after the last group's are not read.
      group_sizes: The number of rows of each group, int32.
      scale: A per-tensor scale, with which the result is quantized, or None.
      dtype: The dtype of the codes, if there is a scale.

    Raises:
      ValueError: If a dtype or shape is not supported.

    Examples:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import grouped_transpose
      >>> x = jnp.array([[1.0], [2.0], [3.0], [4.0]], jnp.bfloat16)
      >>> y = grouped_transpose(x, jnp.array([2, 1], jnp.int32))
      >>> y.shape, y[0, :3].tolist(), y[0, 128:130].tolist()
      ((1, 256), [1.0, 2.0, 0.0], [3.0, 0.0])
    """
    check_groups(group_sizes, group_sizes.size)
    if x.ndim != 2:
        raise ValueError(f"x must be [rows, n], got {x.shape}")
    padded = pad_groups(x, group_sizes)
    if scale is not None:
        codes = quantize_tensor(padded, scale, dtype=dtype, copies="transposed")
        return codes.transposed
    return transpose(padded) if x.dtype in CODES else padded.T


def pad_groups(
    x: Float[Array, "rows n"], group_sizes: Int[Array, " groups"]
) -> Float[Array, "padded n"]:
    """Returns rows with each group at a multiple of 128 rows, and zeros between."""
    rows, groups = len(x), len(group_sizes)
    starts, ends = padded_starts(group_sizes), jnp.cumsum(group_sizes)
    row = jnp.arange(padded_rows(rows, groups))
    # Groups begin in order, so a row is of the last group that has begun.
    group = jnp.sum(row[:, None] >= starts[1:], axis=1)
    within = row - starts[group]
    source = jnp.where(
        within < group_sizes[group], ends[group] - group_sizes[group] + within, rows
    )
    return x.at[source].get(mode="fill", fill_value=0)
