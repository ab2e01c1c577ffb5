"""Transposed copies of grouped rows, with groups at multiples of 128."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.checks import CODES, WIDE, check_dtype, scalar
from pallas_kernels.dispatch import operations
from pallas_kernels.dispatch.axes import WHOLE, Axes
from pallas_kernels.mosaic import codec
from pallas_kernels.mosaic import core as mosaic
from pallas_kernels.mosaic.elementwise import strips_of
from pallas_kernels.numerics import GROUP, encode, normal
from pallas_kernels.ops.grouped_matmul.checks import check_groups
from pallas_kernels.ops.grouped_matmul.tiles import BLOCK, padded_rows, padded_starts
from pallas_kernels.ops.quantize.tensor import transpose

_BYTES = 128  # Bytes of each row that a thread block reads.


def grouped_transpose(
    x: Float[Array, "rows n"],
    group_sizes: Int[Array, " groups"],
    scale: Float[Array, ""] | None = None,
    *,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    implementation: operations.Implementation | None = None,
) -> Float[Array, "n padded"]:
    """Transposes rows in groups, for `grouped_weight_gradient`.

    The columns of each group begin at a multiple of 128, after the group before. The
    columns between groups and after them are zeros. There are `padded_rows(rows,
    groups)` columns. With a scale the result is quantized as by `quantize_tensor`, in
    the same pass.

    Args:
      x: Rows that are sorted by group, bfloat16 or float32; without a scale they may
        also be codes. Rows after the last group's have no effect.
      group_sizes: The number of rows of each group, int32.
      scale: A per-tensor scale, with which the result is quantized, or None.
      dtype: The dtype of the codes, if there is a scale.
      implementation: The implementation, if there is a scale; None means the kernel
        where it can run.

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
    if scale is None:
        check_dtype("x", x.dtype, (*WIDE, *CODES))
        padded = pad_groups(x, group_sizes)
        return transpose(padded) if x.dtype in CODES else padded.T
    check_dtype("x", x.dtype, WIDE)
    check_dtype("codes", dtype, CODES)
    operation = _GroupedTranspose(dtype=jnp.dtype(dtype))
    arrays = x, group_sizes, scalar("scale", scale)
    return operation(*arrays, implementation=implementation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _GroupedTranspose(operations.Operation):
    """`grouped_transpose` with a scale."""

    dtype: jnp.dtype
    name = "grouped_transpose"

    def obstacle(self, x, group_sizes, scale) -> str | None:
        (rows, n), columns = x.shape, _columns(x)
        if rows < BLOCK or n % columns:
            least = f"{BLOCK} rows or more of a multiple of {columns} elements"
            return f"it takes {least}, got {rows} of {n}"
        return None

    def reference(self, x, group_sizes, scale) -> Array:
        padded = pad_groups(x, group_sizes).astype(jnp.float32)
        return lax.optimization_barrier(encode(normal(padded), scale, self.dtype)).T

    def axes(self, x, group_sizes, scale) -> tuple:
        return (Axes("_ n"), Axes("_"), WHOLE), Axes("n _")

    def kernel(self, x, group_sizes, scale) -> Array:
        run = functools.partial(_run, dtype=self.dtype)
        return jax.custom_batching.sequential_vmap(run)(x, group_sizes, scale)


def _columns(x: Array) -> int:
    """Returns the number of columns that a thread block reads."""
    return _BYTES // x.dtype.itemsize


@functools.partial(jax.jit, static_argnames="dtype")
def _run(
    x: Float[Array, "rows n"],
    group_sizes: Int[Array, " groups"],
    scale: Float[Array, ""],
    *,
    dtype: DTypeLike,
) -> Float[Array, "n padded"]:
    """Quantizes and transposes with the kernel."""
    (rows, n), columns = x.shape, _columns(x)
    total = padded_rows(rows, len(group_sizes))
    source, count = _sources(group_sizes, jnp.arange(0, total, BLOCK))
    return mosaic.kernel(
        functools.partial(_kernel, n // columns),
        out_type=jax.ShapeDtypeStruct((n, total), dtype),
        kernel_name="grouped_transpose",
        grid=(total // BLOCK * n // columns,),
        grid_names=("cta",),
        scratch_types={
            # Groups begin at any row. Rows of tiles of 8 would begin at multiples of 8.
            "tile": plgpu.SMEM(
                (BLOCK, columns),
                x.dtype,
                transforms=(plgpu.SwizzleTransform(_BYTES),),
            ),
            "transposed": plgpu.SMEM((columns, BLOCK), dtype),
            "barrier": plgpu.Barrier(num_arrivals=1),
        },
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            # The kernel loads from no memory that it stores to.
            unsafe_no_auto_barriers=True,
        ),
    )(x, source, count, scale.reshape(1))


def _kernel(
    across: int, x, source, count, scale, out, *, tile, transposed, barrier
) -> None:
    cta = lax.axis_index("cta")
    block, width = lax.div(cta, across), tile.shape[1]
    columns = pl.ds(lax.rem(cta, across) * width, width)
    # The copy engine reads zeros after the last row.
    rows = pl.ds(source[block], BLOCK)
    plgpu.copy_gmem_to_smem(x.at[rows, columns], tile, barrier)
    shape = (BLOCK, GROUP)
    layout = codec.strip_layout(shape)
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
    is_of_group = row < jnp.broadcast_to(count[block], shape)
    plgpu.barrier_wait(barrier)
    for j, strip in enumerate(strips_of(tile)):
        value = jnp.where(is_of_group, strip().astype(jnp.float32), 0.0)
        codes = codec.encode(normal(value), scale[0], out.dtype)
        # A lane holds 16 codes of one row and stores them as a column, byte by byte.
        codes = plgpu.layout_cast(codes, plgpu.Layout.TCGEN05_TMEM_NATIVE(1))
        to = transposed.at[pl.ds(j * GROUP, GROUP)]
        mosaic.store(to.transpose((1, 0)), codes)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(transposed, out.at[columns, pl.ds(block * BLOCK, BLOCK)])
    plgpu.wait_smem_to_gmem(0)


def pad_groups(
    x: Float[Array, "rows n"], group_sizes: Int[Array, " groups"]
) -> Float[Array, "padded n"]:
    """Returns rows with each group at a multiple of 128 rows, and zeros between."""
    total = padded_rows(len(x), len(group_sizes))
    source, count = _sources(group_sizes, jnp.arange(total))
    source = jnp.where(count > 0, source, len(x))
    return x.at[source].get(mode="fill", fill_value=0)


def _sources(
    group_sizes: Int[Array, " groups"], padded: Int[Array, " count"]
) -> tuple[Int[Array, " count"], Int[Array, " count"]]:
    """Returns the rows that stand at some padded rows.

    Returns:
      The row at each padded row, and the number of rows of its group from it on, at
      most 128; none between groups.
    """
    starts, ends = padded_starts(group_sizes), jnp.cumsum(group_sizes)
    # Groups begin in order, so a row is of the last group that has begun.
    group = jnp.sum(padded[:, None] >= starts[1:], axis=1)
    within = padded - starts[group]
    size = group_sizes[group]
    count = jnp.clip(size - within, 0, BLOCK)
    source = jnp.where(count > 0, ends[group] - size + within, 0)
    return source.astype(jnp.int32), count.astype(jnp.int32)
