"""The kernel that quantizes columns, each with a scale of its own, and transposes them.

The array is read once. The thread blocks of a cluster hold a strip of columns in shared
memory, each some of its rows, and tell each other what is largest in these.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import mosaic
from pallas_kernels.codec import (
    GROUP,
    LANES,
    floats,
    magnitude_bits,
    saturated,
    strip_layout,
)
from pallas_kernels.elementwise import strips_of, swizzled
from pallas_kernels.reference.quantize import Columns, normal, power_scale, reciprocal

_BLOCKS = 8  # Of a cluster, which share a strip.
_WIDTHS = (32, 16)  # Of strips, in columns.
_SHARED = 220 * 1024  # Bytes of shared memory for a thread block's tiles.


def obstacle(shape: tuple[int, int], dtype: DTypeLike) -> str | None:
    """Why the kernel cannot quantize the columns of an array, if so."""
    rows, n = shape
    if rows < _BLOCKS * LANES or rows % (_BLOCKS * GROUP):
        least, multiple = _BLOCKS * LANES, _BLOCKS * GROUP
        return f"it takes {least} rows or more, a multiple of {multiple}, got {rows}"
    if n < min(_WIDTHS) or n % GROUP:
        return f"columns must be a multiple of {GROUP}, got {n}"
    if _width(shape, dtype) is None:
        return f"{rows} rows are more than shared memory holds"
    return None


def _width(shape: tuple[int, int], dtype: DTypeLike) -> int | None:
    """Columns of a strip."""
    rows, n = shape
    row_bytes = _tiles(rows) * LANES * jnp.dtype(dtype).itemsize
    return next((w for w in _WIDTHS if w <= n and w * row_bytes <= _SHARED), None)


def _tiles(rows: int) -> int:
    """Tiles of a thread block; the last one may overlap the one before."""
    return -(-rows // (_BLOCKS * LANES))


@functools.partial(jax.jit, static_argnames="dtype")
def run(x: Float[Array, "tokens n"], *, dtype: DTypeLike) -> Columns:
    """Quantizes an array for which there is no `obstacle`."""
    rows, n = x.shape
    width, tiles, own = _width(x.shape, x.dtype), _tiles(rows), rows // _BLOCKS
    strips = -(-n // width)
    parts = range(width // GROUP)
    layout = strip_layout((LANES, GROUP))

    def kernel(x, out, largest, staged, transposed, maxima, scales, filled, told, met):
        strip, block = lax.axis_index("strip"), lax.axis_index("block")
        columns = pl.ds(jnp.minimum(strip * width, n - width), width)

        def place(tile):
            first = block * own + jnp.minimum(tile * LANES, own - LANES)
            return pl.ds(first, LANES)

        @pl.loop(0, tiles)
        def _(tile):
            source = x.at[place(tile), columns]
            plgpu.copy_gmem_to_smem(source, staged.at[tile], filled.at[tile])

        def strips_at(tile):
            return [load().astype(jnp.float32) for load in strips_of(staged.at[tile])]

        def larger(tile, so_far):
            plgpu.barrier_wait(filled.at[tile])
            pairs = zip(so_far, strips_at(tile), strict=True)
            return [jnp.maximum(before, jnp.abs(value)) for before, value in pairs]

        zero = plgpu.layout_cast(jnp.zeros((LANES, GROUP), jnp.float32), layout)
        found = lax.fori_loop(0, tiles, larger, [zero] * len(parts))
        for part, value in zip(parts, found, strict=True):
            value = plgpu.layout_cast(value, plgpu.Layout.TCGEN05_TMEM_NATIVE(1))
            maxima.at[block, _group(part)][...] = _column_max(value)
        # By the copy engine: arrivals order nothing else between thread blocks.
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(maxima.at[block], largest.at[strip, block])
        plgpu.wait_smem_to_gmem(0)
        plgpu.barrier_arrive(met)
        plgpu.barrier_wait(met)
        plgpu.copy_gmem_to_smem(largest.at[strip], maxima, told)
        plgpu.barrier_wait(told)
        for part in parts:
            every = plgpu.load(
                maxima.at[:, _group(part)],
                layout=strip_layout((_BLOCKS, GROUP)),
                optimized=False,
            )
            scales.at[_group(part)][...] = power_scale(_column_max(every), dtype)
        plgpu.commit_smem()

        @pl.when(block == 0)
        def _():
            plgpu.copy_smem_to_gmem(scales, out.scale.at[columns])

        def inverse(part):
            of_columns = plgpu.load(
                scales.at[_group(part)], layout=layout.reduce(0), optimized=False
            )
            wide = lax.broadcast_in_dim(of_columns, (LANES, GROUP), (1,))
            return reciprocal(plgpu.layout_cast(wide, layout))

        inverses = [inverse(part) for part in parts]

        @pl.loop(0, tiles)
        def _(tile):
            codes = transposed.at[lax.rem(tile, 2)]
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            for part, value in zip(parts, strips_at(tile), strict=True):
                value = saturated(normal(value) * inverses[part], dtype)
                value = plgpu.layout_cast(value, plgpu.Layout.TCGEN05_TMEM_NATIVE(1))
                codes.at[_group(part)].transpose((1, 0))[...] = value
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(codes, out.codes.at[columns, place(tile)])

        plgpu.wait_smem_to_gmem(0)

    swizzle = swizzled(x.dtype, width)
    found, _ = mosaic.kernel(
        kernel,
        out_type=(
            Columns(
                jax.ShapeDtypeStruct((n, rows), dtype),
                jax.ShapeDtypeStruct((n,), jnp.float32),
            ),
            jax.ShapeDtypeStruct((strips, _BLOCKS, width), jnp.float32),
        ),
        kernel_name="quantize_columns",
        grid=(strips,),
        grid_names=("strip",),
        cluster=(_BLOCKS,),
        cluster_names=("block",),
        scratch_types=dict(
            staged=plgpu.SMEM((tiles, LANES, width), x.dtype, transforms=swizzle),
            transposed=plgpu.SMEM((2, width, LANES), dtype),
            maxima=plgpu.SMEM((_BLOCKS, width), jnp.float32),
            scales=plgpu.SMEM((width,), jnp.float32),
            filled=plgpu.Barrier(num_barriers=tiles),
            told=plgpu.Barrier(),
            met=plgpu.ClusterBarrier(collective_axes=("block",)),
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=LANES * GROUP * 4,
            # Threads wait for each other where they share memory.
            unsafe_no_auto_barriers=True,
        ),
    )(x)
    return found


def _group(part: int) -> pl.Slice:
    return pl.ds(part * GROUP, GROUP)


def _column_max(x: Array) -> Array:
    """The largest magnitudes of columns, a NaN above all."""
    return floats(jnp.max(magnitude_bits(x), axis=0))
