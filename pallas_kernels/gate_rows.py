"""The kernel of gated products with a scale for each row.

A thread block has a row. Until its scale is known shared memory holds the products, of
which each lane reads its own again.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.codec import (
    GROUP,
    LANES,
    floats,
    magnitude_bits,
    strip_layout,
    total_max,
)
from pallas_kernels.reference.quantize import Groups, reciprocal, row_scale

_STRIPS = 8  # Of a row, at most.
_QUAD = 4  # Numbers that a lane stores at once.
_QUADS = GROUP // _QUAD


def obstacle(tokens: int, n: int) -> str | None:
    """Why so many rows of `n` are not for the kernel, if so."""
    if not tokens:
        return "there are no rows"
    if n % GROUP:
        return f"the last axis must be a multiple of {GROUP}, got {n}"
    if not 1 <= n / (GROUP * LANES) <= _STRIPS:
        least, most = GROUP * LANES, GROUP * LANES * _STRIPS
        return f"with a scale a row it takes rows of {least} to {most}, got {n}"
    return None


@functools.partial(jax.jit, static_argnames=("fn", "dtype"))
def run(
    fn: Callable, gate_up: Groups, *, dtype: DTypeLike
) -> tuple[Float[Array, "tokens n"], Float[Array, " tokens"]]:
    """The codes of fn(gate, up), and their scales, of gate and up [tokens, 2, n]."""
    tokens, parts, n = gate_up.codes.shape
    groups = n // GROUP
    strips = -(-groups // LANES)
    layout = strip_layout((LANES, GROUP))
    quads = plgpu.Layout.TCGEN05_TMEM_NATIVE(_QUAD)

    def kernel(gate_up, codes, scales, held):
        row = lax.axis_index("row")

        def start(strip):  # The last ones overlap.
            return jnp.minimum(strip * LANES, groups - LANES)

        def load(strip, part):
            at = (row, part, pl.ds(start(strip), LANES))
            return Groups(
                plgpu.load(gate_up.codes.at[at], layout=layout, optimized=False),
                plgpu.load(
                    gate_up.scale.at[at], layout=layout.reduce(1), optimized=False
                ),
            )

        def hold(strip, carry):
            largest, loaded = carry
            following = jnp.minimum(strip + 1, strips - 1)
            later = [load(following, part) for part in range(parts)]
            (value,) = fn(*loaded)
            x = plgpu.layout_cast(value, quads)
            for j in range(_QUADS):
                quad = lax.slice(x, (0, j * _QUAD), (LANES, (j + 1) * _QUAD))
                held.at[strip, j][...] = quad
            return jnp.maximum(largest, jnp.abs(value)), later

        def write(strip, _):
            x = [
                plgpu.load(held.at[strip, j], layout=quads, optimized=False)
                for j in range(_QUADS)
            ]
            value = plgpu.layout_cast(jnp.concatenate(x, axis=1), layout)
            to = codes.at[row, pl.ds(start(strip), LANES)]
            to[...] = (value * inverse).astype(dtype)  # Nothing is beyond the largest.

        zeros = jnp.zeros((LANES, GROUP), jnp.float32)
        first = [load(0, part) for part in range(parts)]
        largest, _ = lax.fori_loop(
            0, strips, hold, (plgpu.layout_cast(zeros, layout), first)
        )
        # Bits of arrays, not of scalars, are taken for floats.
        bits = total_max(magnitude_bits(largest))
        scale = row_scale(floats(jnp.broadcast_to(bits, largest.shape)), dtype)
        inverse = reciprocal(scale)
        lax.fori_loop(0, strips, write, None)
        scales.at[pl.ds(row, 1)][...] = scale[:1, 0]

    @jax.custom_batching.sequential_vmap
    def launch(gate_up):
        return plgpu.kernel(
            kernel,
            out_type=(
                jax.ShapeDtypeStruct((tokens, groups, GROUP), dtype),
                jax.ShapeDtypeStruct((tokens,), jnp.float32),
            ),
            scratch_types=[plgpu.SMEM((strips, _QUADS, LANES, _QUAD), jnp.float32)],
            grid=(tokens,),
            grid_names=("row",),
            compiler_params=plgpu.CompilerParams(
                approx_math=True,  # Of `fn`.
                lowering_semantics=plgpu.LoweringSemantics.Lane,
                # Nothing is read from where the same kernel writes.
                unsafe_no_auto_barriers=True,
            ),
        )(gate_up)

    codes = gate_up.codes.reshape(tokens, parts, groups, GROUP)
    codes, scale = launch(Groups(codes, gate_up.scale))
    return codes.reshape(tokens, n), scale
