"""Scales of tensors from maxima of their parts, several of them in one kernel.

The last step of COAT's group scaling (arXiv 2410.19313, section 5.2): the maxima of a
tensor's groups are there, and the largest of them gives the scale of all.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import dispatch
from pallas_kernels.checks import CODES, check_dtype
from pallas_kernels.mosaic import core as mosaic
from pallas_kernels.mosaic.codec import LANES, floats
from pallas_kernels.numerics import magnitude, magnitude_bits, power_of_two_scale

_STRIPS = 8  # Of lanes' numbers that are on their way at a time.
_LONGEST = 2**15  # Of what one thread block reads for a bound.
_PARTS = 2048  # Whose maxima are found before of what is longer.


class Bound(NamedTuple):
    """What no number of a tensor exceeds: a product.

    Attributes:
      maxima: Arrays of float32, the largest magnitude in each of which is a factor.
      factor: Another, a number.
    """

    maxima: tuple[Float[Array, "..."], ...]
    factor: float = 1.0


def tensor_scales(
    *bounds: Bound,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    implementation: dispatch.Implementation | None = None,
) -> tuple[Float[Array, ""], ...]:
    """For each bound the scale of a tensor whose largest magnitude that is.

    It is the smallest power of two at which the bound rounds to the largest code or
    less, float32, and NaN where the bound is not finite.

    Args:
      *bounds: What no magnitude of each tensor exceeds.
      dtype: Of the codes, `float8_e4m3fn` or `float8_e5m2`.
      implementation: What to run; None means the kernel where it can run and is faster.

    Raises:
      ValueError: If a dtype is none of these, or the kernel was named and cannot run.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import Bound, tensor_scales
      >>> maxima = jnp.array([100.0, 448.0])
      >>> [float(s) for s in tensor_scales(Bound((maxima,)), Bound((maxima,), 1.5))]
      [1.0, 2.0]
    """
    check_dtype("codes", dtype, CODES)
    arrays = jax.tree.leaves([bound.maxima for bound in bounds])
    for x in arrays:
        check_dtype("maxima", x.dtype, (jnp.dtype(jnp.float32),))
    obstacle = _obstacle(arrays)
    if obstacle is None and implementation is None and len(arrays) == 1:
        obstacle = "XLA is as fast with one array"
    chosen = dispatch.choose(
        implementation, obstacle, operation="tensor_scales", arrays=arrays
    )
    if chosen == "reference":
        return tuple(_reference(bound, dtype) for bound in bounds)
    short = [tuple(map(_short, bound.maxima)) for bound in bounds]
    factors = tuple(bound.factor for bound in bounds)
    return tuple(x[0] for x in _run(short, factors=factors, dtype=jnp.dtype(dtype)))


def _reference(bound: Bound, dtype: DTypeLike) -> Float[Array, ""]:
    """The definition.

    Scales rise with maxima, so that the largest maximum has the largest scale. This way
    around XLA computes all scales and finds the largest in one kernel.
    """
    *others, last = bound.maxima
    largest = functools.reduce(jnp.multiply, map(magnitude, others), last)
    return magnitude(_scale(largest * bound.factor, dtype))


def _scale(largest: Float[Array, "..."], dtype: DTypeLike) -> Array:
    info = jnp.finfo(dtype)
    return power_of_two_scale(largest, float(info.max), step=float(info.eps))


def _obstacle(arrays: list[Array]) -> str | None:
    if not arrays:
        return "there are no bounds"
    if (least := min(x.size for x in arrays)) < LANES:
        return f"there must be {LANES} maxima or more, got {least}"
    return None


def _short(x: Float[Array, "..."]) -> Float[Array, " k"]:
    """The same maxima, or those of parts if there are too many for a thread block."""
    if x.size <= _LONGEST or x.size % _PARTS:
        return x.reshape(-1)
    return magnitude(x.reshape(_PARTS, -1), axis=-1)


@functools.partial(jax.jit, static_argnames=("factors", "dtype"))
def _run(
    arrays: list[tuple[Array, ...]], *, factors: tuple[float, ...], dtype: DTypeLike
) -> list[Float[Array, " 1"]]:
    def kernel(refs, out):
        for j, (own, factor) in enumerate(zip(refs, factors, strict=True)):

            @pl.when(lax.axis_index("bound") == j)
            def _(own=own, factor=factor, out=out[j]):
                *others, last = map(_largest, own)
                largest = functools.reduce(jnp.multiply, others, last)
                out[0] = _scale(largest * factor, dtype)[0]

    @jax.custom_batching.sequential_vmap
    def launch(arrays):
        (out,) = mosaic.kernel(
            kernel,
            out_type=([jax.ShapeDtypeStruct((1,), jnp.float32) for _ in arrays],),
            kernel_name="tensor_scales",
            grid=(len(arrays),),
            grid_names=("bound",),
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=plgpu.LoweringSemantics.Lane,
                unsafe_no_auto_barriers=True,  # Nothing is read that is written.
            ),
        )(arrays)
        return out

    return launch(arrays)


def _largest(ref) -> Float[Array, " lanes"]:
    """The largest magnitude of an array, in every place."""
    (size,) = ref.shape
    vector = 4 if size % 4 == 0 and size >= 4 * LANES else 1
    strip = vector * LANES
    strips = min(-(-size // strip), _STRIPS)
    layout = plgpu.Layout.WG_STRIDED((strip,), vector)
    load = functools.partial(plgpu.load, layout=layout, optimized=False)

    def turn(j, bits):
        # The last strips overlap.
        starts = [(j * strips + i) * strip for i in range(strips)]
        places = [pl.ds(jnp.minimum(at, size - strip), strip) for at in starts]
        loaded = [load(ref.at[place]) for place in places]
        return functools.reduce(jnp.maximum, map(magnitude_bits, loaded), bits)

    bits = plgpu.layout_cast(jnp.zeros(strip, jnp.uint32), layout)
    bits = lax.fori_loop(0, -(-size // (strips * strip)), turn, bits)
    # Bits of arrays, not of scalars, are taken for floats.
    return floats(jnp.broadcast_to(jnp.max(bits, axis=0), (LANES,)))
