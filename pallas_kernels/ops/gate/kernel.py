"""The kernel of gated activations with per-token scales.

A thread block handles one token, a row. Shared memory holds the unquantized values
until the scale of the row is known; then each lane reads its own values again.
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
    strip_layout,
    total_max,
)
from pallas_kernels.numerics import GROUP, Scaled, magnitude_bits, reciprocal, row_scale
from pallas_kernels.ops.gate.reference import Gated

# The most strips of a row. Two thread blocks fit a multiprocessor's shared memory.
_STRIPS = 13
_QUAD = 4  # Numbers that a lane stores at once.
_QUADS = GROUP // _QUAD


def obstacle(tokens: int, n: int) -> str | None:
    """Returns why the kernel cannot take `tokens` rows of `n`, or None."""
    if not tokens:
        return "there are no rows"
    if n % GROUP:
        return f"the last axis must be a multiple of {GROUP}, got {n}"
    if not 1 <= n / (GROUP * LANES) <= _STRIPS:
        least, most = GROUP * LANES, GROUP * LANES * _STRIPS
        return f"with a scale a row it takes rows of {least} to {most}, got {n}"
    return None


@functools.partial(jax.jit, static_argnames=("fn", "dtype", "keep_groups"))
def run(
    fn: Callable,
    operands: tuple[Scaled | Float[Array, "tokens parts n"], ...],
    *,
    dtype: DTypeLike,
    keep_groups: bool = False,
) -> Gated:
    """Quantizes y = fn(gate, up) per token: scale = amax / code_max, codes y / scale.

    Gate and up are the parts of one operand, or two operands of one part. With
    `keep_groups` the operands are also returned in groups of 16.
    """
    tokens, _, n = jax.tree.leaves(operands)[0].shape
    groups = n // GROUP
    strips = -(-groups // LANES)
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
                for x, part in _parts(operands)
            ]

        def hold(strip, carry):
            largest, most, loaded = carry
            # The next strip is loaded before this one is computed, to hide the latency.
            later = load(jnp.minimum(strip + 1, strips - 1))
            if keep_groups:
                for (to, part), x in zip(_parts(out.groups), loaded, strict=True):
                    kept = encode_groups(decode(x), jnp.float8_e4m3fn)
                    for ref, value in zip(to, kept, strict=True):
                        mosaic.store(ref.at[place(strip, part)], value)
                    most = jnp.maximum(most, magnitude_bits(decode(kept[1])))
            (value,) = fn(*loaded)
            x = plgpu.layout_cast(value, quads)
            for j in range(_QUADS):
                quad = lax.slice(x, (0, j * _QUAD), (LANES, (j + 1) * _QUAD))
                mosaic.store(held.at[strip, j], quad)
                largest = jnp.maximum(largest, jnp.abs(quad))
            return largest, most, later

        def write(strip, _):
            x = [
                plgpu.load(held.at[strip, j], layout=quads, optimized=False) * inverse
                for j in range(_QUADS)
            ]
            value = plgpu.layout_cast(jnp.concatenate(x, axis=1), layout)
            to = out.values.at[row, place(strip, 0)[-1]]
            # No value exceeds the amax, so the cast need not saturate.
            mosaic.store(to, value.astype(dtype))

        zeros = jnp.zeros((LANES, _QUAD), jnp.float32)
        largest = plgpu.layout_cast(zeros, quads)
        most = plgpu.layout_cast(jnp.zeros(LANES, jnp.uint32), layout.reduce(1))
        largest, most, _ = lax.fori_loop(0, strips, hold, (largest, most, load(0)))
        # Mosaic computes with reinterpreted bits of arrays, but not of scalars.
        bits = total_max(magnitude_bits(largest))
        scale = row_scale(floats(jnp.broadcast_to(bits, largest.shape)), dtype)
        inverse = reciprocal(scale)
        lax.fori_loop(0, strips, write, None)
        mosaic.store(out.scale.at[pl.ds(row, 1)], scale[:1, 0])
        if keep_groups:
            out.largest_scale[row] = floats(total_max(most))

    def like(dtype, *shape):
        return jax.ShapeDtypeStruct((tokens, *shape), dtype)

    def kept(x):
        parts = jax.tree.leaves(x)[0].shape[1]
        codes = like(jnp.float8_e4m3fn, parts, groups, GROUP)
        return Scaled(codes, like(jnp.bfloat16, parts, groups))

    @jax.custom_batching.sequential_vmap
    def launch(operands):
        (out,) = mosaic.kernel(
            kernel,
            out_type=(
                Gated(
                    values=like(dtype, groups, GROUP),
                    scale=like(jnp.float32),
                    groups=tuple(map(kept, operands)) if keep_groups else None,
                    largest_scale=like(jnp.float32) if keep_groups else None,
                ),
            ),
            scratch_types=[plgpu.SMEM((strips, _QUADS, LANES, _QUAD), jnp.float32)],
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

    def view(x):
        return x.reshape(*x.shape[:-1], groups, GROUP) if x.shape[-1] == n else x

    return launch(jax.tree.map(view, operands))


def _parts(operands: tuple[Any, ...]) -> list[tuple[Any, int]]:
    """Returns each part of all operands, as the operand and the part's index."""
    return [
        (x, part) for x in operands for part in range(jax.tree.leaves(x)[0].shape[1])
    ]
