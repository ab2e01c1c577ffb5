"""Quantization of matrices with a scale per column, and their transposes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.checks import CODES, WIDE, check_dtype, check_shape
from pallas_kernels.dispatch import operations
from pallas_kernels.dispatch.axes import Axes
from pallas_kernels.mosaic import core as mosaic
from pallas_kernels.mosaic.codec import LANES, saturated, strip_layout
from pallas_kernels.mosaic.elementwise import Stages
from pallas_kernels.mosaic.strips import Encoding, Tuning, Walk, obstacle
from pallas_kernels.numerics import (
    GROUP,
    Scaled,
    code_max,
    encode,
    group_scale,
    magnitude,
    normal,
    reciprocal,
)


def quantize_columns(
    x: Float[Array, "count k n"],
    scale: Float[Array, "count n"] | None = None,
    *,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    implementation: operations.Implementation | None = None,
) -> Scaled:
    """Quantizes matrices with a scale per column, and transposes them.

    Codes and scales equal the results of `quantize_rows` of the transposed matrices.
    XLA computes the scales, and the kernel the codes: in two passes the matrices are
    read twice, and the codes are written once. With a given `scale` the matrices are
    read once.

    Args:
      x: Matrices, bfloat16 or float32.
      scale: The scale of each column, float32, with which codes are `x * (1 / scale)`,
        rounded to nearest even and saturated; None for amax / code_max. The reciprocal
        is correctly rounded for scales of 8 significant bits, and has an error in the
        last bit for some others. Codes are NaN where the scale or its reciprocal is not
        a normal number.
      dtype: The dtype of the codes, `float8_e4m3fn` or `float8_e5m2`.
      implementation: The implementation; None means the kernel where it can run.

    Returns:
      The codes [count, n, k] and the float32 scales [count, n].

    Raises:
      ValueError: If a dtype or shape is not supported, or the kernel was named and
        cannot run.

    Examples:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import quantize_columns
      >>> codes, scale = quantize_columns(jnp.array([[[1.0, -2.0], [0.5, 2.0]]]))
      >>> codes.tolist(), scale.shape
      ([[[448.0, 224.0], [-448.0, 448.0]]], (1, 2))
    """
    check_dtype("codes", dtype, CODES)
    check_dtype("x", x.dtype, WIDE)
    if x.ndim != 3:
        raise ValueError(f"x must be [count, k, n], got {x.shape}")
    if scale is not None:
        scale = jnp.asarray(scale)
        check_dtype("scale", scale.dtype, (jnp.dtype(jnp.float32),))
        check_shape("scale", scale, (len(x), x.shape[2]))
    operation = _QuantizeColumns(dtype=jnp.dtype(dtype))
    return operation(x, scale, implementation=implementation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _QuantizeColumns(operations.Operation):
    """The operation of `quantize_columns`."""

    dtype: jnp.dtype
    name = "quantize_columns"

    def obstacle(self, x, scale) -> str | None:
        count, k, n = x.shape
        if k % LANES:
            return f"columns must have a multiple of {LANES} elements, got {k}"
        return obstacle(count * k, 1, n, transposed=True)

    def reference(self, x, scale) -> Scaled:
        scale = self._scale(x) if scale is None else scale
        codes = encode(normal(x.astype(jnp.float32)), scale[:, None], self.dtype)
        return Scaled(lax.optimization_barrier(codes).swapaxes(1, 2), scale)

    def axes(self, x, scale) -> tuple:
        of_scale = None if scale is None else Axes("c n")
        return (Axes("c _ n"), of_scale), Scaled(Axes("c n _"), Axes("c n"))

    def kernel(self, x, scale) -> Scaled:
        scale = self._scale(x) if scale is None else scale
        run = functools.partial(_run, dtype=self.dtype)
        codes = jax.custom_batching.sequential_vmap(run)(x, reciprocal(scale))
        return Scaled(codes, scale)

    def _scale(self, x: Array) -> Float[Array, "count n"]:
        # XLA would transpose some matrices if `normal` were applied before the amax.
        largest = normal(magnitude(x.astype(jnp.float32), axis=1))
        return group_scale(largest, code_max(self.dtype))


@functools.partial(jax.jit, static_argnames="dtype")
def _run(
    x: Float[Array, "count k n"], inverse: Float[Array, "count n"], *, dtype: DTypeLike
) -> Float[Array, "count n k"]:
    """Computes the transposed codes of x * inverse."""
    count, k, n = x.shape
    encoding = Encoding(transposed=dtype)
    walk = Walk.of((count * k, 1, n // GROUP, GROUP), encoding, Tuning())
    columns = walk.columns * GROUP
    operand = x.reshape(count * k, 1, n)
    return mosaic.kernel(
        functools.partial(_kernel, walk, k),
        out_type=jax.ShapeDtypeStruct((count, n, k), dtype),
        kernel_name="quantize_columns",
        grid=(walk.ctas,),
        grid_names=("cta",),
        scratch_types={
            "tile": plgpu.SMEM((columns, LANES), dtype),
            "stages": Stages.of((operand,), walk),
        },
        compiler_params=mosaic.by_lanes(),
    )(operand, inverse)


def _kernel(walk: Walk, k: int, x, inverse, out, *, tile, stages) -> None:
    cta = lax.axis_index("cta")
    row, group = walk.start(cta)
    matrix, within = lax.div(row, k), lax.rem(row, k)
    layout = strip_layout((LANES, GROUP))
    for j, strips in enumerate(stages.strips((x,), walk, cta)):
        (value,) = strips()
        of_strip = inverse.at[matrix, pl.ds((group + j) * GROUP, GROUP)]
        by = plgpu.load(of_strip, layout=layout.reduce(0), optimized=False)
        by = plgpu.layout_cast(lax.broadcast_in_dim(by, value.shape, (1,)), layout)
        codes = saturated(normal(value.astype(jnp.float32)) * by, out.dtype)
        codes = plgpu.layout_cast(codes, plgpu.Layout.TCGEN05_TMEM_NATIVE(1))
        to = tile.at[pl.ds(j * GROUP, GROUP)]
        mosaic.store(to.transpose((1, 0)), codes)
    plgpu.commit_smem()
    columns = pl.ds(group * GROUP, walk.columns * GROUP)
    plgpu.copy_smem_to_gmem(tile, out.at[matrix, columns, pl.ds(within, LANES)])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
