"""The FP8 matmul kernel for Hopper GPUs.

Persistent thread blocks go over the output tiles. Their warpgroups are cooperative and
share the rows of a tile, or they are ping-pong and take turns with tiles. When all have
read a stage of shared memory, one of them starts the copies that fill it again, so that
the copy engine does not stop between tiles.

There is no warpgroup for loading alone. It would have to pass registers on to the
others, which need more than a warpgroup starts with. But if nvJitLink is installed, JAX
0.12 compiles kernels with it, and it ignores requests for registers (`setmaxnreg`).
"""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.dispatch import devices
from pallas_kernels.mosaic import core as mosaic
from pallas_kernels.ops.matmul.plan import (
    BLOCK,
    PIECE_M,
    SCALES,
    TILE_K,
    Product,
    Tuning,
    tile_k,
)
from pallas_kernels.ops.matmul.tile import Tile
from pallas_kernels.ops.matmul.walk import Stages, Walk


# `jit` traces the kernel once for all calls with the same shapes.
@functools.partial(jax.jit, static_argnames=("product", "tuning", "sms"))
def run(
    product: Product,
    a: Array,
    b: Array,
    a_scale: Array,
    b_scale: Array,
    more: tuple[Array, ...],
    tuning: Tuning,
    sms: int,
) -> tuple[Array, ...]:
    """Computes the matmul a @ b.T of a [m, k] and b [n, k].

    Either of them can be stored as [parts, rows, groups, c] instead of [rows, k], with
    k = groups * parts * c, if c is a multiple of 128. The order of columns is then the
    order of groups, within a group of parts, and within a part of c.

    The scales of a and b have these shapes:

    - Per-tensor: [1] and [1].
    - Per-token: [m] and [n], or [m] and [1]; in the latter case b's scale is 1.
    - Per-block: [k / 128, m] and [k / 128, n / 128]. The last axis of b's scales is
      padded to a multiple of 32.

    `more` has the bias and the array to add, if there are any, or the cosines and sines
    of RoPE's angles, each [positions, size / 2].

    Returns:
      First a tuple: the result [m, n], or [n, m] if `tuning.transposed`; or queries,
      keys and values. Then the amax of each row of each tile, [tiles along n, m], or
      None if it is not wanted.
    """
    if tuning.stages < (held := tuning.held(product)):
        raise ValueError(f"{tuning} needs {held} stages, or waits for ever")
    (m, k), (n, _) = (_sizes(x) for x in (a, b))
    walk = Walk(tuning, (m, n, k))
    return mosaic.kernel(
        functools.partial(_kernel, product, walk),
        out_type=_outputs(product, walk),
        scratch_types=scratch(product, tuning, a.dtype, b.dtype),
        kernel_name=product.name,
        **settings(tuning, walk.total, sms),
    )(a, b, a_scale, b_scale, more)


def _sizes(x: Array) -> tuple[int, int]:
    """Returns the number of rows of an operand, and k."""
    rows = x.shape[-3] if x.ndim == 4 else x.shape[0]
    return rows, x.size // rows


def _outputs(product: Product, walk: Walk) -> tuple[tuple[Any, ...], Any]:
    m, n = walk.shape
    columns = (n,)
    if product.heads is not None:
        own = n // (product.heads.queries + 2)
        columns = (product.heads.queries * own, own, own) * product.copies
    shapes = [(c, m) if walk.tuning.transposed else (m, c) for c in columns]
    found = [jax.ShapeDtypeStruct(shape, product.out_dtype) for shape in shapes]
    tiles = -(-n // walk.tuning.tile_n)
    maxima = jax.ShapeDtypeStruct((tiles, m), jnp.float32)
    return tuple(found), maxima if product.maxima else None


def settings(tuning: Tuning, tiles: int, sms: int) -> dict[str, Any]:
    """Returns the launch settings of a kernel that computes `tiles` tiles.

    With clusters, `tiles` counts pairs of tiles. `sms` is the number of
    multiprocessors.
    """
    blocks = sms // (2 if tuning.cluster else 1)
    pair = dict(cluster=(2,), cluster_names=("pair",)) if tuning.cluster else {}
    return dict(
        compiler_params=plgpu.CompilerParams(
            # Threads must wait for one another only where results are staged in
            # shared memory. `Tile` makes them wait there.
            unsafe_no_auto_barriers=True
        ),
        grid=(min(tiles, blocks),),
        grid_names=("sm",),
        num_threads=tuning.warpgroups,
        thread_name="warpgroup",
        **pair,
    )


def scratch(
    product: Product,
    t: Tuning,
    a_dtype: DTypeLike,
    b_dtype: DTypeLike,
    any_row: bool = False,
) -> dict[str, Any]:
    """Returns the shared memory of a matmul's thread block.

    The keys are the names of the kernel's arguments. With `any_row` the result is
    staged without tiles of 8 rows, so that a store can begin at any row of a subtile.
    """
    depth = tile_k(a_dtype)
    swizzled = (plgpu.TilingTransform((8, depth)), plgpu.SwizzleTransform(TILE_K))
    store_n = t.store_n(product)
    store_bytes = store_n * jnp.dtype(product.out_dtype).itemsize
    # The memory is the same with and without tiles of 8 rows, if rows have 128 bytes.
    tiled = () if any_row else (plgpu.TilingTransform((8, store_n)),)
    stored = (*tiled, plgpu.SwizzleTransform(store_bytes))
    barrier = plgpu.Barrier
    if t.cluster:
        barrier = functools.partial(plgpu.ClusterBarrier, collective_axes=("pair",))
    # Cooperative warpgroups all read a stage; of ping-pong warpgroups only one does.
    readers = t.warpgroups if t.together else 1
    scales, copies = {}, 2
    if product.scaling == "blocks":
        scales = dict(
            a_scale_smem=plgpu.SMEM((t.stages, t.tile_m), jnp.float32),
            b_scale_smem=plgpu.SMEM((t.stages, SCALES), jnp.float32),
        )
        copies = 4
    return scales | dict(
        a_smem=plgpu.SMEM((t.stages, t.tile_m, depth), a_dtype, transforms=swizzled),
        b_smem=plgpu.SMEM((t.stages, t.tile_n, depth), b_dtype, transforms=swizzled),
        out_smem=plgpu.SMEM(
            (t.warpgroups, 2 * TILE_K // store_bytes, PIECE_M, store_n),
            product.out_dtype,
            transforms=stored,
        ),
        filled=plgpu.Barrier(num_arrivals=copies, num_barriers=t.warpgroups * t.stages),
        free=barrier(num_arrivals=readers, num_barriers=t.warpgroups * t.stages),
    )


def _kernel(
    product: Product, walk: Walk, a, b, a_scale, b_scale, more, out, maxima,
    out_smem, **smem
) -> None:  # fmt: skip
    t, warpgroup = walk.tuning, lax.axis_index("warpgroup")
    scales = None
    if product.scaling == "blocks":
        scales = smem["a_scale_smem"], smem["b_scale_smem"]
    a_smem, b_smem = smem["a_smem"], smem["b_smem"]

    def copies(step, place, stage, filled):
        rows, columns = place.rows, place.columns
        parts = (_along_k(x, where, step) for x, where in ((a, rows), (b, columns)))
        copy_operands(t, parts, (a_smem.at[stage], b_smem.at[stage]), filled)
        if scales is not None:
            block = lax.div(columns.start, BLOCK)
            blocks = pl.ds(lax.div(block, SCALES) * SCALES, SCALES)
            for x, where, to in (
                (a_scale, rows, scales[0]),
                (b_scale, blocks, scales[1]),
            ):
                plgpu.copy_gmem_to_smem(x.at[step, where], to.at[stage], filled)

    stages = Stages(walk, a_smem, b_smem, smem["filled"], smem["free"], scales, copies)
    stages.fill()
    tile = Tile(product, t, stages, a_scale, b_scale, more, out, maxima, out_smem)
    compute_tiles(walk, tile, warpgroup)


def copy_operands(
    t: Tuning, parts: Iterable[Any], stage: tuple[Any, Any], filled: Any
) -> None:
    """Starts the copies of a step's parts of a and b into a stage.

    The thread blocks of a cluster share the copy of the operand that both read.
    """
    for x, to, axis in zip(parts, stage, "nm", strict=True):
        pair = "pair" if t.cluster == axis else None
        plgpu.copy_gmem_to_smem(x, to, filled, collective_axes=pair)


def compute_tiles(walk: Walk, tile: Tile, warpgroup: Array) -> None:
    """Computes a warpgroup's share of the tiles of its thread block."""
    t = walk.tuning

    @walk.tiles
    def _(visit):
        if t.together:
            tile.compute(visit, part=warpgroup)
        else:
            turn = lax.rem(visit.number, t.warpgroups) == warpgroup
            pl.when(turn)(lambda: tile.compute(visit, part=0))

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _along_k(x: Any, rows: Any, step: Array) -> Any:
    """Returns a ref to the part of an operand's `rows` in a step along k."""
    if len(x.shape) == 2:
        return x.at[rows, pl.ds(step * TILE_K, TILE_K)]
    parts, _, _, c = x.shape
    steps = c // TILE_K
    # The divisors are constants, so that no division is a function call.
    part, within = lax.div(step, steps), lax.rem(step, steps)
    group, part = lax.div(part, parts), lax.rem(part, parts)
    return x.at[part, rows, group, pl.ds(within * TILE_K, TILE_K)]


def launch(
    product: Product,
    arrays: tuple[Array, Array, Array, Array],
    more: tuple[Array, ...],
    tuning: Tuning,
) -> tuple[tuple[Array, ...], Array | None]:
    """Runs the kernel on operands and scales as `Operands.readable` returns them.

    Returns:
      The arrays of `run`; and the amax of parts of the result, a float32 vector,
      rounded like the result, or None.
    """

    @jax.custom_batching.sequential_vmap
    def kernel(a, b, a_scale, b_scale, more):
        if product.scaling == "tensor":
            a_scale, b_scale = a_scale[None], b_scale[None]
        if product.scaling == "blocks":
            a_scale = a_scale.T
            b_scale = jnp.pad(b_scale.T, ((0, 0), (0, -b_scale.shape[0] % SCALES)))
        if tuning.transposed:
            a, b, a_scale, b_scale = b, a, b_scale, a_scale
        arrays = (a, b, a_scale, b_scale, more)
        return run(product, *arrays, tuning, devices.multiprocessors())

    out, largest = kernel(*arrays, more)
    return out, None if largest is None else stored_maxima(product, largest)


def stored_maxima(product: Product, largest: Float[Array, "..."]) -> Float[Array, " k"]:
    """Returns amaxes of the rounded result, from amaxes of float32 sums."""
    if product.out_dtype == jnp.bfloat16:
        largest = lax.reduce_precision(largest, 8, 7)
    return largest.reshape(-1)
