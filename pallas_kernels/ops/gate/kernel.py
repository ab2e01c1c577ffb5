"""The kernels of gated activations with per-token scales.

A token is a row. Its unquantized values must be held until its scale is known. Short
rows are copied to shared memory ahead of their use, and their values are in registers.
The values of a long row are in a thread block's shared memory, where each lane reads
its own values again.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.mosaic import core as mosaic
from pallas_kernels.mosaic.codec import (
    LANES,
    decode,
    encode_groups,
    floats,
    scale_of_bits,
    strip_layout,
    total_max,
)
from pallas_kernels.mosaic.rows import Row, Rows, Share, Tuning, reduced
from pallas_kernels.numerics import GROUP, Scaled, magnitude_bits, reciprocal, row_scale
from pallas_kernels.ops.gate import warps
from pallas_kernels.ops.gate.reference import Gated

_CODES = jnp.float8_e4m3fn  # The dtype of groups that are kept.
_LONG = LANES * GROUP  # The shortest row with its values in shared memory.
# Rows with their values in registers are short, so that many thread blocks fit.
_TUNING = Tuning(ctas=16)
# The most strips in shared memory, so that two thread blocks fit a multiprocessor.
_STRIPS = 13
# The values of one more strip are in registers, for the 28,672 columns of Llama's 70B.
_LONGEST = (_STRIPS + 1) * _LONG
_QUAD = 4  # The length of the vectors that a lane stores at once.
_QUADS = GROUP // _QUAD


def obstacle(tokens: int, n: int) -> str | None:
    """Returns why the kernel cannot take `tokens` rows of length `n`, or None."""
    if not tokens:
        return "there are no rows"
    step = GROUP if n > _LONG else LANES
    if n % step or not 0 < n <= _LONGEST:
        return (
            f"with a scale a row it takes multiples of {LANES} to {_LONG} and of "
            f"{GROUP} to {_LONGEST}, got {n}"
        )
    return None


@functools.partial(jax.jit, static_argnames=("fn", "dtype", "keep_groups"))
def run(
    fn: Callable,
    operands: tuple[Scaled | Float[Array, "tokens parts n"], ...],
    *,
    dtype: DTypeLike,
    keep_groups: bool = False,
) -> Gated:
    """Quantizes y = fn(gate, up) per token, with scale = amax / code_max.

    Gate and up are the parts of one operand, or two operands of one part each. `dtype`
    is the dtype of the codes. With `keep_groups` the operands are also returned in
    groups of 16.
    """
    tokens, _, n = jax.tree.leaves(operands)[0].shape
    groups = n // GROUP

    def like(dtype, *shape):
        return jax.ShapeDtypeStruct((tokens, *shape), dtype)

    def kept(x):
        parts = jax.tree.leaves(x)[0].shape[1]
        return Scaled(
            like(_CODES, parts, groups, GROUP), like(jnp.bfloat16, parts, groups)
        )

    outputs = Gated(
        values=like(dtype, 1, groups, GROUP),
        scale=like(jnp.float32),
        groups=tuple(map(kept, operands)) if keep_groups else None,
        largest_scale=like(jnp.float32) if keep_groups else None,
    )

    def view(x):
        return x.reshape(*x.shape[:-1], groups, GROUP) if x.shape[-1] == n else x

    launch = _short if n < _LONG else _long
    if warps.takes(tokens, n):
        launch = warps.run
    launch = functools.partial(launch, fn, outputs)
    return jax.custom_batching.sequential_vmap(launch)(jax.tree.map(view, operands))


def _long(fn: Callable, outputs: Gated, operands: tuple[Any, ...]) -> Gated:
    """Runs the kernel that holds the values of a row in shared memory."""
    tokens, _, groups, _ = outputs.values.shape
    parts = jax.tree.leaves(operands)[0].shape[1]
    strips = -(-groups // LANES)
    in_shared = min(strips, _STRIPS)
    layout = strip_layout((LANES, GROUP))
    quads = plgpu.Layout.TCGEN05_TMEM_NATIVE(_QUAD)

    def kernel(operands, out, held):
        row = lax.axis_index("row")

        def place(strip, part):  # The last two strips may overlap.
            start = jnp.minimum(strip * LANES, groups - LANES)
            return row, part, pl.ds(start, LANES)

        def load(strip):
            def load(ref, part):
                of_strip = layout if len(ref.shape) == 4 else layout.reduce(1)
                x = ref.at[place(strip, part)]
                return plgpu.load(x, layout=of_strip, optimized=False)

            return [
                jax.tree.map(functools.partial(load, part=part), x)
                for x, part in _parts(operands, parts)
            ]

        def compute(strip, loaded, largest, most):
            """Returns a strip's values in vectors of four, and the updated maxima.

            The maxima are of the values, and of the scales of the stored groups.
            """
            if out.groups is not None:
                for (to, part), x in zip(
                    _parts(out.groups, parts), loaded, strict=True
                ):
                    kept = encode_groups(decode(x), _CODES)
                    for ref, value in zip(to, kept, strict=True):
                        mosaic.store(ref.at[place(strip, part)], value)
                    most = jnp.maximum(most, magnitude_bits(decode(kept[1])))
            (value,) = fn(*loaded)
            value = plgpu.layout_cast(value, quads)
            x = [
                lax.slice(value, (0, j * _QUAD), (LANES, (j + 1) * _QUAD))
                for j in range(_QUADS)
            ]
            return x, functools.reduce(jnp.maximum, map(jnp.abs, x), largest), most

        def hold(strip, carry):
            *carry, loaded = carry
            # The next strip is loaded before this one is computed, to hide the latency.
            later = load(jnp.minimum(strip + 1, strips - 1))
            x, *carry = compute(strip, loaded, *carry)
            for j, quad in enumerate(x):
                mosaic.store(held.at[strip, j], quad)
            return *carry, later

        def held_values(strip):
            return [
                plgpu.load(held.at[strip, j], layout=quads, optimized=False)
                for j in range(_QUADS)
            ]

        def write(strip, x):
            x = jnp.concatenate([quad * inverse for quad in x], axis=1)
            value = plgpu.layout_cast(x, layout)
            to = out.values.at[place(strip, 0)]
            # No value exceeds the amax, so the cast need not saturate.
            mosaic.store(to, value.astype(to.dtype))

        zeros = jnp.zeros((LANES, _QUAD), jnp.float32)
        largest = plgpu.layout_cast(zeros, quads)
        most = plgpu.layout_cast(jnp.zeros(LANES, jnp.uint32), layout.reduce(1))
        carry = largest, most, load(0)
        largest, most, loaded = lax.fori_loop(0, in_shared, hold, carry)
        if in_shared < strips:
            last, largest, most = compute(in_shared, loaded, largest, most)
        # Mosaic computes with reinterpreted bits of arrays, but not of scalars.
        bits = total_max(magnitude_bits(largest))
        scale = row_scale(
            floats(jnp.broadcast_to(bits, largest.shape)), out.values.dtype
        )
        inverse = reciprocal(scale)
        lax.fori_loop(0, in_shared, lambda j, _: write(j, held_values(j)), None)
        if in_shared < strips:
            write(in_shared, last)
        mosaic.store(out.scale.at[pl.ds(row, 1)], scale[:1, 0])
        if out.groups is not None:
            out.largest_scale[row] = floats(total_max(most))

    (out,) = mosaic.kernel(
        kernel,
        out_type=(outputs,),
        scratch_types=[plgpu.SMEM((in_shared, _QUADS, LANES, _QUAD), jnp.float32)],
        kernel_name="gated",
        grid=(tokens,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,  # This affects only `fn`.
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            # Each lane reads only those shared values that it wrote itself.
            unsafe_no_auto_barriers=True,
        ),
    )(operands)
    return out


def _short(fn: Callable, outputs: Gated, operands: tuple[Any, ...]) -> Gated:
    """Runs the kernel that holds the values of a row in registers."""
    groups = outputs.values.shape[2]
    tiles = Row(n=groups * GROUP)
    parts = jax.tree.leaves(operands)[0].shape[1]
    rows = Rows(_flat(operands))  # A row has all parts of its operand.
    share = Share.of(rows, parts * tiles.n, _TUNING)

    def kernel(rows, out):
        def part(x, part):
            return jax.tree.map(lambda ref: ref.at[pl.ds(part * groups, groups)], x)

        def row(row, index, _):
            def of_row(arrays):
                return [part(*each) for each in _parts(arrays, parts)]

            inputs, kept = of_row(row.x), None
            if out.groups is not None:
                kept = of_row(
                    jax.tree.map(lambda ref: share.row(ref, index), out.groups)
                )
            values, maxima = [], []
            for tile in tiles.tiles:
                x = [tiles.load(ref, tile) for ref in inputs]
                (y,) = fn(*x)
                values.append(y)
                maxima.append([magnitude_bits(y)])
                if kept is None:
                    continue
                maxima[-1] += map(magnitude_bits, x)
                for to, wide in zip(kept, x, strict=True):
                    for ref, value in zip(to, encode_groups(wide, _CODES), strict=True):
                        mosaic.store(tiles.tile(ref, tile), value)
            largest, *largest_kept = reduced(jnp.maximum, jnp.max, maxima)
            # Mosaic computes with reinterpreted bits of arrays, but not of scalars.
            shape = tiles.shape(0)
            scale = row_scale(
                floats(jnp.broadcast_to(largest, shape)), out.values.dtype
            )
            inverse = reciprocal(scale)[0, 0]
            out.scale[index] = scale[0, 0]
            if kept is not None:
                most = functools.reduce(jnp.maximum, largest_kept)
                most = scale_of_bits(jnp.broadcast_to(most, shape), _CODES)
                out.largest_scale[index] = most[0, 0]
            to = out.values.at[pl.ds(index * groups, groups)]
            for tile, y in zip(tiles.tiles, values, strict=True):
                # No value exceeds the amax, so the cast need not saturate.
                value = (y * inverse).astype(to.dtype)
                mosaic.store(tiles.tile(to, tile), value)

        share.over(row, rows)

    out = share.launch("gated", kernel, jax.eval_shape(_flat, outputs), rows)
    return jax.tree.map(lambda x, like: x.reshape(like.shape), out, outputs)


def _flat(arrays: Any) -> Any:
    """Views [tokens, parts, groups, 16] as [all groups, 16]; flattens other arrays."""
    return jax.tree.map(
        lambda x: x.reshape((-1, GROUP) if x.ndim == 4 else (-1,)), arrays
    )


def _parts(operands: tuple[Any, ...], parts: int) -> list[tuple[Any, int]]:
    """Returns each part of all operands, as the operand and the part's index."""
    return [(x, part) for x in operands for part in range(parts)]
