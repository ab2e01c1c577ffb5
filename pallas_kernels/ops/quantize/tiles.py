"""The kernel that quantizes tiles of 128 x 128, and transposes them, in one pass.

A thread block has one warpgroup and one tile, which the copy engine (TMA) brings into
shared memory. A lane then has a row of the tile. For scales of the transpose's rows,
which are columns of the tile, the tile is loaded a second time, in the layout of the
tensor cores: there the maximum over rows takes few exchanges between lanes.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.mosaic import core as mosaic
from pallas_kernels.mosaic.codec import scale_of_bits, strip_layout, total_max
from pallas_kernels.mosaic.elementwise import strips_of
from pallas_kernels.numerics import GROUP, Scaled, magnitude_bits, normal, reciprocal

SIZE = 128  # Rows and columns of a tile, and of a block "128x128".
_STRIP = SIZE, GROUP
_PART = 64  # Columns of a part of a tile that is in registers at a time.
_SWIZZLED = 128  # Bytes of a row of shared memory that are swizzled together.


@functools.partial(jax.jit, static_argnames=("row", "transposed", "dtype"))
def run(
    x: Float[Array, "r c"], *, row: str | None, transposed: str | None, dtype: DTypeLike
) -> tuple[Scaled | None, Scaled | None]:
    """Computes the results of `quantize_blocks` with the kernel."""
    r, c = x.shape
    shapes = (row, (r, c)), (transposed, (c, r))
    # In memory, the first axis of scales is the contracted axis.
    outputs = [
        None
        if block is None
        else Scaled(
            jax.ShapeDtypeStruct((m, k), dtype),
            jax.ShapeDtypeStruct(
                (k // SIZE, m if block == "1x128" else m // SIZE), jnp.float32
            ),
        )
        for block, (m, k) in shapes
    ]

    def kernel(x, out, tile, barrier, codes, inverses):
        place = lax.axis_index("rows"), lax.axis_index("columns")
        rows, columns = (pl.ds(i * SIZE, SIZE) for i in place)
        plgpu.copy_gmem_to_smem(x.at[rows, columns], tile, barrier)
        plgpu.barrier_wait(barrier)
        if transposed == "1x128":
            _scale_columns(tile, out[1].scale.at[place[0], columns], inverses, dtype)
        # The tile is loaded again when it is encoded, so it is not kept in registers.
        bits = (magnitude_bits(strip) for _, strip in _strips(tile))
        largest = functools.reduce(jnp.maximum, bits)
        whole = of_row = of_column = None
        if "128x128" in (row, transposed):
            whole = scale_of_bits(total_max(largest), dtype)
            of_row = of_column = reciprocal(whole)
        if row == "1x128":
            scale = scale_of_bits(jnp.max(largest, axis=1), dtype)
            mosaic.store(out[0].scale.at[place[1], rows], scale)
            of_row = _spread(reciprocal(scale), 0)
        elif row is not None:
            out[0].scale[place[1], place[0]] = whole
        if transposed == "128x128":
            out[1].scale[place] = whole
        for at, strip in _strips(tile):
            if row is not None:
                mosaic.store(codes[0].at[:, at], _encoded(strip, of_row, dtype))
            if transposed == "1x128":
                layout = strip_layout(_STRIP).reduce(0)
                own = plgpu.load(inverses.at[at], layout=layout, optimized=False)
                of_column = _spread(own, 1)
            if transposed is not None:
                # A lane stores its codes of one row as a column, byte by byte.
                column = plgpu.layout_cast(
                    _encoded(strip, of_column, dtype),
                    plgpu.Layout.TCGEN05_TMEM_NATIVE(1),
                )
                mosaic.store(codes[1].at[at].transpose((1, 0)), column)
        plgpu.commit_smem()
        for copy, staged, to in zip(
            out, codes, ((rows, columns), (columns, rows)), strict=True
        ):
            if copy is not None:
                plgpu.copy_smem_to_gmem(staged, copy.codes.at[to])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @jax.custom_batching.sequential_vmap
    def launch(x):
        staged = plgpu.SMEM((SIZE, SIZE), dtype)
        (out,) = mosaic.kernel(
            kernel,
            out_type=(outputs,),
            kernel_name="quantize_blocks",
            grid=(r // SIZE, c // SIZE),
            grid_names=("rows", "columns"),
            scratch_types={
                "tile": _tile(x.dtype),
                "barrier": plgpu.Barrier(),
                "codes": [None if copy is None else staged for copy in outputs],
                "inverses": plgpu.SMEM((SIZE,), jnp.float32),
            },
            compiler_params=mosaic.by_lanes(),
        )(x)
        return out

    return tuple(copy and Scaled(copy.codes, copy.scale.T) for copy in launch(x))


def _tile(dtype: DTypeLike) -> Any:
    """Returns the shared memory of a tile, swizzled against bank conflicts."""
    width = _SWIZZLED // jnp.dtype(dtype).itemsize
    transforms = plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(_SWIZZLED)
    return plgpu.SMEM((SIZE, SIZE), dtype, transforms=transforms)


def _scale_columns(tile: Any, scales: Any, inverses: Any, dtype: DTypeLike) -> None:
    """Computes the scales of a tile's columns, and stores them.

    Args:
      tile: The tile in shared memory.
      scales: The scales to write in global memory.
      inverses: The reciprocals of scales to write in shared memory, for all lanes.
      dtype: The dtype of the codes.
    """
    for start in range(0, SIZE, _PART):
        at = pl.ds(start, _PART)
        layout = plgpu.Layout.WGMMA
        part = plgpu.load(tile.at[:, at], layout=layout, optimized=False)
        bits = magnitude_bits(part.astype(jnp.float32))
        scale = scale_of_bits(jnp.max(bits, axis=0), dtype)
        mosaic.store(scales.at[at], scale)
        mosaic.store(inverses.at[at], reciprocal(scale))
    plgpu.commit_smem()


def _strips(tile: Any) -> Iterator[tuple[Any, Array]]:
    """Yields the columns of each strip of a tile, and the strip in float32.

    Few strips are in registers at a time.
    """
    for start in range(0, SIZE, _PART):
        part = strips_of(tile.at[:, pl.ds(start, _PART)])
        for i, load in enumerate(part):
            yield pl.ds(start + i * GROUP, GROUP), load().astype(jnp.float32)


def _encoded(strip: Array, inverse: Array, dtype: DTypeLike) -> Array:
    # Rounding the scale leaves numbers at most a percent above the largest code. They
    # round to that code, so saturation is not needed.
    return (normal(strip) * inverse).astype(dtype)


def _spread(x: Array, axis: int) -> Array:
    """Broadcasts one number per row (axis 0) or column to a strip."""
    wide = lax.broadcast_in_dim(x, _STRIP, (axis,))
    return plgpu.layout_cast(wide, strip_layout(_STRIP))
