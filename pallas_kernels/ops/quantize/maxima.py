"""The kernel of `maxima`: each thread block reads arrays one chunk at a time."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import dispatch
from pallas_kernels.mosaic import core as mosaic
from pallas_kernels.mosaic.codec import decode, strip_layout, total_max
from pallas_kernels.mosaic.strips import STRIP
from pallas_kernels.numerics import GROUP, floats, magnitude_bits

_STRIPS = 8  # The most strips of a chunk, whose loads are all in flight at once.
_CTAS = 8  # Thread blocks on each multiprocessor.
_SHAPE = (STRIP // GROUP, GROUP)  # The shape of a strip.


@jax.jit
def maxima(*arrays: Array) -> Float[Array, " k"]:
    """Computes the amax of the part of all arrays that each thread block reads."""
    groups = [x.size // GROUP for x in arrays]
    chunks = [min(_STRIPS, count // _SHAPE[0]) * _SHAPE[0] for count in groups]
    counts = [-(-count // chunk) for count, chunk in zip(groups, chunks, strict=True)]
    ctas = min(max(counts), _CTAS * dispatch.multiprocessors())

    def kernel(*refs):
        *refs, out = (ref.at[lax.axis_index("batch")] for ref in refs)
        cta = lax.axis_index("cta")
        bits = plgpu.layout_cast(jnp.zeros(_SHAPE, jnp.uint32), strip_layout(_SHAPE))
        for ref, chunk, count in zip(refs, chunks, counts, strict=True):

            def turn(j, bits, ref=ref, chunk=chunk):
                # The last chunks may overlap, which does not change the amax.
                start = jnp.minimum((cta + j * ctas) * chunk, ref.shape[0] - chunk)
                starts = range(0, chunk, _SHAPE[0])
                for strip in [_strip(ref, start + i) for i in starts]:
                    bits = jnp.maximum(bits, magnitude_bits(decode(strip)))
                return bits

            bits = lax.fori_loop(0, -(-count // ctas), turn, bits)
        out[cta] = floats(total_max(bits))

    @jax.custom_batching.custom_vmap
    def launch(*arrays):
        batch = len(arrays[0])
        return mosaic.kernel(
            kernel,
            out_type=jax.ShapeDtypeStruct((batch, ctas), jnp.float32),
            kernel_name="maxima",
            grid=(batch, ctas),
            grid_names=("batch", "cta"),
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=plgpu.LoweringSemantics.Lane,
                # The kernel loads from no memory that it stores to.
                unsafe_no_auto_barriers=True,
            ),
        )(*arrays)

    @launch.def_vmap
    def _(size, batched, *arrays):
        arrays = (
            x if has_axis else jnp.broadcast_to(x, (size, *x.shape))
            for x, has_axis in zip(arrays, batched, strict=True)
        )
        out = launch(*(x.reshape(-1, *x.shape[2:]) for x in arrays))
        return out.reshape(size, -1, ctas), True

    return launch(*(x.reshape(1, -1, GROUP) for x in arrays))[0]


def _strip(ref, start: Array) -> Array:
    layout = strip_layout(_SHAPE)
    return plgpu.load(ref.at[pl.ds(start, _SHAPE[0])], layout=layout, optimized=False)
