"""Per-tensor scales from the amax of parts of tensors; one kernel for many tensors.

This is the last step of COAT's group scaling (arXiv 2410.19313, section 5.2): the amax
of each group of a tensor is known, and the largest of them gives the tensor's scale.
"""

import dataclasses
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
from pallas_kernels.axes import Axes, alike
from pallas_kernels.checks import CODES, check_dtype
from pallas_kernels.mosaic import core as mosaic
from pallas_kernels.mosaic.codec import LANES
from pallas_kernels.numerics import (
    floats,
    magnitude,
    magnitude_bits,
    power_of_two_scale,
)

_STRIPS = 8  # The most strips whose loads are in flight at once.
_LONGEST = 2**15  # The longest array that need not be reduced before the kernel.
_PARTS = 2048  # The number of parts whose amaxes replace a longer array.


class Bound(NamedTuple):
    """An upper bound of a tensor's amax: `factor` times the amax of every array.

    Attributes:
      maxima: The float32 arrays whose amaxes are multiplied.
      factor: A number that is multiplied with them.
    """

    maxima: tuple[Float[Array, "..."], ...]
    factor: float = 1.0


def tensor_scales(
    *bounds: Bound,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    implementation: dispatch.Implementation | None = None,
) -> tuple[Float[Array, ""], ...]:
    """Computes a per-tensor scale from each bound of a tensor's amax.

    The scale is the smallest power of two for which `bound / scale` rounds to the
    largest code or less. It is a float32 scalar, NaN if the bound is not finite.

    Args:
      *bounds: The upper bound of each tensor's amax.
      dtype: The dtype of the codes, `float8_e4m3fn` or `float8_e5m2`.
      implementation: The implementation; None means the kernel where it can run and is
        faster.

    Raises:
      ValueError: If a dtype is not supported, or the kernel was named and cannot run.

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
    operation = _TensorScales(
        factors=tuple(float(bound.factor) for bound in bounds), dtype=jnp.dtype(dtype)
    )
    maxima = (tuple(bound.maxima) for bound in bounds)
    return operation(*maxima, implementation=implementation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TensorScales(dispatch.Operation):
    """`tensor_scales` of the maxima of each bound.

    Attributes:
      factors: The factor of each bound.
      dtype: The dtype of the codes.
    """

    factors: tuple[float, ...]
    dtype: jnp.dtype
    name = "tensor_scales"

    def obstacle(self, *maxima) -> str | None:
        if not maxima:
            return "there are no bounds"
        if (least := min(x.size for x in jax.tree.leaves(maxima))) < LANES:
            return f"there must be {LANES} maxima or more, got {least}"
        return None

    def slower(self, *maxima) -> str | None:
        if len(jax.tree.leaves(maxima)) == 1:
            return "XLA is as fast with one array"
        return None

    def reference(self, *maxima) -> tuple[Array, ...]:
        bounds = map(Bound, maxima, self.factors)
        return tuple(_reference(bound, self.dtype) for bound in bounds)

    def axes(self, *maxima) -> tuple:
        return jax.tree.map(alike, maxima), Axes("", reduced="max")

    def kernel(self, *maxima) -> tuple[Array, ...]:
        short = [tuple(map(_short, own)) for own in maxima]
        found = _run(short, factors=self.factors, dtype=self.dtype)
        return tuple(x[0] for x in found)


def _reference(bound: Bound, dtype: DTypeLike) -> Float[Array, ""]:
    """Computes one scale in jnp.

    The scale rises with the amax, so the scale of the amax is the largest scale of all
    parts. In this order XLA computes the scales and their maximum in one kernel.
    """
    *others, last = bound.maxima
    largest = functools.reduce(jnp.multiply, map(magnitude, others), last)
    return magnitude(_scale(largest * bound.factor, dtype))


def _scale(largest: Float[Array, "..."], dtype: DTypeLike) -> Array:
    info = jnp.finfo(dtype)
    return power_of_two_scale(largest, float(info.max), step=float(info.eps))


def _short(x: Float[Array, "..."]) -> Float[Array, " k"]:
    """Returns an array of the same amax that a thread block can read, as one axis."""
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
                # The kernel loads from no memory that it stores to.
                unsafe_no_auto_barriers=True,
            ),
        )(arrays)
        return out

    return launch(arrays)


def _largest(ref) -> Float[Array, " lanes"]:
    """Returns the amax of an array, repeated for all lanes: [128]."""
    (size,) = ref.shape
    vector = 4 if size % 4 == 0 and size >= 4 * LANES else 1
    strip = vector * LANES
    strips = min(-(-size // strip), _STRIPS)
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
