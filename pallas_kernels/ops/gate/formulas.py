"""The formulas of gated activations in kernels, on strips of an array."""

import dataclasses
import functools
import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.mosaic.codec import decode
from pallas_kernels.numerics import Scaled
from pallas_kernels.ops.gate.reference import GELU, GELU_CUBIC, GELU_MAX, Activation

_LOG2_E = math.log2(math.e)
_GELU = -_LOG2_E * GELU
_SQRT_HALF = math.sqrt(0.5)
_DENSITY = 1 / math.sqrt(2 * math.pi)  # The standard normal density at 0.
# exp(z**2) * erfc(z) / 2 = t * P(t) with t = 1 / (1 + z * _TAIL), for z from 0 to 9.5;
# beyond 9.5 erfc underflows. _ERFC has the coefficients of the polynomial P, the
# constant first. They are fitted in float64, with relative errors of at most 6e-6.
_TAIL = 0.43
_ERFC = (0.12162880, 0.11625502, 0.14068296, -0.0053946, 0.20352425, -0.07669386)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """The function activation(gate) * up on strips; activation(gate) without up."""

    activation: Activation

    def __call__(self, gate: Scaled | Array, *up: Scaled | Array) -> tuple[Array]:
        """Returns the product, as `elementwise.run` expects it."""
        y = self._activated(decode(gate))
        return (functools.reduce(lax.mul, map(decode, up), y),)

    def _activated(self, gate: Array) -> Array:
        if self.activation == "gelu_exact":
            share, _ = _normal(gate)
            return gate * share
        exponent = gate * -_LOG2_E
        if self.activation == "gelu":
            # The sigmoid is right even if the cube is infinite: it is 0 or 1.
            exponent = gate * (_GELU + _GELU * GELU_CUBIC * (gate * gate))
        return gate * _sigmoid(exponent)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductGrad:
    """The function from gate, up and dy to the gradients of gate and up, on strips.

    It returns the product, too, if `with_product` is true. Without up, the gate's
    gradient is the only gradient.
    """

    activation: Activation
    with_product: bool = False

    def __call__(self, gate: Scaled, *others: Scaled | Array) -> tuple[Array, ...]:
        """Returns the gradients and the product, as `elementwise.run` expects them."""
        gate, *up, dy = map(decode, (gate, *others))
        if self.activation == "silu":
            s = _sigmoid(gate * -_LOG2_E)
            y = gate * s
            slope = s + y * (1 - s)
        elif self.activation == "gelu_exact":
            s, density = _normal(gate)
            y = gate * s
            slope = s + gate * density
        else:
            # An infinite square times 1 - s = 0 would make the slope NaN.
            square = jnp.minimum(gate * gate, GELU_MAX**2)
            s = _sigmoid(gate * (_GELU + _GELU * GELU_CUBIC * square))
            y = gate * s
            inner = GELU + 3 * GELU * GELU_CUBIC * square
            slope = s + y * (1 - s) * inner
        if not up:
            return dy * slope, *([y] if self.with_product else [])
        (up,) = up
        return dy * up * slope, dy * y, *([y * up] if self.with_product else [])


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightedGrad:
    """The function from strips to gradients of `weight * activation(gate) * up`.

    `dy` is the gradient of this product. The function also returns the product, and a
    strip with the gradient of the weight as its sum.
    """

    activation: Activation

    def __call__(
        self, gate: Scaled, up: Scaled, dy: Array, weight: Array
    ) -> tuple[Array, ...]:
        """Returns both gradients, the product, and dy * activation(gate) * up."""
        gradients = ProductGrad(activation=self.activation, with_product=True)
        of_gate, of_up, y = gradients(gate, up, dy)
        return of_gate * weight, of_up * weight, y * weight, decode(dy) * y


def _sigmoid(exponent: Array) -> Array:
    # This is 1 / (1 + 2 ** exponent). The approximation of tanh would be poor where the
    # sigmoid is small.
    return _reciprocal(1.0 + jnp.exp2(exponent))


def _reciprocal(x: Array) -> Array:
    # A root takes fewer instructions than a division or a logarithm. It takes the
    # fewest if x is 1 plus a magnitude: the compiler knows that x is not denormal.
    root = lax.rsqrt(x)
    return root * root


def _normal(x: Array) -> tuple[Array, Array]:
    """Returns the standard normal distribution function of x, and its density."""
    bell = jnp.exp2(x * x * (-_LOG2_E / 2))
    t = _reciprocal(1.0 + jnp.abs(x * (_TAIL * _SQRT_HALF)))
    polynomial = functools.reduce(lambda p, c: p * t + c, _ERFC[::-1])
    tail = bell * t * polynomial
    return jnp.where(x < 0, tail, 1.0 - tail), _DENSITY * bell
