"""Gated activations between FP8 arrays: SwiGLU, GEGLU and their gradients."""

import dataclasses
import functools
import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import dispatch
from pallas_kernels.checks import CODES, WIDE, check_dtype, check_shape, scalar
from pallas_kernels.mosaic import elementwise, strips
from pallas_kernels.mosaic.codec import decode
from pallas_kernels.mosaic.strips import Encoding, Tuning
from pallas_kernels.numerics import GROUP, Groups
from pallas_kernels.ops.gate import kernel as gate_rows
from pallas_kernels.ops.gate import reference
from pallas_kernels.ops.gate.reference import (
    GELU,
    GELU_CUBIC,
    GELU_MAX,
    Activation,
    Gated,
)
from pallas_kernels.ops.quantize.api import Wanted, wanted

_LOG2_E = math.log2(math.e)
_GELU = -_LOG2_E * GELU
_SQRT_HALF = math.sqrt(0.5)
_DENSITY = 1 / math.sqrt(2 * math.pi)  # The normal distribution's at 0.
# exp(z**2) erfc(z) / 2 = t P(t) with t = 1 / (1 + z _TAIL), for z from 0 to 9.5, beyond
# which erfc underflows. The coefficients of P from the constant on: fitted to float64,
# with relative errors of at most 6e-6.
_TAIL = 0.43
_ERFC = (
    0.12162880,
    0.11625502,
    0.14068296,
    -0.0053946,
    0.20352425,
    -0.07669386,
)
_PRODUCT = Encoding(transposed=jnp.dtype(jnp.float8_e4m3fn), denormals=True)


def gated(
    gate_up: Groups | Float[Array, "... 2 f"],
    *,
    activation: Activation = "silu",
    scale: Float[Array, ""] | Literal["row"] | None = None,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    copies: Wanted = "row",
    keep_groups: bool = False,
    implementation: dispatch.Implementation | None = None,
    tuning: Tuning | None = None,
) -> Gated:
    """The product activation(gate) * up, in float32, rounded once.

    Args:
      gate_up: Gate and up [..., 2, f], codes in groups of 16, or bfloat16 or float32.
      activation: "silu", "gelu" in its tanh form, or "gelu_exact".
      scale: None returns bfloat16; a float32 scalar codes of y / scale; "row" codes
        with a scale for each row, its largest magnitude over the format's.
      dtype: Of these codes, `float8_e4m3fn` or `float8_e5m2`.
      copies: Which of the codes [..., f] and their transpose [f, tokens] to return, for
        a scalar `scale`; tokens are all leading axes.
      keep_groups: With a scale for each row, whether to return gate and up as e4m3
        codes in groups of 16 as well, and the largest scale of each row's.
      implementation: What to run; None means the kernel where it can run.
      tuning: How to lay the kernel over the GPU.

    Raises:
      ValueError: If the arguments contradict each other, or the kernel was named and
        cannot run.

    Example:
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
    row, transposed = _checked(gate_up, activation, scale, dtype, copies)
    scale = scalar("scale", scale, None, "row")
    if keep_groups and (isinstance(gate_up, Groups) or not isinstance(scale, str)):
        raise ValueError(
            f"keep_groups needs wide arrays and scale='row', got scale={scale!r}"
        )
    shape = jax.tree.leaves(gate_up)[0].shape
    *_, parts, n = shape
    tokens = math.prod(shape[:-2])
    if isinstance(scale, str):
        obstacle = gate_rows.obstacle(tokens, n)
    else:
        obstacle = _obstacle(tokens, n, transposed)
    chosen = dispatch.choose(
        implementation, obstacle, operation="gated", arrays=gate_up
    )
    if chosen == "reference":
        how = {"row": row, "transposed": transposed, "dtype": dtype}
        how |= {"activation": activation, "scale": scale, "keep_groups": keep_groups}
        return reference.gated(gate_up, **how)
    product = Product(activation=activation)
    tall = jax.tree.map(lambda x: x.reshape(tokens, parts, -1), gate_up)
    shape_of_product = (*shape[:-2], n)
    if isinstance(scale, str):
        out = gate_rows.run(product, tall, dtype=dtype, keep_groups=keep_groups)
        values = out.values.reshape(shape_of_product)
        scale = out.scale.reshape(shape[:-2])
        if not keep_groups:
            return Gated(values, scale=scale)
        groups = jax.tree.map(lambda x: x.reshape(*shape[:-1], -1), out.groups)
        largest = out.largest_scale.reshape(shape[:-2])
        return Gated(values, scale=scale, groups=groups, largest_scale=largest)
    encoding = _encoding(scale, dtype, row, transposed)
    (out,) = elementwise.run(
        product, (tall,), scale, name="gated", encoding=encoding, tuning=tuning
    )
    return _gated(out, shape_of_product)


def gated_grad(
    gate_up: Groups,
    dy: Float[Array, "... f"],
    *,
    activation: Activation = "silu",
    scale: Float[Array, ""] | None = None,
    dtype: DTypeLike = jnp.float8_e5m2,
    copies: Wanted = "row",
    product_scale: Float[Array, ""] | None = None,
    implementation: dispatch.Implementation | None = None,
    tuning: Tuning | None = None,
) -> Gated:
    """The gradients of gate and up, in float32, rounded once.

    Args:
      gate_up: Gate and up, codes [..., 2, f] in groups of 16.
      dy: The gradient of the product, bfloat16 or float32.
      activation: "silu", "gelu" in its tanh form, or "gelu_exact".
      scale: None returns bfloat16, a float32 scalar codes of both gradients / scale.
      dtype: Of these codes, `float8_e4m3fn` or `float8_e5m2`.
      copies: Which of the codes [..., 2, f] and their transpose [2 f, tokens] to
        return; tokens are all leading axes.
      product_scale: With a scale, returns the product's transposed copy too, its
        float8_e4m3fn codes for this scale, [f, tokens].
      implementation: What to run; None means the kernel where it can run.
      tuning: How to lay the kernel over the GPU.

    Raises:
      ValueError: If the arguments contradict each other, or the kernel was named and
        cannot run.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import gated_grad, quantize_groups
      >>> gate_up = quantize_groups(jnp.full((3, 2, 16), 7.0))
      >>> gated_grad(gate_up, jnp.ones((3, 16), jnp.bfloat16)).values.shape
      (3, 2, 16)
    """
    if isinstance(scale, str):
        raise ValueError(f"scale must be None or a scalar, got {scale!r}")
    row, transposed = _checked(gate_up, activation, scale, dtype, copies)
    scale = scalar("scale", scale, None)
    product_scale = scalar("product_scale", product_scale, None)
    with_product = product_scale is not None
    if with_product and scale is None:
        raise ValueError("product_scale needs a scale, got None")
    check_dtype("dy", dy.dtype, WIDE)
    *leading, parts, n = gate_up.codes.shape
    check_shape("dy", dy, (*leading, n))
    tokens = math.prod(leading)
    obstacle = _obstacle(tokens, n, transposed or with_product)
    chosen = dispatch.choose(
        implementation, obstacle, operation="gated_grad", arrays=(gate_up, dy)
    )
    if chosen == "reference":
        how = {"row": row, "transposed": transposed, "dtype": dtype}
        how |= {"activation": activation, "scale": scale}
        return reference.gated_grad(gate_up, dy, product_scale=product_scale, **how)
    out, *more = elementwise.run(
        ProductGrad(activation=activation, with_product=with_product),
        (
            jax.tree.map(lambda x: x.reshape(tokens, parts, -1), gate_up),
            dy.reshape(tokens, 1, n),
        ),
        scale,
        product_scale,
        name="gated_grad",
        encoding=_encoding(scale, dtype, row, transposed),
        more=_PRODUCT if with_product else None,
        parts=parts,
        tuning=tuning,
    )
    product = more[0].transposed[0] if more else None
    return _gated(out, gate_up.codes.shape)._replace(product=product)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """The product of strips of gate and up."""

    activation: Activation

    def __call__(self, gate: Groups | Array, up: Groups | Array) -> tuple[Array]:
        """The product, for `elementwise.run`."""
        gate, up = decode(gate), decode(up)
        if self.activation == "gelu_exact":
            share, _ = _normal(gate)
            return (gate * share * up,)
        exponent = gate * -_LOG2_E
        if self.activation == "gelu":  # However large its cube is.
            exponent = gate * (_GELU + _GELU * GELU_CUBIC * (gate * gate))
        return (gate * _sigmoid(exponent) * up,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductGrad:
    """The gradients of gate and up, and maybe their product."""

    activation: Activation
    with_product: bool = False

    def __call__(self, gate: Groups, up: Groups, dy: Array) -> tuple[Array, ...]:
        """What is asked for, for `elementwise.run`."""
        gate, up, dy = decode(gate), decode(up), decode(dy)
        if self.activation == "silu":
            s = _sigmoid(gate * -_LOG2_E)
            y = gate * s
            slope = s + y * (1 - s)
        elif self.activation == "gelu_exact":
            s, density = _normal(gate)
            y = gate * s
            slope = s + gate * density
        else:
            square = jnp.minimum(gate * gate, GELU_MAX**2)
            s = _sigmoid(gate * (_GELU + _GELU * GELU_CUBIC * square))
            y = gate * s
            inner = GELU + 3 * GELU * GELU_CUBIC * square
            slope = s + y * (1 - s) * inner
        return dy * up * slope, dy * y, *([y * up] if self.with_product else [])


def _sigmoid(exponent: Array) -> Array:
    # 1 / (1 + 2 ** exponent). Not by tanh, whose approximation is poor where a sigmoid
    # is small.
    return _reciprocal(1.0 + jnp.exp2(exponent))


def _reciprocal(x: Array) -> Array:
    # A division or a logarithm takes more instructions than a root, and that takes the
    # fewest of 1 plus a magnitude, which the compiler knows for no denormal.
    root = lax.rsqrt(x)
    return root * root


def _normal(x: Array) -> tuple[Array, Array]:
    """The standard normal distribution and its density."""
    bell = jnp.exp2(x * x * (-_LOG2_E / 2))
    t = _reciprocal(1.0 + jnp.abs(x * (_TAIL * _SQRT_HALF)))
    polynomial = functools.reduce(lambda p, c: p * t + c, _ERFC[::-1])
    tail = bell * t * polynomial
    return jnp.where(x < 0, tail, 1.0 - tail), _DENSITY * bell


def _checked(gate_up, activation, scale, dtype, copies) -> tuple[bool, bool]:
    """Whether codes are wanted as they are, and transposed."""
    if activation not in get_args(Activation):
        names = ", ".join(get_args(Activation))
        raise ValueError(f"activation must be one of {names}, got {activation!r}")
    check_dtype("codes", dtype, CODES)
    in_groups = isinstance(gate_up, Groups)
    values = gate_up.codes if in_groups else gate_up
    check_dtype("gate and up", values.dtype, CODES if in_groups else WIDE)
    if values.ndim < 2 or values.shape[-2] != 2:
        raise ValueError(f"gate and up must be [..., 2, f], got {values.shape}")
    n = values.shape[-1]
    if in_groups and (count := gate_up.scale.shape[-1]) != -(-n // GROUP):
        raise ValueError(f"groups must have 16 of {n} elements, got {count}")
    if isinstance(scale, str) and scale != "row":
        raise ValueError(f"scale must be None, a scalar or 'row', got {scale!r}")
    row, transposed = wanted(copies)
    if transposed and (scale is None or isinstance(scale, str)):
        raise ValueError(f"a transposed copy needs a scalar scale, got {scale!r}")
    return row, transposed


def _obstacle(tokens: int, n: int, transposed: bool) -> str | None:
    return strips.obstacle(tokens, 2, n, transposed=transposed)


def _encoding(scale, dtype, row: bool, transposed: bool) -> Encoding:
    if scale is None:
        return Encoding(wide=jnp.dtype(jnp.bfloat16), maxima=True)
    return Encoding(
        row=dtype if row else None,
        transposed=dtype if transposed else None,
        denormals=True,  # Which have errors of their own.
        maxima=True,
    )


def _gated(out: elementwise.Encoded, shape: tuple[int, ...]) -> Gated:
    values = out.row if out.wide is None else out.wide
    transposed = out.transposed
    if transposed is not None:
        transposed = transposed.reshape(-1, transposed.shape[-1])
    if values is not None:
        values = values.reshape(shape)
    return Gated(values, transposed, largest=out.maxima)
