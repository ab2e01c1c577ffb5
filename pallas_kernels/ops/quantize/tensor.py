"""Quantization with a per-tensor scale, and transposition of codes."""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import dispatch
from pallas_kernels.axes import WHOLE, Axes, as_it_is, tokens, transposed_tokens
from pallas_kernels.checks import CODES, WIDE, check_dtype, scalar
from pallas_kernels.mosaic import elementwise, strips
from pallas_kernels.mosaic.strips import Encoding, Tuning
from pallas_kernels.numerics import Codes, behind
from pallas_kernels.ops.quantize import reference
from pallas_kernels.ops.quantize.api import flat, numbers

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
    implementation: dispatch.Implementation | None = None,
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
      ValueError: If a dtype is not supported, or the kernel was named and cannot run.

    Example:
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
class _QuantizeTensor(dispatch.Operation):
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
        codes = reference.quantize_tensor(
            x,
            scale if after is None else behind(scale, after),
            dtype=self.dtype,
            row=self.row,
            transposed=self.transposed,
            keep_maxima=self.keep_maxima,
        )
        return self._unmerged(codes, x)

    def axes(self, x, scale, after) -> tuple:
        leading = tokens(x.ndim - 1)
        behind_n = transposed_tokens(x.ndim - 1) if self.merge else leading
        row, transposed = f"{leading} n", f"n {behind_n}"
        operands = Axes(row), WHOLE, None if after is None else as_it_is(after)
        largest = Axes("_", reduced="max")
        results = Codes(Axes(row), Axes(transposed), WHOLE, largest)
        return operands, results

    def kernel(self, x, scale, after) -> Codes:
        (out,) = elementwise.run(
            numbers,
            (in_tokens(x) if self.transposed else flat(x),),
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
        return self._unmerged(codes, x)

    def _unmerged(self, codes: Codes, x: Array) -> Codes:
        if self.merge or codes.transposed is None:
            return codes
        shape = x.shape[-1], *x.shape[:-1]
        return codes._replace(transposed=codes.transposed.reshape(shape))


def transpose(
    codes: Float[Array, "... n"],
    *,
    implementation: dispatch.Implementation | None = None,
    tuning: Tuning | None = None,
) -> Float[Array, "n tokens"]:
    """Transposes FP8 codes [..., n] to [n, tokens]; all leading axes are tokens.

    Raises:
      ValueError: If codes are not `float8_e4m3fn` or `float8_e5m2`, or the kernel was
        named and cannot run.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import transpose
      >>> transpose(jnp.ones((2, 3, 4), jnp.float8_e5m2)).shape
      (4, 6)
    """
    check_dtype("codes", codes.dtype, CODES)
    return _Transpose(tuning=tuning)(codes, implementation=implementation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Transpose(dispatch.Operation):
    tuning: Tuning | None
    name = "transpose"

    def obstacle(self, codes) -> str | None:
        return copies_obstacle(codes.shape, transposed=True)

    def reference(self, codes) -> Array:
        return reference.transpose(codes)

    def axes(self, codes) -> tuple:
        count = codes.ndim - 1
        return (Axes(f"{tokens(count)} n"),), Axes(f"n {transposed_tokens(count)}")

    def kernel(self, codes) -> Array:
        # The kernel moves bytes, so that it does not change NaN codes.
        stored = lax.bitcast_convert_type(in_tokens(codes), jnp.uint8)
        (out,) = elementwise.run(
            _as_stored,
            (stored,),
            name=self.name,
            encoding=Encoding(transposed=stored.dtype),
            tuning=self.tuning or Tuning(columns=128),
        )
        return lax.bitcast_convert_type(out.transposed[0], codes.dtype)


def wanted(copies: Wanted) -> tuple[bool, bool]:
    """Checks `copies`; returns whether to write codes, and their transpose."""
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


def _as_stored(x: Array) -> tuple[Array]:
    return (x,)
