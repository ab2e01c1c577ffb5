"""Gradients of gated activations on rows that are sorted by expert and weighted."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.checks import CODES, WIDE, check_dtype, check_shape, scalar
from pallas_kernels.dispatch import operations
from pallas_kernels.dispatch.axes import WHOLE, Axes
from pallas_kernels.mosaic import elementwise
from pallas_kernels.mosaic.strips import Encoding, Tuning
from pallas_kernels.numerics import GROUP, Scaled, encode
from pallas_kernels.ops.gate import reference
from pallas_kernels.ops.gate.formulas import WeightedGrad
from pallas_kernels.ops.gate.operands import check_activation
from pallas_kernels.ops.gate.reference import Activation
from pallas_kernels.ops.grouped_matmul.checks import check_groups
from pallas_kernels.ops.grouped_matmul.tiles import BLOCK
from pallas_kernels.ops.grouped_matmul.transposed import blocks, pad_groups
from pallas_kernels.ops.quantize.groups import numbers_in_jnp

_COLUMNS = 64  # The length of rows is a multiple of this number.
_TUNING = Tuning(columns=32)


class WeightedGradients(NamedTuple):
    """The outputs of `weighted_gate_grad`; rows after the last group are undefined.

    Attributes:
      values: The codes of the gradients of gate and up [rows, 2, f].
      transposed: Their transpose [2 f, padded], as `grouped_transpose` returns it.
      product: The float8_e4m3fn codes of `weight * activation(gate) * up`, transposed
        in the same way, [f, padded].
      weights: The gradients of the weights, float32 [rows].
    """

    values: Float[Array, "rows 2 f"]
    transposed: Float[Array, "n padded"]
    product: Float[Array, "f padded"]
    weights: Float[Array, " rows"]


def weighted_gate_grad(
    gate_up: Scaled,
    dy: Float[Array, "rows f"],
    weights: Float[Array, " rows"],
    group_sizes: Int[Array, " groups"],
    *,
    scale: Float[Array, ""],
    product_scale: Float[Array, ""],
    activation: Activation = "silu",
    dtype: DTypeLike = jnp.float8_e5m2,
    implementation: operations.Implementation | None = None,
    tuning: Tuning | None = None,
) -> WeightedGradients:
    """Computes the gradients of `y = weight * activation(gate) * up` for grouped rows.

    The gradient of gate is `weight * dy * up * activation'(gate)`, the gradient of up
    is `weight * dy * activation(gate)`, and the gradient of a row's weight is the sum
    of `dy * activation(gate) * up`. All are computed in float32 and rounded once.

    Args:
      gate_up: Gate and up [rows, 2, f], codes in groups of 16.
      dy: The gradient of y, bfloat16 or float32.
      weights: The weight of each row, float32.
      group_sizes: The number of rows of each group, int32.
      scale: The scale of the gradients, float32: codes of both gradients / scale.
      product_scale: The scale of the codes of y.
      activation: The activation: "silu", "gelu" (GELU's tanh form) or "gelu_exact".
      dtype: The dtype of the gradients' codes, `float8_e4m3fn` or `float8_e5m2`.
      implementation: The implementation; None means the kernel where it can run. The
        kernel needs 128 rows after the last group, which it may read. Without these
        rows all codes are NaN.
      tuning: Tile sizes of the kernel; None means the default.

    Raises:
      ValueError: If a dtype or shape is not supported, or the kernel was named and
        cannot run.

    Examples:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import quantize_groups, weighted_gate_grad
      >>> gate_up = quantize_groups(jnp.full((3, 2, 16), 7.0))
      >>> dy, weights = jnp.ones((3, 16), jnp.bfloat16), jnp.full(3, 0.5)
      >>> one, sizes = jnp.float32(1), jnp.array([1, 2], jnp.int32)
      >>> out = weighted_gate_grad(
      ...     gate_up, dy, weights, sizes, scale=one, product_scale=one
      ... )
      >>> out.values.shape, out.transposed.shape, float(out.weights[0].round())
      ((3, 2, 16), (32, 256), 783.0)
    """
    check_activation(activation)
    check_dtype("codes", dtype, CODES)
    check_dtype("dy", dy.dtype, WIDE)
    if gate_up.codes.ndim != 3 or gate_up.codes.shape[1] != 2:
        raise ValueError(f"gate and up must be [rows, 2, f], got {gate_up.codes.shape}")
    rows, _, f = gate_up.codes.shape
    check_shape("dy", dy, (rows, f))
    check_shape("weights", weights, (rows,))
    check_groups(group_sizes, group_sizes.size)
    operation = _WeightedGateGrad(
        activation=activation, dtype=jnp.dtype(dtype), tuning=tuning
    )
    scales = scalar("scale", scale), scalar("product_scale", product_scale)
    arrays = gate_up, dy, weights.astype(jnp.float32), group_sizes, *scales
    return operation(*arrays, implementation=implementation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _WeightedGateGrad(operations.Operation):
    """The operation of `weighted_gate_grad`."""

    activation: Activation
    dtype: jnp.dtype
    tuning: Tuning | None
    name = "weighted_gate_grad"

    def obstacle(self, gate_up, dy, weights, sizes, scale, product_scale) -> str | None:
        rows, f = dy.shape
        if dy.dtype != jnp.bfloat16:
            return f"dy must be bfloat16, got {dy.dtype}"
        if rows < BLOCK or f % _COLUMNS or not f:
            least = f"{BLOCK} rows or more of a multiple of {_COLUMNS} elements"
            return f"it takes {least}, got {rows} of {f}"
        return None

    def reference(self, gate_up, dy, weights, sizes, scale, product_scale):
        numbers = numbers_in_jnp(gate_up, dtype=jnp.float32, group=GROUP)
        gate, up = jnp.unstack(numbers, axis=1)
        factor, slope = reference.activation_of(gate, self.activation)
        weight, dy = weights[:, None], dy.astype(jnp.float32)
        y = gate * factor * up
        gradients = dy * up * slope * weight, dy * (gate * factor) * weight
        codes = encode(jnp.stack(gradients, axis=1), scale, self.dtype)
        product = encode(y * weight, product_scale, jnp.float8_e4m3fn)
        codes, product = lax.optimization_barrier((codes, product))
        return WeightedGradients(
            values=codes,
            transposed=pad_groups(codes.reshape(len(dy), -1), sizes).T,
            product=pad_groups(product, sizes).T,
            weights=jnp.sum(dy * y, axis=1),
        )

    def axes(self, gate_up, dy, weights, sizes, scale, product_scale) -> tuple:
        # Whole rows are sorted by group, so that no axis can be split.
        return (Axes("_ _ _"), Axes("_ _"), Axes("_"), Axes("_"), WHOLE, WHOLE), (
            WeightedGradients(Axes("_ _ _"), Axes("_ _"), Axes("_ _"), Axes("_"))
        )

    def kernel(self, gate_up, dy, weights, sizes, scale, product_scale):
        rows = len(dy)
        # The kernel loads scales of rows that the last block does not need.
        fits = jnp.sum(sizes) <= rows - BLOCK
        scale, product_scale = (
            jnp.where(fits, x, jnp.nan) for x in (scale, product_scale)
        )
        at = blocks(sizes, rows)
        at = at._replace(source=jnp.minimum(at.source, rows - BLOCK), count=None)
        gradients, product, sums = elementwise.run(
            WeightedGrad(activation=self.activation),
            (gate_up, dy[:, None], weights),
            scale,
            product_scale,
            blocks=at,
            name=self.name,
            encoding=Encoding(row=self.dtype, transposed=self.dtype, denormals=True),
            more=Encoding(transposed=jnp.dtype(jnp.float8_e4m3fn), denormals=True),
            sums=True,
            parts=2,
            tuning=self.tuning or _TUNING,
        )
        transposed = gradients.transposed
        return WeightedGradients(
            values=gradients.row,
            transposed=transposed.reshape(-1, transposed.shape[-1]),
            product=product.transposed[0],
            weights=jnp.sum(sums.sums, axis=0),
        )
