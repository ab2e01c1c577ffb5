"""Quantization with a per-tensor scale: the amax, the scale, and the codes.

`tensor_scales`, which computes the scales of several tensors from the amaxes of their
parts, is the last step of COAT's group scaling (arXiv 2410.19313, section 5.2).
"""

import dataclasses
import functools
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.checks import CODES, WIDE, check_dtype, scalar
from pallas_kernels.dispatch import operations
from pallas_kernels.dispatch.axes import (
    WHOLE,
    Axes,
    alike,
    as_it_is,
    tokens,
    transposed_tokens,
)
from pallas_kernels.mosaic import elementwise, strips
from pallas_kernels.mosaic.codec import LANES
from pallas_kernels.mosaic.strips import Encoding, Tuning
from pallas_kernels.numerics import (
    Codes,
    behind,
    encode,
    magnitude,
    magnitude_bits,
    normal,
    tensor_scale,
)
from pallas_kernels.ops.quantize import amax
from pallas_kernels.ops.quantize.groups import flat, flat_obstacle, numbers

# The copies to write: an array, its transpose or both.
Wanted = Literal["row", "transposed", "both"]


def quantize_tensor(
    x: Float[Array, "... n"],
    scale: Float[Array, ""],
    *,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    copies: Wanted = "row",
    merge: bool = True,
    keep_maxima: bool = False,
    after: Array | None = None,
    implementation: operations.Implementation | None = None,
    tuning: Tuning | None = None,
) -> Codes:
    """Quantizes with a per-tensor scale; can transpose the codes.

    Codes are `x * (1 / scale)`, rounded to nearest even and saturated. Magnitudes below
    1.2e-38 count as zero. If the scale is NaN, all codes are NaN.

    Args:
      x: The array to quantize, bfloat16 or float32.
      scale: A float32 scalar. Division by a power of two is exact.
      dtype: The dtype of the codes, `float8_e4m3fn` or `float8_e5m2`.
      copies: The copies to return: codes [..., n], their transpose [n, tokens] or both.
        All leading axes are tokens.
      merge: Whether the transpose has one axis of tokens. Otherwise it is [n, ...], so
        that each of its axes can be split over the devices of a mesh.
      keep_maxima: Whether to return the amax of parts of `x` as well, like `maxima`,
        for the scale of a later `x`.
      after: An array that must be computed before the codes. It is not read. Without
        it XLA may quantize early, and the codes occupy memory until they are used.
      implementation: The implementation; None means the kernel where it can run.
      tuning: Tile sizes of the kernel; None means the default.

    Raises:
      ValueError: If `scale` is not a scalar, a dtype or `copies` is not supported, or
        the kernel was named and cannot run.

    Examples:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import quantize_tensor
      >>> x = jnp.array([[1.0, 2.0], [3.0, 500.0]])
      >>> both = quantize_tensor(x, jnp.float32(0.5), copies="both")
      >>> both.transposed.tolist()
      [[2.0, 6.0], [4.0, 448.0]]
    """
    check_dtype("codes", dtype, CODES)
    check_dtype("x", x.dtype, WIDE)
    scale = scalar("scale", scale)
    row, transposed = wanted(copies)
    operation = _QuantizeTensor(
        dtype=jnp.dtype(dtype),
        row=row,
        transposed=transposed,
        merge=merge,
        keep_maxima=keep_maxima,
        tuning=tuning,
    )
    codes = operation(x, scale, after, implementation=implementation)
    return codes._replace(scale=scale)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _QuantizeTensor(operations.Operation):
    dtype: jnp.dtype
    row: bool
    transposed: bool
    merge: bool
    keep_maxima: bool
    tuning: Tuning | None
    name = "quantize_tensor"

    def obstacle(self, x, scale, after) -> str | None:
        return copies_obstacle(x.shape, self.transposed)

    def reference(self, x, scale, after) -> Codes:
        x = x.astype(jnp.float32)
        first = scale if after is None else behind(scale, after)
        codes = lax.optimization_barrier(encode(normal(x), first, self.dtype))
        copies = Codes(
            codes if self.row else None,
            transpose_in_jnp(codes) if self.transposed else None,
            scale,
            maxima_in_jnp(x) if self.keep_maxima else None,
        )
        return copies if self.merge else self._unmerged(copies, x)

    def axes(self, x, scale, after) -> tuple:
        leading = tokens(x.ndim - 1)
        behind_n = transposed_tokens(x.ndim - 1) if self.merge else leading
        row, transposed = f"{leading} n", f"n {behind_n}"
        operands = Axes(row), WHOLE, None if after is None else as_it_is(after)
        largest = Axes("_", reduced="max")
        results = Codes(Axes(row), Axes(transposed), WHOLE, largest)
        return operands, results

    def kernel(self, x, scale, after) -> Codes:
        strip = in_tokens(x) if self.transposed else flat(x)
        (out,) = elementwise.run(
            numbers,
            (strip,),
            scale,
            after=after,
            name=self.name,
            encoding=Encoding(
                row=self.dtype if self.row else None,
                transposed=self.dtype if self.transposed else None,
                maxima=self.keep_maxima,
            ),
            tuning=self.tuning,
        )
        codes = Codes(
            None if out.row is None else out.row.reshape(x.shape),
            None if out.transposed is None else out.transposed[0],
            scale,
            out.maxima,
        )
        return codes if self.merge else self._unmerged(codes, x)

    def _unmerged(self, codes: Codes, x: Array) -> Codes:
        if codes.transposed is None:
            return codes
        shape = x.shape[-1], *x.shape[:-1]
        return codes._replace(transposed=codes.transposed.reshape(shape))


def transpose(
    codes: Float[Array, "... n"],
    *,
    implementation: operations.Implementation | None = None,
    tuning: Tuning | None = None,
) -> Float[Array, "n tokens"]:
    """Transposes FP8 codes [..., n] to [n, tokens]; all leading axes are tokens.

    Raises:
      ValueError: If codes are not `float8_e4m3fn` or `float8_e5m2`, or the kernel was
        named and cannot run.

    Examples:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import transpose
      >>> transpose(jnp.ones((2, 3, 4), jnp.float8_e5m2)).shape
      (4, 6)
    """
    check_dtype("codes", codes.dtype, CODES)
    return _Transpose(tuning=tuning)(codes, implementation=implementation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Transpose(operations.Operation):
    tuning: Tuning | None
    name = "transpose"

    def obstacle(self, codes) -> str | None:
        return copies_obstacle(codes.shape, transposed=True)

    def reference(self, codes) -> Array:
        return transpose_in_jnp(codes)

    def axes(self, codes) -> tuple:
        count = codes.ndim - 1
        return (Axes(f"{tokens(count)} n"),), Axes(f"n {transposed_tokens(count)}")

    def kernel(self, codes) -> Array:
        # The kernel moves bytes, so that it does not change NaN codes.
        stored = lax.bitcast_convert_type(in_tokens(codes), jnp.uint8)
        (out,) = elementwise.run(
            as_stored,
            (stored,),
            name=self.name,
            encoding=Encoding(transposed=stored.dtype),
            tuning=self.tuning or Tuning(columns=128),
        )
        return lax.bitcast_convert_type(out.transposed[0], codes.dtype)


def maxima(
    x: Float[Array, "..."],
    *more: Float[Array, "..."],
    implementation: operations.Implementation | None = None,
) -> Float[Array, " k"]:
    """Computes the amax of parts of all arrays, float32; NaN if a part has a NaN.

    The maximum of the result is the amax of all arrays together.

    Args:
      x: An array, bfloat16 or float32.
      *more: More arrays, of any shapes.
      implementation: The implementation; None means the kernel where it can run.

    Raises:
      ValueError: If a dtype is not supported, or the kernel was named and cannot run.

    Examples:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import maxima
      >>> float(maxima(jnp.array([1.0, -3.0]), jnp.array([2.0])).max())
      3.0
    """
    arrays = (x, *more)
    for array in arrays:
        check_dtype("x", array.dtype, WIDE)
    return _Maxima()(*arrays, implementation=implementation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Maxima(operations.Operation):
    name = "maxima"

    def obstacle(self, *arrays) -> str | None:
        return next(filter(None, map(flat_obstacle, arrays)), None)

    def reference(self, *arrays) -> Array:
        return maxima_in_jnp(*arrays)

    def axes(self, *arrays) -> tuple:
        return tuple(map(alike, arrays)), Axes("_", reduced="max")

    def kernel(self, *arrays) -> Array:
        return amax.maxima(*arrays)


class Bound(NamedTuple):
    """An upper bound of a tensor's amax: the product of `factor` and arrays' amaxes.

    Attributes:
      maxima: The float32 arrays; the amax of each is a factor of the product.
      factor: A number, which is a further factor.
    """

    maxima: tuple[Float[Array, "..."], ...]
    factor: float = 1.0


def tensor_scales(
    *bounds: Bound,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    implementation: operations.Implementation | None = None,
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

    Examples:
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
class _TensorScales(operations.Operation):
    """The operation of `tensor_scales` on the maxima of each bound.

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
        is_alone = len(jax.tree.leaves(maxima)) == 1
        return "XLA is as fast with one array" if is_alone else None

    def reference(self, *maxima) -> tuple[Array, ...]:
        # The scale rises with the amax, so the scale of the amax is the largest scale
        # of all parts. In this order XLA computes all scales and their maximum in one
        # kernel.
        scales = []
        for (*others, last), factor in zip(maxima, self.factors, strict=True):
            largest = functools.reduce(jnp.multiply, map(magnitude, others), last)
            scales.append(magnitude(tensor_scale(largest * factor, self.dtype)))
        return tuple(scales)

    def axes(self, *maxima) -> tuple:
        return jax.tree.map(alike, maxima), Axes("", reduced="max")

    def kernel(self, *maxima) -> tuple[Array, ...]:
        short = [tuple(map(amax.short, of_tensor)) for of_tensor in maxima]
        scales = amax.scales(short, factors=self.factors, dtype=self.dtype)
        return tuple(scale[0] for scale in scales)


def maxima_in_jnp(*arrays: Float[Array, "..."]) -> Float[Array, " k"]:
    """Computes `pallas_kernels.maxima` in jnp."""
    # Arrays of the same shape are combined first, so that one pass reads all of them.
    alike: dict[tuple[int, ...], Array] = {}
    for x in arrays:
        bits = magnitude_bits(x.astype(jnp.float32))
        before = alike.get(x.shape)
        alike[x.shape] = bits if before is None else jnp.maximum(before, bits)
    largest = [jnp.max(bits, initial=0) for bits in alike.values()]
    return lax.bitcast_convert_type(jnp.stack(largest), jnp.float32)


def transpose_in_jnp(codes: Float[Array, "... n"]) -> Float[Array, "n tokens"]:
    """Computes `pallas_kernels.transpose` in jnp."""
    n = codes.shape[-1]
    return codes.reshape(math.prod(codes.shape[:-1]), n).T


def wanted(copies: Wanted) -> tuple[bool, bool]:
    """Returns whether to return codes, and whether to return their transpose.

    Raises ValueError unless `copies` is "row", "transposed" or "both".
    """
    if copies not in ("row", "transposed", "both"):
        raise ValueError(
            f"copies must be 'row', 'transposed' or 'both', got {copies!r}"
        )
    return copies != "transposed", copies != "row"


def copies_obstacle(shape: tuple[int, ...], transposed: bool) -> str | None:
    """Returns why the kernels cannot write copies of an array of `shape`, or None."""
    size = math.prod(shape)
    if not transposed:
        return strips.obstacle(1, 1, size)
    n = shape[-1]
    return strips.obstacle(size // max(n, 1), 1, n, transposed=True)


def in_tokens(x: Array) -> Array:
    """Reshapes an array to [tokens, 1, n], for `elementwise.run`."""
    return x.reshape(-1, 1, x.shape[-1])


def as_stored(x: Array) -> tuple[Array]:
    """Returns a strip of an operand of `elementwise.run`, unchanged."""
    return (x,)
