"""The FP8 flow of the paper as a recipe, computed in float32 from rounded numbers.

The recipe `coat` differs from the paper in its details: it has one scale per token
where the paper has one per tensor, and it rounds moments stochastically. It stores the
first moment divided by the root of the second moment, and the second moment in UE4M4.
This recipe follows the paper (sections 4 and 5). Matmuls read tensors with one scale,
in E4M3, and gradients in E5M2. Inputs of norms and gates are saved in E4M3, in groups
of 16. Both moments are stored in E4M3 after dynamic range expansion, in groups of 128,
and are rounded to nearest. Codes are multiplied in float32, so the recipe is slow, and
serves only for comparisons.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import coat_jax as coat
from coat_jax.layers.recipes import RECIPES, PlainRecipe

NAME = "the paper's flow"
_Codes = coat.QuantizedArray


@jax.custom_vjp
def linear(x: Float[Array, "*b h"], w: Float[Array, "*o h"]) -> Float[Array, "..."]:
    """Computes x @ w.T, shape [*b, *o], from E4M3 codes; gradients are E5M2.

    Examples:
      >>> import jax.numpy as jnp
      >>> linear(jnp.ones((2, 4)), jnp.ones((3, 4))).shape
      (2, 3)
    """
    return _forward(x, w)[0]


def _forward(x: Array, w: Array) -> tuple[Array, tuple[_Codes, _Codes]]:
    codes = tuple(_quantized(each, coat.E4M3) for each in (x, w))
    y = jnp.tensordot(*map(_wide, codes), axes=(-1, -1))
    return y.astype(x.dtype), codes


def _backward(codes: tuple[_Codes, _Codes], dy: Array) -> tuple[Array, Array]:
    x, w = map(_wide, codes)
    gradient = _wide(_quantized(dy, coat.E5M2))
    rows = list(range(x.ndim - 1))
    dx = jnp.tensordot(gradient, w, w.ndim - 1)
    dw = jnp.tensordot(gradient, x, (rows, rows))
    return dx.astype(codes[0].dtype), dw.astype(codes[1].dtype)


def _quantized(x: Array, format: coat.Format) -> _Codes:
    return coat.quantize(x, format=format, granularity=coat.PerTensor())


def _wide(codes: _Codes) -> Array:
    return coat.dequantize(codes).astype(jnp.float32)


linear.defvjp(_forward, _backward)

RECIPE = PlainRecipe(
    linear=linear,
    segment=coat.fp8_remat,
    optimizer=partial(
        coat.fp8_adamw,
        mu_format=coat.E4M3,
        nu_format=coat.E4M3,
        normalize_mu=False,
        rounding="nearest",
    ),
)


@contextlib.contextmanager
def known() -> Iterator[str]:
    """Adds the paper's flow to `RECIPES` in this context, and yields its name.

    Examples:
      >>> with known() as name:
      ...     name in RECIPES
      True
      >>> name in RECIPES
      False
    """
    with mock.patch.dict(RECIPES, {NAME: RECIPE}):
        yield NAME
