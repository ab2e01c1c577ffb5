"""Quantization with scales of groups and rows, and dequantization."""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.checks import CODES, WIDE, check_dtype, check_shape, positive_int
from pallas_kernels.dispatch import operations
from pallas_kernels.dispatch.axes import Axes, as_it_is, grouped, tokens
from pallas_kernels.mosaic import elementwise, strips
from pallas_kernels.mosaic.codec import LANES, decode
from pallas_kernels.mosaic.rows import Tuning as NormTuning
from pallas_kernels.mosaic.rows import obstacle as rows_obstacle
from pallas_kernels.mosaic.strips import Encoding, Tuning
from pallas_kernels.numerics import (
    Scaled,
    code_max,
    encode,
    group_scale,
    magnitude,
    normal,
    reciprocal,
)
from pallas_kernels.ops.quantize import rows as rows_kernel

_LONGEST_ROW = 24576  # The longest row that fits in the registers of a warpgroup.
_SHORT = 4096  # The longest row of which a multiprocessor has several in registers.


def quantize_groups(
    x: Float[Array, "... n"],
    *,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    group: int = 16,
    implementation: operations.Implementation | None = None,
    tuning: Tuning | None = None,
) -> Scaled:
    """Quantizes with one scale per group of `group` neighbours on the last axis.

    The scale of a group is `amax / code_max`, rounded to bfloat16. Codes are
    `x * (1 / scale)`, rounded to nearest even and saturated. Magnitudes below 1.2e-38
    count as zero. If a group contains NaN or infinity, all of it becomes NaN. The last
    group is shorter if `group` does not divide the last axis.

    Args:
      x: The array to quantize, bfloat16 or float32.
      dtype: The dtype of the codes, `float8_e4m3fn` or `float8_e5m2`.
      group: The number of elements of a group.
      implementation: The implementation; None means the kernel where it can run.
      tuning: Tile sizes of the kernel; None means the default.

    Raises:
      ValueError: If a dtype or `group` is not supported, or the kernel was named and
        cannot run.

    Examples:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import dequantize_groups, quantize_groups
      >>> groups = quantize_groups(jnp.full((2, 32), 7.0), group=16)
      >>> groups.codes.dtype, groups.scale.shape
      (dtype(float8_e4m3fn), (2, 2))
      >>> float(dequantize_groups(groups).max())
      7.0
    """
    check_dtype("codes", dtype, CODES)
    check_dtype("x", x.dtype, WIDE)
    group = positive_int("group", group)
    operation = _QuantizeGroups(dtype=jnp.dtype(dtype), group=group, tuning=tuning)
    return operation(x, implementation=implementation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _QuantizeGroups(operations.Operation):
    dtype: jnp.dtype
    group: int
    tuning: Tuning | None
    name = "quantize_groups"

    def obstacle(self, x) -> str | None:
        return flat_obstacle(x, self.group)

    def reference(self, x) -> Scaled:
        return groups_in_jnp(x, dtype=self.dtype, group=self.group)

    def axes(self, x) -> tuple:
        elements, groups = grouped(x.ndim - 1, x.shape[-1], self.group)
        return (elements,), Scaled(elements, groups)

    def kernel(self, x) -> Scaled:
        (out,) = elementwise.run(
            numbers,
            (flat(x),),
            name=self.name,
            encoding=Encoding(groups=self.dtype),
            group=self.group,
            tuning=self.tuning,
        )
        codes, scale = out.groups
        return Scaled(codes.reshape(x.shape), scale.reshape(*x.shape[:-1], -1))


def quantize_rows(
    x: Float[Array, "... n"],
    scale: Float[Array, "..."] | None = None,
    *,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    after: Array | None = None,
    implementation: operations.Implementation | None = None,
    tuning: NormTuning | None = None,
) -> Scaled:
    """Quantizes with per-token scales, which `matmul` takes for activations.

    Codes and scales are as in `quantize_groups` with one group per token: scales are
    `amax / code_max`, rounded to bfloat16, and codes are `x / scale`.

    Args:
      x: The array to quantize, bfloat16 or float32. All axes but the last are tokens.
      scale: The scale of each token, float32, with which codes are `x * (1 / scale)`,
        rounded to nearest even and saturated; None for amax / code_max. The reciprocal
        is correctly rounded for scales of 8 significant bits, and has an error in the
        last bit for some others. Codes are NaN where the scale or its reciprocal is not
        a normal number.
      dtype: The dtype of the codes, `float8_e4m3fn` or `float8_e5m2`.
      after: An array that must be computed before the kernel runs. It is not read.
      implementation: The implementation; None means the kernel where it can run.
      tuning: Settings of the kernel's pipeline; None means the default.

    Returns:
      The codes [..., n] and the float32 scales [...].

    Raises:
      ValueError: If a dtype or shape is not supported, or the kernel was named and
        cannot run.

    Examples:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import quantize_rows
      >>> codes, scale = quantize_rows(jnp.array([[1.0, -2.0], [28.0, 7.0]]))
      >>> codes.tolist(), scale.shape
      ([[224.0, -448.0], [448.0, 112.0]], (2,))
    """
    check_dtype("codes", dtype, CODES)
    check_dtype("x", x.dtype, WIDE)
    if scale is not None:
        scale = jnp.asarray(scale)
        check_dtype("scale", scale.dtype, (jnp.dtype(jnp.float32),))
        check_shape("scale", scale, x.shape[:-1])
    operation = _QuantizeRows(dtype=jnp.dtype(dtype), tuning=tuning)
    return operation(x, scale, after, implementation=implementation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _QuantizeRows(operations.Operation):
    dtype: jnp.dtype
    tuning: NormTuning | None
    name = "quantize_rows"

    def obstacle(self, x, scale, after) -> str | None:
        longest = _LONGEST_ROW if scale is None else x.shape[-1]
        return rows_obstacle(x.shape, longest)

    def reference(self, x, scale, after) -> Scaled:
        return _rows_in_jnp(x, scale, dtype=self.dtype)

    def axes(self, x, scale, after) -> tuple:
        leading = tokens(x.ndim - 1)
        # Rows may be split over devices if their scales are given.
        row = Axes(f"{leading} {'_' if scale is None else 'n'}")
        of_scale = None if scale is None else Axes(leading)
        operands = row, of_scale, None if after is None else as_it_is(after)
        return operands, Scaled(row, Axes(leading))

    def kernel(self, x, scale, after) -> Scaled:
        rows, inverse = x.reshape(-1, x.shape[-1]), None
        if scale is not None:
            # Parts of long rows are rows with the same scale.
            parts = _parts(x.shape[-1])
            rows = rows.reshape(-1, x.shape[-1] // parts)
            inverse = jnp.repeat(reciprocal(scale).reshape(-1), parts)
        # A multiprocessor has enough registers for this many thread blocks.
        tuning = self.tuning or NormTuning(ctas=8 if rows.shape[1] <= _SHORT else 4)
        options = {"dtype": self.dtype, "tuning": tuning}
        codes, found = rows_kernel.run(rows, inverse, after, **options)
        scale = found.reshape(x.shape[:-1]) if scale is None else scale
        return Scaled(codes.reshape(x.shape), scale)


def _parts(n: int) -> int:
    """Returns the smallest number of equal parts to cut a row of `n` elements into.

    A part has at most `_SHORT` elements, and its length is a multiple of 128.
    """
    vectors = n // LANES
    return next(i for i in range(1, n) if not vectors % i and n // i <= _SHORT)


def dequantize_groups(
    groups: Scaled,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    group: int | None = None,
    implementation: operations.Implementation | None = None,
    tuning: Tuning | None = None,
) -> Float[Array, "... n"]:
    """Dequantizes groups: computes `code * scale` in float32, and casts to `dtype`.

    See `quantize_groups` for an example.

    Args:
      groups: The codes [..., n] and the scales of groups.
      dtype: The dtype of the numbers, bfloat16 or float32.
      group: The size of groups; the last one may be shorter. None takes groups of equal
        size if the number of groups divides n, and otherwise a power of two: 24
        elements with 2 scales are in groups of 12, but with `group=16` in groups of 16
        and 8.
      implementation: The implementation; None means the kernel where it can run.
      tuning: Tile sizes of the kernel; None means the default.

    Raises:
      ValueError: If the dtype of codes or `dtype` is not supported, the number of
        groups does not fit `group`, or the kernel was named and cannot run.
    """
    check_dtype("codes", groups.codes.dtype, CODES)
    check_dtype("numbers", dtype, WIDE)
    n, count = groups.codes.shape[-1], groups.scale.shape[-1]
    if group is not None and (group < 1 or -(-n // group) != count):
        raise ValueError(f"{n} elements in groups of {group} are not {count} groups")
    of_rows = (*groups.codes.shape[:-1], count)
    groups = groups._replace(scale=jnp.broadcast_to(groups.scale, of_rows))
    operation = _DequantizeGroups(dtype=jnp.dtype(dtype), group=group, tuning=tuning)
    return operation(groups, implementation=implementation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _DequantizeGroups(operations.Operation):
    dtype: jnp.dtype
    group: int | None
    tuning: Tuning | None
    name = "dequantize_groups"

    def obstacle(self, groups) -> str | None:
        count, n = groups.scale.shape[-1], groups.codes.shape[-1]
        if (self.group or groups.group) * count != n:
            return f"{count} groups do not divide {n} elements"
        return flat_obstacle(groups.codes, max(groups.group, 1))

    def reference(self, groups) -> Array:
        return numbers_in_jnp(groups, dtype=self.dtype, group=self.group)

    def axes(self, groups) -> tuple:
        codes = groups.codes
        elements, of_groups = grouped(codes.ndim - 1, codes.shape[-1], groups.group)
        return (Scaled(elements, of_groups),), elements

    def kernel(self, groups) -> Array:
        (out,) = elementwise.run(
            numbers,
            (Scaled(flat(groups.codes), flat(groups.scale)),),
            name=self.name,
            encoding=Encoding(wide=self.dtype),
            group=groups.group,
            tuning=self.tuning,
        )
        return out.wide.reshape(groups.codes.shape)


def flat_obstacle(x: Array, group: int | None = None) -> str | None:
    """Returns why the kernels cannot read `x` as one row, or None.

    `group` is the number of elements of a group, if the kernel reads or writes groups.
    """
    if group and x.shape[-1] % group:
        return f"the last axis must be a multiple of {group}, got {x.shape[-1]}"
    return strips.obstacle(1, 1, x.size, group=group or 16)


def flat(x: Array) -> Array:
    """Reshapes an array to one row [1, 1, size], for `elementwise.run`."""
    return x.reshape(1, 1, -1)


def numbers(x: Array | Scaled) -> tuple[Array]:
    """Returns a strip of an operand of `elementwise.run`, decoded to float32."""
    return (decode(x),)


def groups_in_jnp(x: Float[Array, "... n"], *, dtype: DTypeLike, group: int) -> Scaled:
    """Computes `pallas_kernels.quantize_groups` in jnp."""
    n, count = x.shape[-1], -(-x.shape[-1] // group)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, count * group - n)]
    groups = jnp.pad(x, padding).reshape(*x.shape[:-1], count, group)
    codes, scale = _quantized(groups, dtype)
    codes = codes.reshape(*x.shape[:-1], count * group)[..., :n]
    return Scaled(lax.optimization_barrier(codes), scale.astype(jnp.bfloat16))


def _rows_in_jnp(
    x: Float[Array, "... n"], scale: Float[Array, "..."] | None, *, dtype: DTypeLike
) -> Scaled:
    """Computes `pallas_kernels.quantize_rows` in jnp."""
    codes, scale = _quantized(x, dtype, scale)
    return Scaled(lax.optimization_barrier(codes), scale)


def _quantized(
    x: Float[Array, "... n"], dtype: DTypeLike, scale: Float[Array, "..."] | None = None
) -> tuple[Array, Array]:
    """Quantizes with one scale per row; computes the scales if `scale` is None.

    Returns the codes and the float32 scales.
    """
    x = normal(x.astype(jnp.float32))
    if scale is None:
        scale = group_scale(magnitude(x, axis=-1), code_max(dtype))
    return encode(x, scale[..., None], dtype), scale


def numbers_in_jnp(
    groups: Scaled, *, dtype: DTypeLike, group: int | None = None
) -> Float[Array, "... n"]:
    """Computes `pallas_kernels.dequantize_groups` in jnp.

    `group` is the size of groups; the last group may be short. By default the size
    follows from the number of groups.
    """
    n, count = groups.codes.shape[-1], groups.scale.shape[-1]
    if group is None or -(-n // group) != count:
        group = _size_of_groups(n, count)
    scale = jnp.repeat(groups.scale.astype(jnp.float32), group, axis=-1)[..., :n]
    return (groups.codes.astype(jnp.float32) * scale).astype(dtype)


def _size_of_groups(n: int, count: int) -> int:
    group = -(-n // max(count, 1))
    # Several group sizes are possible if the last group is short. The size is taken to
    # be a power of two.
    return group if n % max(count, 1) == 0 else 1 << (group - 1).bit_length()
