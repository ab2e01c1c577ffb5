"""Quantized arrays: 8-bit codes with one scale per group.

`quantize` and `dequantize` define the library's numerics. All other code, kernels
included, agrees with them. Formats and granularities follow COAT (arXiv 2410.19313,
sections 3 to 5), with these changes:

- Dequantization always multiplies by `scale`.
- Codes are computed with the *stored* (rounded) scale. So a group needs two bytes of
  metadata, or three with range expansion.
- A per-tensor scale is a power of two.

Optimizers store the scales of moments in float32; see `coat_jax.optimizers.moment`.
"""

import dataclasses
import math
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt32

from coat_jax import serialization
from coat_jax.meshes import sharded_like
from coat_jax.quantization import expansion
from coat_jax.quantization.formats import E4M3, Format
from coat_jax.quantization.granularity import Granularity, PerBlock, PerGroup, PerTensor
from coat_jax.quantization.groups import broadcastable, groups_and_lengths, merge, split
from pallas_kernels.checks import is_positive_number, summary
from pallas_kernels.numerics import (
    TINY,
    group_scale,
    magnitude,
    normal,
    power_of_two_scale,
    reciprocal,
)
from pallas_kernels.ops.adam.reference import OCTAVES


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedArray:
    """An array stored as 8-bit codes and one scale per group.

    It stands for `codes * scale`, or with range expansion for
    `sign(c) * max * scale * (|c| / max) ** (1 / k)`, where c is the value of a code and
    `max` is `format.max`. It is a pytree, so that `jit`, `scan`, `vmap` and checkpoints
    take it. Leading axes that `vmap` or `scan` add belong to no group.

    Attributes:
      codes: The codes, in the shape of the array that they stand for.
      scale: One scale per group, with as many axes as `codes`; bfloat16, or float32 for
        `PerTensor`. A group that contains NaN or infinity has the scale NaN, so that
        all its elements are NaN.
      exponent: The k of range expansion for each group, times sixteen, uint8, shaped
        like `scale`. None if all groups share `power`.
      format: The format of the codes.
      granularity: The elements that share a scale.
      dtype: The dtype that `dequantize` returns.
      power: The k of range expansion if `exponent` is None; 1 means no expansion.
    """

    codes: Array
    scale: Array
    exponent: Array | None
    format: Format = dataclasses.field(metadata={"static": True})
    granularity: Granularity = dataclasses.field(metadata={"static": True})
    dtype: jnp.dtype = dataclasses.field(metadata={"static": True})
    power: float = dataclasses.field(default=1.0, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.codes.shape

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.codes.ndim

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.codes.size

    @property
    def nbytes(self) -> int:
        """The number of bytes of codes, scales and exponents."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        """Raises TypeError, because it is unclear whether codes or values are meant."""
        raise TypeError(
            "a coat.QuantizedArray is not an array: take .codes, or .dequantize()"
        )

    def __mul__(self, other: Any) -> NoReturn:
        """Raises TypeError, because codes are no numbers to compute with."""
        raise TypeError(
            "a coat.QuantizedArray takes no part in arithmetic: take .dequantize(), or "
            "coat.to_optax_state(state) of a state for an optimizer of optax"
        )

    __rmul__ = __mul__

    def dequantize(self) -> Array:
        """Returns the array in `dtype`; see `coat.dequantize`."""
        return dequantize(self)


def quantize(
    x: Float[Array, "..."],
    *,
    format: Format = E4M3,
    granularity: Granularity = PerGroup(128),
    expand: bool | float = False,
    noise: UInt32[Array, "..."] | None = None,
) -> QuantizedArray:
    """Quantizes a floating array to 8-bit codes with one scale per group.

    The scale of a group is amax / format.max, rounded to bfloat16, or for `PerTensor`
    up to a power of two. The codes stand for

        x * (1 / scale)                               without expansion,
        sign(x) * max * (|x| / (max * scale)) ** k    with expansion,

    rounded to nearest (ties to even in floating formats with a sign) and saturated. If
    the group size does not divide the last axis (for `PerBlock`, the last two axes),
    the last group is shorter.

    Magnitudes below the smallest normal float32, 1.2e-38, count as zero on every
    backend. With `expand=True` no other magnitude becomes zero. Floating codes keep the
    sign of zeros. In a floating format, quantizing a dequantized array again gives the
    same codes, unless they stand for denormals. Scales have an upper limit, so that the
    largest numbers saturate: numbers in the last percent of float32's range, more of
    them with `PerTensor`, and with DE8 all numbers beyond 2**125.

    Args:
      x: A floating array of any shape.
      format: `coat.E4M3`, `coat.E5M2` or `coat.DE8`; for arrays without negative
        numbers also `coat.UE4M4` or `coat.LOG8`.
      granularity: `coat.PerTensor()`, `coat.PerGroup(g)` or
        `coat.PerBlock(rows, cols)`.
      expand: Whether to apply dynamic range expansion (COAT, section 4.2) with a k for
        each group. A number is taken as the k of all groups instead.
      noise: A uint32 array of random bits in x's shape, such as
        `jax.random.bits(key, x.shape, jnp.uint32)`, for stochastic rounding. A number
        is rounded to one of the two neighbouring codes; the mean is the number itself.
        With `expand`, formats without a sign have the right mean of x**k instead.
        Scales are then up to a percent larger, so that nothing saturates.

    Raises:
      TypeError: If `x` is not an array, or `format` or `granularity` has another type
        than above.
      ValueError: If `x` is not floating, or has fewer axes than the granularity needs,
        `noise` does not fit `x`, or `expand` is a number that is not positive.

    Examples:
      >>> import coat_jax as coat, jax.numpy as jnp
      >>> x = jnp.array([448.0, 7.0, 1.0, 0.0, 0.875, 0.5])
      >>> q = coat.quantize(x, granularity=coat.PerGroup(4))
      >>> q.codes.dtype, q.scale.shape
      (dtype(float8_e4m3fn), (2,))
      >>> coat.dequantize(q).tolist()
      [448.0, 7.0, 1.0, 0.0, 0.875, 0.5]
    """
    _check(x, format, granularity, noise)
    serialization.register()
    x, (own_power, power) = undifferentiated(x), _expansion(expand)
    largest, groups = _largest(x, granularity)
    if noise is not None:
        largest *= 1 + 2.0**-8  # A scale rounded down would saturate.
    scale = _stored_scale(largest, format, granularity)
    return _encoded(x, groups, scale, format, granularity, power, own_power, noise)


def _check(x: Any, format: Any, granularity: Any, noise: Any) -> None:
    """Raises TypeError or ValueError unless the arguments fit `quantize`."""
    if not isinstance(x, jax.Array | np.ndarray | np.generic):
        raise TypeError(f"quantize takes a floating array, got {summary(x)}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"quantize takes a floating array, got dtype {x.dtype}")
    if not isinstance(format, Format):
        raise TypeError(
            f"format must be a coat format such as coat.E4M3, got {format!r}"
        )
    if not isinstance(granularity, Granularity):
        raise TypeError(
            "granularity must be coat.PerTensor(), PerGroup(g) or PerBlock(r, c), got "
            f"{granularity!r}"
        )
    if noise is None:
        return
    dtype, shape = getattr(noise, "dtype", type(noise)), getattr(noise, "shape", ())
    if dtype != jnp.uint32 or shape != x.shape:
        expected = f"uint32{list(x.shape)}"
        raise ValueError(f"noise must be bits {expected}, got {dtype}{list(shape)}")


def _expansion(expand: Any) -> tuple[bool, float]:
    """Reads the argument `expand` of `quantize`.

    Returns:
      Whether each group has its own exponent k of the range expansion, and the k of all
      groups otherwise; 1 means no expansion.
    """
    if isinstance(expand, bool | np.bool_):
        return bool(expand), 1.0
    if not is_positive_number(expand):
        raise ValueError(f"expand must be a bool or a positive number, got {expand!r}")
    return False, float(expand)


def quantize_moment(
    x: Float[Array, "..."],
    *,
    format: Format,
    granularity: Granularity,
    power: float | None,
    noise: UInt32[Array, "..."] | None,
) -> QuantizedArray:
    """Quantizes a moving average with range expansion, so that it can keep moving.

    It differs from `quantize` in two ways. First, scales stay in float32: an amax in
    bfloat16 has steps of 0.4%, so an average that moves by 0.1% per step would stall.
    Second, expansion covers at most 40 octaves of a group, so an element that fades
    away costs its neighbours no more precision than that. With a k for each group, no
    element above zero becomes zero.

    Args:
      x: The average, float32.
      format: The format of the codes.
      granularity: The elements that share a scale.
      power: The k of all groups, or None to give each group its own k.
      noise: 32 random bits for each element, or None to round to the nearest code.
    """
    x = step_without_derivatives(x)
    largest, groups = _largest(x, granularity)
    # The last term makes the scale NaN where the amax is not finite.
    scale = jnp.maximum(largest * (1 / format.max), TINY) + largest * 0.0
    own_power, power = power is None, power or 1.0
    return _encoded(
        x, groups, scale, format, granularity, power, own_power, noise, OCTAVES
    )


def _largest(x: Array, granularity: Granularity) -> tuple[Array, Array]:
    """Returns the amax of each group, and the array as `split` reshapes it."""
    block = granularity.block(x.shape)
    groups = normal(split(jnp.asarray(x, jnp.float32), block))
    within = tuple(range(1, groups.ndim, 2))
    return jnp.expand_dims(magnitude(groups, within), within), groups


def _encoded(
    x, groups, scale, format, granularity, power, own_power, noise, octaves=math.inf
) -> QuantizedArray:
    """Returns the codes of an array with the given scales, as a `QuantizedArray`.

    Args:
      x: The array.
      groups: The array in float32, as `split` reshapes it.
      scale: The scale of each group, with axes of length 1 within groups.
      format: The format of the codes.
      granularity: The elements that share a scale.
      power: The k of range expansion for all groups; 1 means no expansion.
      own_power: Whether each group has its own k instead.
      noise: 32 random bits for each element, or None to round to nearest.
      octaves: The largest number of octaves of a group that its own k covers.
    """
    within = tuple(range(1, groups.ndim, 2))
    if noise is not None:
        noise = split(noise, granularity.block(x.shape))
    exponent, k = None, power
    if own_power or power != 1.0:
        top = scale.astype(jnp.float32) * format.max
        if own_power:
            nonzero = jnp.where(groups == 0, jnp.inf, jnp.abs(groups))
            smallest = jnp.min(nonzero, axis=within, keepdims=True, initial=jnp.inf)
            smallest = jnp.maximum(smallest, top * 2.0**-octaves)
            exponent = expansion.exponent(top, smallest, format.dynamic_range)
            k = expansion.power(exponent)
            exponent = exponent.squeeze(within)
        scaled = expansion.expand(groups, top, k) * format.max
        if own_power:
            # No number above zero may become zero, since an update may divide by it.
            scaled = jnp.where(groups == 0, 0.0, jnp.maximum(scaled, format.smallest))
        elif noise is not None:
            # A number below the smallest code becomes that code with a probability
            # linear in x, not in x**k, so that the mean of x is right.
            ratio = (format.smallest / format.max) ** (1 / k)
            linear = jnp.abs(groups) * (format.smallest / ratio / top)
            scaled = jnp.where(scaled < format.smallest, linear, scaled)
        scaled = jnp.copysign(scaled, groups)
    else:
        scaled = groups * reciprocal(scale.astype(jnp.float32))
    codes = format.encode(scaled, noise, k)
    return QuantizedArray(
        # Without the barrier XLA may cancel a conversion to 8 bits and back.
        codes=lax.optimization_barrier(sharded_like(x, merge(codes, x.shape))),
        scale=scale.squeeze(within),
        exponent=exponent,
        format=format,
        granularity=granularity,
        dtype=jnp.dtype(x.dtype),
        power=power,
    )


_WITHOUT_DERIVATIVES = (
    "quantized numbers have no derivatives: what fp8_remat, fp8_dot_general and the "
    "FP8 recipes compute can be differentiated once, and backward; elsewhere quantize "
    "jax.lax.stop_gradient(x)"
)
_STEPS_WITHOUT_DERIVATIVES = (
    "steps with moments in 8 bits have no derivatives: in inner loops take the "
    "optimizer of optax, or quantize_mask=False; elsewhere pass "
    "jax.lax.stop_gradient(gradients)"
)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def undifferentiated(x: Any, reason: str = _WITHOUT_DERIVATIVES) -> Any:
    """Returns a tree of arrays; differentiating it raises NotImplementedError.

    It marks arrays before quantization, which has no derivative rule of its own. Within
    a custom_vjp the error occurs only if a gradient is differentiated again.

    Args:
      x: The arrays.
      reason: The message of the error.
    """
    del reason
    return x


@undifferentiated.defjvp
def _(reason, primals, tangents):
    raise NotImplementedError(reason)


def step_without_derivatives(grads: Any) -> Any:
    """Returns gradients; differentiating a step by them raises NotImplementedError.

    Codes of moments have no tangents, so that derivatives through the state of a step
    would be lost.
    """
    return undifferentiated(grads, _STEPS_WITHOUT_DERIVATIVES)


def dequantize(q: QuantizedArray) -> Float[Array, "..."]:
    """Returns the array that `q` stands for, computed in float32 and cast to `q.dtype`.

    The values are `codes * scale`, or with range expansion
    `sign(c) * max * scale * (|c| / max) ** (1 / k)`.

    Raises:
      TypeError: If `q` is not a `QuantizedArray`.
      ValueError: If `q` does not have a scale for each group, as after a slice of its
        codes and scales that cuts groups.

    Examples:
      >>> import coat_jax as coat, jax.numpy as jnp
      >>> coat.dequantize(coat.quantize(jnp.array([7.0, -1.75])))
      Array([ 7.  , -1.75], dtype=float32)
    """
    if not isinstance(q, QuantizedArray):
        raise TypeError(f"dequantize takes a coat.QuantizedArray, got {summary(q)}")
    values = split(q.format.decode(q.codes), _block(q))
    scale = broadcastable(q.scale).astype(jnp.float32)
    if q.exponent is None and q.power == 1.0:
        values = values * scale
    else:
        t = jnp.abs(values) * (1.0 / q.format.max)
        top = scale * q.format.max
        k = q.power
        if q.exponent is not None:
            k = expansion.power(broadcastable(q.exponent))
        values = jnp.copysign(expansion.contract(t, top, k), values)
    return sharded_like(q.codes, merge(values, q.shape)).astype(q.dtype)


def tensor_scale(largest: Float[Array, "..."], format: Format) -> Float[Array, "..."]:
    """Computes the scale that `quantize` gives a `PerTensor` array of this amax.

    The scale is a power of two, float32. It is NaN where the amax is not finite.
    """
    return _stored_scale(largest, format, PerTensor())


def _stored_scale(largest: Array, format: Format, granularity: Granularity) -> Array:
    """Computes the scale to store; scale and 1 / scale are normal numbers.

    The scale has an upper limit, so that max * scale fits bfloat16.
    """
    if isinstance(granularity, PerTensor):
        step = 0.0 if format.table else float(ml_dtypes.finfo(format.dtype).eps)
        return power_of_two_scale(largest, format.max, step=step)
    return group_scale(largest, format.max).astype(jnp.bfloat16)


def _block(q: QuantizedArray) -> tuple[int, ...]:
    """Returns the shape of a group of `q`.

    It is 1 along leading axes that `vmap` or `scan` added: there `codes` and `scale`
    have the same length.

    Raises:
      ValueError: If there is not one scale for each group, as in slices that cut groups
        and in transposed arrays.
    """
    block = list(q.granularity.block(q.shape))
    # Blocks span two axes or more, so that their added axes have the length 1 already.
    if not isinstance(q.granularity, PerBlock):
        for axis, (n, groups) in enumerate(zip(q.shape, q.scale.shape, strict=False)):
            if n != groups:
                break
            block[axis] = 1
    scales = tuple(n for n, _ in groups_and_lengths(q.shape, tuple(block)))
    if q.scale.shape != scales:
        raise ValueError(
            f"{q.granularity} of codes {q.shape} needs scales {scales}, got "
            f"{q.scale.shape}: slice and transpose what dequantize() returns"
        )
    return tuple(block)


_FLOATS = {"bfloat16": "uint16", "float32": "uint32"}
_BITS = _FLOATS | {bits: name for name, bits in _FLOATS.items()}


def scales_as_bits(x: Array) -> Array:
    """Bitcasts scales to unsigned integers, and these integers back to scales.

    Codes are returned unchanged. `fp8_remat` saves integers exactly.
    """
    dtype = _BITS.get(x.dtype.name)
    return lax.bitcast_convert_type(x, dtype) if dtype else x
