"""The kernels of `maxima` and of `tensor_scales`."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.dispatch import devices
from pallas_kernels.mosaic import core as mosaic
from pallas_kernels.mosaic.codec import LANES, decode, strip_layout, total_max
from pallas_kernels.mosaic.strips import STRIP
from pallas_kernels.numerics import (
    GROUP,
    floats,
    magnitude,
    magnitude_bits,
    tensor_scale,
)

_STRIPS = 8  # The most strips of a chunk; all its loads are in flight at once.
_CTAS = 8  # Thread blocks on each multiprocessor.
_LOADS = 8  # The most loads of strips in flight at once, in `scales`.
_LONGEST = 2**15  # The longest array that need not be reduced before the kernel.
_PARTS = 2048  # The number of amaxes of parts that replace a longer array.
_SHAPE = (STRIP // GROUP, GROUP)  # The shape of a strip.


@jax.jit
def maxima(*arrays: Array) -> Float[Array, " k"]:
    """Computes one amax for each thread block, of the parts of all arrays it reads.

    A thread block reads arrays one chunk at a time.
    """
    groups = [x.size // GROUP for x in arrays]
    chunks = [min(_STRIPS, count // _SHAPE[0]) * _SHAPE[0] for count in groups]
    counts = [-(-count // chunk) for count, chunk in zip(groups, chunks, strict=True)]
    ctas = min(max(counts), _CTAS * devices.multiprocessors())

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
            compiler_params=mosaic.by_lanes(),
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


def short(x: Float[Array, "..."]) -> Float[Array, " k"]:
    """Returns an array with the same amax and one axis, short enough for `scales`."""
    x = x.reshape(-1)
    if x.size <= _LONGEST:
        return x
    x = jnp.pad(x, (0, -x.size % _PARTS))  # Zeros, which XLA does not write.
    return magnitude(x.reshape(_PARTS, -1), axis=-1)


@functools.partial(jax.jit, static_argnames=("factors", "dtype"))
def scales(
    arrays: list[tuple[Array, ...]], *, factors: tuple[float, ...], dtype: DTypeLike
) -> list[Float[Array, " 1"]]:
    """Computes the scale of each bound of `tensor_scales`, from its `short` arrays."""

    def kernel(refs, out):
        for j, (own, factor) in enumerate(zip(refs, factors, strict=True)):

            @pl.when(lax.axis_index("bound") == j)
            def _(own=own, factor=factor, out=out[j]):
                *others, last = map(_largest, own)
                largest = functools.reduce(jnp.multiply, others, last)
                out[0] = tensor_scale(largest * factor, dtype)[0]

    @jax.custom_batching.sequential_vmap
    def launch(arrays):
        (out,) = mosaic.kernel(
            kernel,
            out_type=([jax.ShapeDtypeStruct((1,), jnp.float32) for _ in arrays],),
            kernel_name="tensor_scales",
            grid=(len(arrays),),
            grid_names=("bound",),
            compiler_params=mosaic.by_lanes(),
        )(arrays)
        return out

    return launch(arrays)


def _largest(ref) -> Float[Array, " lanes"]:
    """Returns the amax of an array, repeated for all lanes: [128]."""
    (size,) = ref.shape
    vector = 4 if size % 4 == 0 and size >= 4 * LANES else 1
    strip = vector * LANES
    strips = min(-(-size // strip), _LOADS)
    layout = plgpu.Layout.WG_STRIDED((strip,), vector)
    load = functools.partial(plgpu.load, layout=layout, optimized=False)

    def turn(j, bits):
        # The last strips may overlap, which does not change the amax.
        starts = [(j * strips + i) * strip for i in range(strips)]
        places = [pl.ds(jnp.minimum(at, size - strip), strip) for at in starts]
        loaded = [load(ref.at[place]) for place in places]
        return functools.reduce(jnp.maximum, map(magnitude_bits, loaded), bits)

    bits = plgpu.layout_cast(jnp.zeros(strip, jnp.uint32), layout)
    bits = lax.fori_loop(0, -(-size // (strips * strip)), turn, bits)
    # Mosaic computes with reinterpreted bits of arrays, but not of scalars.
    return floats(jnp.broadcast_to(jnp.max(bits, axis=0), (LANES,)))
