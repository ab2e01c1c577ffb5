"""Gated activations with FP8 inputs and outputs: SwiGLU, GEGLU, their gradients."""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.checks import CODES, WIDE, check_dtype, check_shape, scalar
from pallas_kernels.dispatch import operations
from pallas_kernels.dispatch.axes import WHOLE, Axes, tokens
from pallas_kernels.mosaic import elementwise, strips
from pallas_kernels.mosaic.sink import Encoded
from pallas_kernels.mosaic.strips import Encoding, Tuning
from pallas_kernels.numerics import GROUP, Scaled
from pallas_kernels.ops.gate import kernel as gate_rows
from pallas_kernels.ops.gate import reference
from pallas_kernels.ops.gate.formulas import Product, ProductGrad
from pallas_kernels.ops.gate.operands import (
    as_operands,
    axes_of_parts,
    axes_of_results,
    check_activation,
    in_given_form,
    is_apart,
    number_of_parts,
    with_one_axis,
)
from pallas_kernels.ops.gate.reference import Activation, Apart, Gated, joined
from pallas_kernels.ops.quantize.tensor import Wanted, wanted

_PRODUCT = Encoding(transposed=jnp.dtype(jnp.float8_e4m3fn), denormals=True)


def gated(
    gate_up: Scaled | Float[Array, "... 2 f"] | Apart,
    *,
    activation: Activation = "silu",
    scale: Float[Array, ""] | Literal["row"] | None = None,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    copies: Wanted = "row",
    keep_groups: bool = False,
    implementation: operations.Implementation | None = None,
    tuning: Tuning | None = None,
) -> Gated:
    """Computes `y = activation(gate) * up` in float32 and rounds it once.

    Args:
      gate_up: Gate and up [..., 2, f]: codes in groups of 16, or bfloat16 or float32;
        or a tuple of two arrays [..., f]. A tuple of one array is the gate alone, for
        `y = activation(gate)`.
      activation: The activation: "silu", "gelu" (GELU's tanh form) or "gelu_exact".
      scale: The scale of the output. None returns bfloat16. A float32 scalar returns
        codes of y / scale. "row" returns codes and per-token scales, amax / code_max.
      dtype: The dtype of the codes, `float8_e4m3fn` or `float8_e5m2`.
      copies: The copies to return with a scalar `scale`: codes [..., f], their
        transpose [f, tokens] or both. All leading axes are tokens.
      keep_groups: Whether to return gate and up as e4m3 codes in groups of 16 as well,
        and the largest group scale of each token. `gate_up` must not be codes, and
        `scale` must be "row".
      implementation: The implementation; None means the kernel where it can run.
      tuning: Tile sizes of the kernel; None means the default.

    Raises:
      ValueError: If the arguments contradict each other, or the kernel was named and
        cannot run.

    Examples:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import gated, quantize_groups
      >>> gate_up = quantize_groups(jnp.full((3, 2, 16), 7.0))
      >>> gated(gate_up).values.shape, float(gated(gate_up).largest.max())
      ((3, 16), 49.0)
      >>> gated(gate_up, scale="row").scale.shape
      (3,)
      >>> gated(gate_up, scale=jnp.float32(2.0), copies="both").transposed.shape
      (16, 3)
    """
    operands = as_operands(gate_up)
    row, transposed = _checked(operands, activation, scale, dtype, copies)
    scale = scalar("scale", scale, None, "row")
    if keep_groups and (isinstance(operands[0], Scaled) or not isinstance(scale, str)):
        raise ValueError(
            f"keep_groups needs wide arrays and scale='row', got scale={scale!r}"
        )
    by_token = isinstance(scale, str)
    operation = _Gated(
        activation=activation,
        scale="row" if by_token else None,
        dtype=jnp.dtype(dtype),
        row=row,
        transposed=transposed,
        keep_groups=keep_groups,
        tuning=tuning,
    )
    arrays = operands, None if by_token else scale
    out = operation(*arrays, implementation=implementation)
    return out._replace(groups=in_given_form(out.groups, gate_up))


def gated_grad(
    gate_up: Scaled | Apart,
    dy: Float[Array, "... f"],
    *,
    activation: Activation = "silu",
    scale: Float[Array, ""] | None = None,
    dtype: DTypeLike = jnp.float8_e5m2,
    copies: Wanted = "row",
    product_scale: Float[Array, ""] | None = None,
    keep_product: bool = False,
    implementation: operations.Implementation | None = None,
    tuning: Tuning | None = None,
) -> Gated:
    """Computes the gradients of gate and up in float32, and rounds them once.

    The gradient of gate is `dy * up * activation'(gate)`, and the gradient of up is
    `dy * activation(gate)`.

    Args:
      gate_up: Gate and up, codes [..., 2, f] in groups of 16; or a tuple of two arrays
        of codes [..., f]. A tuple of one array is the gate alone, with the gradient
        `dy * activation'(gate)`.
      dy: The gradient of `gated`'s output, bfloat16 or float32.
      activation: The activation: "silu", "gelu" (GELU's tanh form) or "gelu_exact".
      scale: The scale of the gradients. None returns bfloat16. A float32 scalar returns
        codes of both gradients / scale.
      dtype: The dtype of the codes, `float8_e4m3fn` or `float8_e5m2`.
      copies: The copies to return with a scale: codes [..., 2, f], their transpose
        [2 f, tokens] or both. All leading axes are tokens.
      product_scale: The per-tensor scale of `gated`'s output, which is then returned,
        too, as transposed float8_e4m3fn codes [f, tokens]. It needs `scale`, unless
        the gate is alone. None does not return these codes.
      keep_product: Whether to return `gated`'s output in bfloat16 [..., f] as well. It
        needs neither `scale` nor `product_scale`.
      implementation: The implementation; None means the kernel where it can run.
      tuning: Tile sizes of the kernel; None means the default.

    Raises:
      ValueError: If the arguments contradict each other, or the kernel was named and
        cannot run.

    Examples:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import gated_grad, quantize_groups
      >>> gate_up = quantize_groups(jnp.full((3, 2, 16), 7.0))
      >>> gated_grad(gate_up, jnp.ones((3, 16), jnp.bfloat16)).values.shape
      (3, 2, 16)
    """
    if isinstance(scale, str):
        raise ValueError(f"scale must be None or a scalar, got {scale!r}")
    operands = as_operands(gate_up)
    row, transposed = _checked(operands, activation, scale, dtype, copies)
    scale = scalar("scale", scale, None)
    product_scale = scalar("product_scale", product_scale, None)
    with_product = product_scale is not None
    if with_product and scale is None and number_of_parts(operands) == 2:
        raise ValueError("product_scale needs a scale, got None")
    if keep_product and not (scale is None and product_scale is None):
        raise ValueError("keep_product takes no scales: the product is in bfloat16")
    check_dtype("dy", dy.dtype, WIDE)
    *leading, _, n = operands[0].codes.shape
    check_shape("dy", dy, (*leading, n))
    operation = _GatedGrad(
        activation=activation,
        dtype=jnp.dtype(dtype),
        row=row,
        transposed=transposed,
        keep_product=keep_product,
        tuning=tuning,
    )
    arrays = operands, dy, scale, product_scale
    out = operation(*arrays, implementation=implementation)
    transposed = out.transposed
    if transposed is not None and not is_apart(gate_up):
        (transposed,) = transposed
    return out._replace(
        values=in_given_form(out.values, gate_up), transposed=transposed
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Gated(operations.Operation):
    """The operation of `gated`, on gate and up, and a scalar scale or None.

    Attributes:
      activation: The activation.
      scale: "row" for per-token scales; None if the operand `scale` is used.
      dtype: The dtype of codes.
      row: Whether to return the product.
      transposed: Whether to return its transpose.
      keep_groups: Whether to return gate and up in groups.
      tuning: Tile sizes of the kernel, or None.
    """

    activation: Activation
    scale: Literal["row"] | None
    dtype: jnp.dtype
    row: bool
    transposed: bool
    keep_groups: bool
    tuning: Tuning | None
    name = "gated"

    def obstacle(self, operands, scale) -> str | None:
        *leading, _, n = jax.tree.leaves(operands)[0].shape
        if self.scale == "row":
            return gate_rows.obstacle(math.prod(leading), n)
        parts = number_of_parts(operands)
        return strips.obstacle(math.prod(leading), parts, n, transposed=self.transposed)

    def reference(self, operands, scale) -> Gated:
        return reference.gated(
            operands,
            activation=self.activation,
            scale=self.scale or scale,
            dtype=self.dtype,
            row=self.row,
            transposed=self.transposed,
            keep_groups=self.keep_groups,
        )

    def axes(self, operands, scale) -> tuple:
        return (axes_of_parts(operands), WHOLE), axes_of_results(operands, "_")

    def kernel(self, operands, scale) -> Gated:
        *leading, _, n = jax.tree.leaves(operands)[0].shape
        product = Product(activation=self.activation)
        tall = with_one_axis(operands, math.prod(leading))
        if self.scale == "row":
            out = gate_rows.run(
                product, tall, dtype=self.dtype, keep_groups=self.keep_groups
            )
            values, scale = out.values.reshape(*leading, n), out.scale.reshape(leading)
            if not self.keep_groups:
                return Gated(values, scale=scale)
            groups = jax.tree.map(
                lambda x: x.reshape(*leading, x.shape[1], -1), out.groups
            )
            largest = out.largest_scale.reshape(leading)
            return Gated(values, scale=scale, groups=groups, largest_scale=largest)
        encoding = _encoding(scale, self.dtype, self.row, self.transposed)
        (out,) = elementwise.run(
            product, tall, scale, name=self.name, encoding=encoding, tuning=self.tuning
        )
        return _gated(out, (*leading, n))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _GatedGrad(operations.Operation):
    """The operation of `gated_grad`, on gate and up, dy, scale and product_scale.

    Attributes:
      activation: The activation.
      dtype: The dtype of codes.
      row: Whether to return the gradients.
      transposed: Whether to return their transpose.
      keep_product: Whether to return the output of `gated` in bfloat16.
      tuning: Tile sizes of the kernel, or None.
    """

    activation: Activation
    dtype: jnp.dtype
    row: bool
    transposed: bool
    keep_product: bool
    tuning: Tuning | None
    name = "gated_grad"

    def obstacle(self, operands, dy, scale, product_scale) -> str | None:
        *leading, n = dy.shape
        transposed = self.transposed or product_scale is not None
        parts = number_of_parts(operands)
        return strips.obstacle(math.prod(leading), parts, n, transposed=transposed)

    def reference(self, operands, dy, scale, product_scale) -> Gated:
        return reference.gated_grad(
            operands,
            dy,
            activation=self.activation,
            scale=scale,
            dtype=self.dtype,
            row=self.row,
            transposed=self.transposed,
            product_scale=product_scale,
            keep_product=self.keep_product,
        )

    def axes(self, operands, dy, scale, product_scale) -> tuple:
        row = Axes(f"{tokens(dy.ndim - 1)} _")
        taken = axes_of_parts(operands), row, WHOLE, WHOLE
        results = axes_of_results(operands, "_ _")
        return taken, results._replace(product=row) if self.keep_product else results

    def kernel(self, operands, dy, scale, product_scale) -> Gated:
        *leading, n = dy.shape
        count = math.prod(leading)
        more = _PRODUCT if product_scale is not None else None
        if self.keep_product:
            more = Encoding(wide=jnp.dtype(jnp.bfloat16))
        with_product = more is not None
        apart = len(operands) == 2
        encoding = _encoding(scale, self.dtype, self.row, self.transposed)
        if apart:  # The amax of each part would take registers.
            encoding = dataclasses.replace(encoding, maxima=False)
        out = elementwise.run(
            ProductGrad(activation=self.activation, with_product=with_product),
            (*with_one_axis(operands, count), dy.reshape(count, 1, n)),
            scale,
            product_scale,
            name=self.name,
            encoding=encoding,
            more=more,
            parts=number_of_parts(operands),
            apart=apart,
            tuning=self.tuning,
        )
        product = None
        if with_product:
            of_gate = out.pop()
            wide, codes = of_gate.wide, of_gate.transposed
            product = codes[0] if wide is None else wide.reshape(dy.shape)
        shapes = [x.codes.shape for x in operands]
        grads = [_gated(*each) for each in zip(out, shapes, strict=True)]
        return joined(grads)._replace(product=product)


def _checked(operands, activation, scale, dtype, copies) -> tuple[bool, bool]:
    """Checks arguments of `gated` or `gated_grad`.

    Returns whether to return codes, and whether to return their transpose.
    """
    check_activation(activation)
    check_dtype("codes", dtype, CODES)
    in_groups = isinstance(operands[0], Scaled)
    for x in operands:
        values = x.codes if in_groups else x
        check_dtype("gate and up", values.dtype, CODES if in_groups else WIDE)
        n = values.shape[-1]
        if in_groups and (count := x.scale.shape[-1]) != -(-n // GROUP):
            raise ValueError(f"groups must have 16 of {n} elements, got {count}")
    if isinstance(scale, str) and scale != "row":
        raise ValueError(f"scale must be None, a scalar or 'row', got {scale!r}")
    row, transposed = wanted(copies)
    if transposed and (scale is None or isinstance(scale, str)):
        raise ValueError(f"a transposed copy needs a scalar scale, got {scale!r}")
    return row, transposed


def _encoding(scale, dtype, row: bool, transposed: bool) -> Encoding:
    if scale is None:
        return Encoding(wide=jnp.dtype(jnp.bfloat16), maxima=True)
    return Encoding(
        row=dtype if row else None,
        transposed=dtype if transposed else None,
        # Denormal values have errors of their own, so flushing them is not worthwhile.
        denormals=True,
        maxima=True,
    )


def _gated(out: Encoded, shape: tuple[int, ...]) -> Gated:
    values = out.row if out.wide is None else out.wide
    transposed = out.transposed
    if transposed is not None:
        transposed = transposed.reshape(-1, transposed.shape[-1])
    if values is not None:
        values = values.reshape(shape)
    return Gated(values, transposed, largest=out.maxima)
