"""RoPE of attention heads, and the gradient of the columns that become heads.

The kernel of `join_heads` undoes RoPE in the heads' gradients, joins the gradients, and
quantizes them in one pass.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.checks import CODES, check_dtype, scalar
from pallas_kernels.dispatch import operations
from pallas_kernels.dispatch.axes import WHOLE, Axes
from pallas_kernels.mosaic import core as mosaic
from pallas_kernels.mosaic.codec import LANES, decode, strip_layout
from pallas_kernels.mosaic.elementwise import outputs, scratch_of, strips_of, tile_of
from pallas_kernels.mosaic.sink import Encoded, Sink
from pallas_kernels.mosaic.strips import Encoding, Walk
from pallas_kernels.numerics import GROUP, Codes, encode, normal, on_last_axes
from pallas_kernels.ops.quantize.tensor import maxima_in_jnp, transpose_in_jnp

_LARGEST_HEAD = 128
_STRIPS = 2  # The most strips of each half of a head that a thread block handles.


def join_heads(
    q: Float[Array, "b s n d"],
    k: Float[Array, "b s m d"],
    v: Float[Array, "b s m d"],
    cos: Float[Array, "*b s h"],
    sin: Float[Array, "*b s h"],
    scale: Float[Array, ""],
    *,
    dtype: DTypeLike = jnp.float8_e5m2,
    keep_maxima: bool = False,
    implementation: operations.Implementation | None = None,
) -> Codes:
    """Computes the gradient of the QKV projection's output, as per-tensor codes.

    This is the gradient of the columns that `matmul_heads` splits into heads. RoPE of
    queries and keys is undone in float32: the halves [a, b] of a head become
    [a cos + b sin, b cos - a sin]. For every key head the result has its queries, then
    its key, then its value. The codes stand for x / scale.

    Args:
      q: Gradients of queries, bfloat16.
      k: Gradients of keys, bfloat16; m divides n.
      v: Gradients of values, bfloat16.
      cos: Cosines of the positions' angles, float32, h = d / 2: [s, h], or [b, s, h] if
        sequences have different positions.
      sin: Sines of the positions' angles, float32.
      scale: The per-tensor scale, a float32 scalar, as for `quantize_tensor`.
      dtype: The dtype of the codes, `float8_e4m3fn` or `float8_e5m2`.
      keep_maxima: Whether to return the amax of parts of the unquantized result as
        well, like `quantize_tensor`.
      implementation: The implementation; None means the kernel where it can run.

    Returns:
      Codes [b, s, (n + 2 m) d] and their transpose [(n + 2 m) d, b s].

    Raises:
      ValueError: If the shapes do not match, `dtype` is not supported, or the kernel
        was named and cannot run.

    Examples:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import join_heads
      >>> q, k = jnp.ones((1, 3, 4, 8)), jnp.ones((1, 3, 2, 8))
      >>> angle = jnp.zeros((3, 4))
      >>> out = join_heads(q, k, k, jnp.cos(angle), jnp.sin(angle), jnp.float32(1))
      >>> out.row.shape, out.transposed.shape
      ((1, 3, 64), (64, 3))
    """
    check_dtype("codes", dtype, CODES)
    scale = scalar("scale", scale)
    b, s, n, d = q.shape
    m = k.shape[2]
    if k.shape != (b, s, m, d) or v.shape != k.shape or not m or n % m or d % 2:
        raise ValueError(
            "heads must be [b, s, n, d], [b, s, m, d] and [b, s, m, d], d even and n a "
            f"multiple of m, got {q.shape}, {k.shape} and {v.shape}"
        )
    check_angles(cos, sin, b, s, d // 2)
    operation = _JoinHeads(dtype=jnp.dtype(dtype), keep_maxima=keep_maxima)
    arrays = q, k, v, cos, sin, scale
    return operation(*arrays, implementation=implementation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _JoinHeads(operations.Operation):
    dtype: jnp.dtype
    keep_maxima: bool
    name = "join_heads"

    def obstacle(self, q, k, v, cos, sin, scale) -> str | None:
        return _obstacle(q, k, v, cos, sin)

    def reference(self, q, k, v, cos, sin, scale) -> Codes:
        b, s, m, d = k.shape
        q = turned(q, cos, -sin).reshape(b, s, m, -1, d)
        k = turned(k, cos, -sin)
        parts = [q, k[..., None, :], v.astype(jnp.float32)[..., None, :]]
        joined = jnp.concatenate(parts, axis=-2).reshape(b, s, -1)
        codes = lax.optimization_barrier(encode(normal(joined), scale, self.dtype))
        largest = maxima_in_jnp(joined) if self.keep_maxima else None
        return Codes(codes, transpose_in_jnp(codes), scale, largest)

    def axes(self, *arrays) -> tuple:
        heads, angles = Axes("b s _ _"), axes_of_angles(arrays[3])
        results = Codes(Axes("b s _"), Axes("_ (b s)"), WHOLE, Axes("_", reduced="max"))
        return (heads, heads, heads, angles, angles, WHOLE), results

    def kernel(self, q, k, v, cos, sin, scale) -> Codes:
        b, s, _, _ = q.shape
        encoding = Encoding(
            row=self.dtype,
            transposed=self.dtype,
            denormals=True,
            maxima=self.keep_maxima,
        )
        out = _run(q, k, v, cos, sin, scale, encoding=encoding)
        row, transposed = out.row.reshape(b, s, -1), out.transposed.reshape(-1, b * s)
        return Codes(row, transposed, scale, out.maxima)


def check_angles(cos: Array, sin: Array, b: int, s: int, half: int) -> None:
    """Raises ValueError unless cosines and sines are [s, half] or [b, s, half]."""
    if cos.shape not in ((s, half), (b, s, half)) or sin.shape != cos.shape:
        raise ValueError(
            f"angles must be {(s, half)} or {(b, s, half)}, got {cos.shape} and "
            f"{sin.shape}"
        )


def axes_of_angles(cos: Array) -> Axes:
    """Returns the axes of cosines [s, h] or [b, s, h] next to heads [b, s, n, d]."""
    return Axes("s _" if cos.ndim == 2 else "b s _")


def angles(
    length: int, dim: int, theta: float, start: Int[Array, "*b"] | int = 0
) -> tuple[Float[Array, "*b seq half"], Float[Array, "*b seq half"]]:
    """Returns cosines and sines of RoPE's angles, for heads of size `dim`.

    The angle of position p and pair i is `p * theta ** (-2 * i / dim)`. There are
    `length` positions from `start` on, or from each of several starts.
    """
    return angles_of(frequencies(dim, theta), length, start)


def frequencies(dim: int, theta: float) -> Float[Array, " half"]:
    """Returns the angle by which RoPE turns each pair of a head per position."""
    return theta ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)


def angles_of(
    frequency: Float[Array, " half"], length: int, start: Int[Array, "*b"] | int = 0
) -> tuple[Float[Array, "*b seq half"], Float[Array, "*b seq half"]]:
    """Returns cosines and sines of `length` positions' angles, from `start` on."""
    start = jnp.asarray(start)[..., None]
    positions = start + on_last_axes(jnp.arange(length), start.ndim)
    positions = positions.astype(jnp.float32)[..., None]
    angle = positions * on_last_axes(frequency, positions.ndim)
    return jnp.cos(angle), jnp.sin(angle)


def split_heads(
    y: Float[Array, "b s columns"],
    cos: Float[Array, "*b s h"],
    sin: Float[Array, "*b s h"],
    *,
    num_kv_heads: int,
    dtype: DTypeLike,
) -> tuple[Float[Array, "b s n d"], Float[Array, "b s m d"], Float[Array, "b s m d"]]:
    """Splits `y` into heads and applies RoPE, like `pallas_kernels.matmul_heads`."""
    b, s, _ = y.shape
    y = y.reshape(b, s, num_kv_heads, -1, 2 * cos.shape[-1])
    q, k, v = (
        y[..., :-2, :].reshape(b, s, -1, y.shape[-1]),
        y[..., -2, :],
        y[..., -1, :],
    )
    return tuple(x.astype(dtype) for x in (turned(q, cos, sin), turned(k, cos, sin), v))


def turned(
    x: Float[Array, "b s n d"], cos: Float[Array, "*b s h"], sin: Float[Array, "*b s h"]
) -> Float[Array, "b s n d"]:
    """Applies RoPE in float32.

    The halves [x, y] of a head become [x cos - y sin, y cos + x sin].
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    c, n = (on_last_axes(of[..., None, :], x.ndim) for of in (cos, sin))
    return jnp.concatenate([first * c - second * n, second * c + first * n], -1)


def _obstacle(q: Array, k: Array, v: Array, cos: Array, sin: Array) -> str | None:
    for array in (q, k, v):
        if array.dtype != jnp.bfloat16:
            return f"heads must be bfloat16, got {array.dtype}"
    for array in (cos, sin):
        if array.dtype != jnp.float32:
            return f"angles must be float32, got {array.dtype}"
    _, s, _, d = q.shape
    if not q.size or s % LANES:
        return f"positions must be a multiple of {LANES}, got {s}"
    if d % (2 * GROUP) or d > _LARGEST_HEAD:
        return f"heads must be multiples of 32 up to {_LARGEST_HEAD}, got {d}"
    return None


@functools.partial(jax.jit, static_argnames="encoding")
def _run(q, k, v, cos, sin, scale, *, encoding: Encoding) -> Encoded:
    b, s, n, d = q.shape
    m, half = k.shape[2], d // 2
    shared = cos.ndim == 2  # Sequences have their angles in common.
    queries, tokens = n // m, b * s
    count = m * (queries + 2)
    walk = Walk(
        rows=tokens,
        groups=half // GROUP,
        group=GROUP,
        strip_rows=LANES,
        strip_groups=1,
        strips=math.gcd(half // GROUP, _STRIPS),
    )
    shares = walk.groups // walk.strips  # The shares of a head; a thread block has one.
    ctas = walk.ctas * count

    def kernel(heads, tables, scale, out, tiles, halves, barrier):
        # Consecutive thread blocks have the same positions: angles stay in the cache.
        cta = lax.axis_index("cta")
        rest, share = lax.div(cta, shares), lax.rem(cta, shares)
        block, head = lax.div(rest, count), lax.rem(rest, count)
        position, sequence = lax.div(block, b) * LANES, lax.rem(block, b)
        row = sequence * s + position
        of_angles = position if shared else row
        own, index = lax.div(head, queries + 2), lax.rem(head, queries + 2)
        columns = walk.strips * GROUP
        first = share * columns

        def copy(source: Any, head: Array) -> None:
            for part, tile in enumerate(halves):
                place = (pl.ds(row, LANES), head, pl.ds(part * half + first, columns))
                plgpu.copy_gmem_to_smem(source.at[place], tile, barrier)

        pl.when(index < queries)(lambda: copy(heads[0], own * queries + index))
        pl.when(index == queries)(lambda: copy(heads[1], own))
        pl.when(index > queries)(lambda: copy(heads[2], own))
        # Values have no RoPE. They always load the same angles, and do not use them.
        rotated = index <= queries
        factor = rotated.astype(jnp.int32)

        def angles(strip):
            place = (
                pl.ds(factor * (first + strip * GROUP), GROUP),
                pl.ds(factor * of_angles, LANES),
            )
            one_by_one = plgpu.Layout.TCGEN05_TMEM_NATIVE(1)
            loads = (
                plgpu.load(
                    table.at[place].transpose((1, 0)),
                    layout=one_by_one,
                    optimized=False,
                )
                for table in tables
            )
            cos, sin = (plgpu.layout_cast(x, strip_layout(x.shape)) for x in loads)
            return jnp.where(rotated, cos, 1.0), jnp.where(rotated, sin, 0.0)

        ahead = angles(0)
        plgpu.barrier_wait(barrier)
        sink = Sink(out, tiles, encoding, scale[0])
        left, right = (strips_of(tile) for tile in halves)
        for strip in range(walk.strips):
            c, n = ahead
            if strip + 1 < walk.strips:
                ahead = angles(strip + 1)
            x, y = decode(left[strip]()), decode(right[strip]())
            sink.put((x * c + y * n, y * c - x * n), lambda part: None)
        place = lax.div(row, LANES) * shares + share
        sink.finish(walk, place, first_part=2 * head)

    @jax.custom_batching.sequential_vmap
    def launch(heads, tables, scale):
        (out,) = mosaic.kernel(
            kernel,
            out_type=(outputs(encoding, walk, 2 * count, ctas),),
            kernel_name="join_heads",
            grid=(ctas,),
            grid_names=("cta",),
            scratch_types={
                "tiles": scratch_of(encoding, walk, 2),
                "halves": [tile_of(q.dtype, walk)] * 2,
                "barrier": plgpu.Barrier(num_arrivals=2),
            },
            compiler_params=mosaic.by_lanes(),
        )(heads, tables, scale)
        return out

    heads = [x.reshape(tokens, -1, d) for x in (q, k, v)]
    # Neighbouring lanes have neighbouring positions. The transposes make these
    # neighbours in memory, too.
    tables = [table.reshape(-1, half).T for table in (cos, sin)]
    return launch(heads, tables, scale.reshape(1))
