"""Transposed copies of grouped rows, with groups at multiples of 128."""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.checks import CODES, WIDE, check_dtype, scalar
from pallas_kernels.dispatch import operations
from pallas_kernels.dispatch.axes import WHOLE, Axes
from pallas_kernels.mosaic import elementwise
from pallas_kernels.mosaic.strips import Blocks, Encoding, Tuning
from pallas_kernels.numerics import GROUP, encode, normal
from pallas_kernels.ops.grouped_matmul.checks import check_groups
from pallas_kernels.ops.grouped_matmul.tiles import BLOCK, padded_rows, padded_starts
from pallas_kernels.ops.quantize.groups import numbers
from pallas_kernels.ops.quantize.tensor import as_stored

_BYTES = 128  # Bytes of each row that a thread block reads.
# Rows at an index are copied one by one, and wider blocks need fewer copies.
_BYTES_AT_INDEX = 256


def grouped_transpose(
    x: Float[Array, "rows n"],
    group_sizes: Int[Array, " groups"],
    scale: Float[Array, ""] | None = None,
    index: Int[Array, " rows"] | None = None,
    *,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    implementation: operations.Implementation | None = None,
) -> Float[Array, "n padded"]:
    """Transposes rows in groups, for `grouped_weight_gradient`.

    The columns of each group begin at the first multiple of 128 after the previous
    group. The columns between groups and after them are zeros. There are
    `padded_rows(rows, groups)` columns. With a scale the result is quantized as by
    `quantize_tensor`, in the same pass. With an index the function transposes the rows
    `x[index]`, but does not write them to memory first.

    Args:
      x: Rows that are sorted by group, bfloat16 or float32; without a scale they may
        also be codes. Rows after the last group have no effect.
      group_sizes: The number of rows of each group, int32.
      scale: A per-tensor scale, with which the result is quantized, or None.
      index: The rows of `x` to take, int32, in the order of groups; None means all rows
        in their order. Entries in groups must be rows of `x`, which is not checked.
        With an index `x` must be codes.
      dtype: The dtype of the codes, if there is a scale.
      implementation: The implementation; None means the kernel where it can run.

    Raises:
      ValueError: If a dtype or shape is not supported, or the kernel was named and
        cannot run.

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
    check_dtype("x", x.dtype, WIDE if scale is not None else (*WIDE, *CODES))
    if scale is not None:
        check_dtype("codes", dtype, CODES)
        scale = scalar("scale", scale)
    if index is not None:
        check_dtype("rows with an index", x.dtype, CODES)
        check_dtype("index", index.dtype, (jnp.int32,))
        if index.ndim != 1:
            raise ValueError(f"index must be a vector, got shape {index.shape}")
    operation = _GroupedTranspose(dtype=jnp.dtype(x.dtype if scale is None else dtype))
    return operation(x, group_sizes, scale, index, implementation=implementation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _GroupedTranspose(operations.Operation):
    """The operation of `grouped_transpose`, with results of `dtype`."""

    dtype: jnp.dtype
    name = "grouped_transpose"

    def obstacle(self, x, group_sizes, scale, index) -> str | None:
        rows, n = x.shape
        if index is not None:
            if not rows:
                return "there are no rows"
            rows = len(index)
        step = GROUP if x.dtype in CODES else _columns(x)
        if scale is None and x.dtype == jnp.float32:
            return "without a scale it takes no float32"
        if rows < BLOCK or n % step or not n:
            least = f"{BLOCK} rows or more of a multiple of {step} elements"
            return f"it takes {least}, got {rows} of {n}"
        return None

    def reference(self, x, group_sizes, scale, index) -> Array:
        rows = x if index is None else _rows_at(x, index)
        padded = pad_groups(rows, group_sizes)
        if scale is not None:
            padded = encode(normal(padded.astype(jnp.float32)), scale, self.dtype)
        return lax.optimization_barrier(padded).T

    def axes(self, x, group_sizes, scale, index) -> tuple:
        of_index = None if index is None else Axes("_")
        return (Axes("_ n"), Axes("_"), WHOLE, of_index), Axes("n _")

    def kernel(self, x, group_sizes, scale, index) -> Array:
        # The copy engine copies rows at an index in parts of 128 columns only. Columns
        # that a mesh splits may have another number.
        if index is not None and x.shape[1] % _BYTES:
            x, index = _rows_at(x, index), None
        columns = _columns(x)
        if index is not None and not x.shape[1] % _BYTES_AT_INDEX:
            columns = _BYTES_AT_INDEX
        dtype, stored = self.dtype, x
        if scale is None:  # The kernel moves bits, so that it does not change NaNs.
            dtype = jnp.uint8 if x.dtype in CODES else jnp.uint16
            stored = lax.bitcast_convert_type(x, dtype)
        at = blocks(group_sizes, len(x if index is None else index))
        if index is not None:
            # The kernel copies 128 rows of each block, also those that it masks.
            index = jnp.pad(jnp.clip(index, 0, len(x) - 1), (0, BLOCK))
            at = at._replace(index=index)
        (out,) = elementwise.run(
            numbers if scale is not None else as_stored,
            (stored[:, None],),
            scale,
            blocks=at,
            name=self.name,
            encoding=Encoding(transposed=dtype),
            tuning=Tuning(columns=columns),
        )
        transposed = out.transposed[0]
        if scale is None:
            transposed = lax.bitcast_convert_type(transposed, self.dtype)
        return transposed


def _rows_at(
    x: Float[Array, "_ n"], index: Int[Array, " rows"]
) -> Float[Array, "rows n"]:
    """Returns the rows `x[index]`, with zeros for indices that are out of bounds."""
    return jnp.asarray(x).at[index].get(mode="fill", fill_value=0)


def _columns(x: Array) -> int:
    """Returns the number of columns that a thread block reads."""
    most = _BYTES // x.dtype.itemsize
    return min(most, x.shape[1]) if x.dtype in CODES else most


def blocks(group_sizes: Int[Array, " groups"], rows: int) -> Blocks:
    """Returns the blocks of rows that `grouped_transpose` transposes."""
    total = padded_rows(rows, len(group_sizes))
    return Blocks(*_sources(group_sizes, jnp.arange(0, total, BLOCK)))


def pad_groups(
    x: Float[Array, "rows n"], group_sizes: Int[Array, " groups"]
) -> Float[Array, "padded n"]:
    """Returns padded rows: groups begin at multiples of 128, with zeros in between."""
    total = padded_rows(len(x), len(group_sizes))
    source, count = _sources(group_sizes, jnp.arange(total))
    source = jnp.where(count > 0, source, len(x))
    return x.at[source].get(mode="fill", fill_value=0)


def _sources(
    group_sizes: Int[Array, " groups"], padded: Int[Array, " count"]
) -> tuple[Int[Array, " count"], Int[Array, " count"]]:
    """Finds the row of the unpadded array for some rows of the padded array.

    Args:
      group_sizes: The number of rows of each group, without padding.
      padded: The indices of rows in the padded array.

    Returns:
      For each index, the row of the unpadded array; and the number of rows from there
      to the end of the group, at most 128. Both are 0 where the padded array has zeros.
    """
    # Constant sizes may be a NumPy array, which a traced array cannot index.
    group_sizes = jnp.asarray(group_sizes)
    starts, ends = padded_starts(group_sizes), jnp.cumsum(group_sizes)
    # Groups begin in order, so a row is of the last group that has begun.
    group = jnp.sum(padded[:, None] >= starts[None, 1:], axis=1)
    within = padded - starts[group]
    size = group_sizes[group]
    count = jnp.clip(size - within, 0, BLOCK)
    source = jnp.where(count > 0, ends[group] - size + within, 0)
    return source.astype(jnp.int32), count.astype(jnp.int32)
