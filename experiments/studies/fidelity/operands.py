"""Matmuls in BF16 with some operands rounded to 8 bits, to measure each operand's cost.

The FP8 recipes have no switch for a single operand. Here an operand is quantized by
`coat.quantize` and dequantized, and the matmul runs in BF16. The scale of a tensor is a
power of two, so the rounded numbers are exact in BF16. With other scales, BF16 adds a
relative error of 2**-9, which is small next to E4M3's 2**-4. Sums are float32 in FP8
matmuls as in these.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import coat_jax as coat
from coat_jax.fp8 import matmul

Weight = Literal["qkv", "out", "gate_up", "down"]
_GRANULARITIES: dict[str, Callable[[int], object]] = {
    "tensor": lambda size: coat.PerTensor(),
    "row": coat.PerGroup,
    "group": lambda size: coat.PerGroup(min(size, 16)),
    "block": lambda size: coat.PerBlock(128, 128),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """A function that rounds a matrix to 8 bits.

    Attributes:
      format: The format.
      scales: The part of the matrix that shares a scale: the "tensor", a "row", a
        "column", a "group" of 16 in a row, or a "block" of 128 x 128.
      stochastic: Whether numbers are rounded stochastically. The random key depends on
        the sum of the numbers.
    """

    format: coat.Format = coat.E4M3
    scales: Literal["tensor", "row", "column", "group", "block"] = "tensor"
    stochastic: bool = False

    def __call__(self, x: Float[Array, "m n"]) -> Float[Array, "m n"]:
        """Returns `x` rounded to the format, in the dtype of `x`."""
        if self.scales == "column":
            return dataclasses.replace(self, scales="row")(x.T).T
        noise = None
        if self.stochastic:
            total = jnp.sum(x, dtype=jnp.float32)
            seed = jax.lax.bitcast_convert_type(total, jnp.uint32)
            noise = jax.random.bits(jax.random.key(seed, impl="rbg"), x.shape)
        granularity = _GRANULARITIES[self.scales](x.shape[-1])
        options = {"format": self.format, "granularity": granularity, "noise": noise}
        return coat.dequantize(coat.quantize(x, **options))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operands:
    """The linear layer of a `PlainRecipe`, with some operands of its matmuls rounded.

    Operands that are None are not rounded. Weight gradients are rounded to the dtype of
    the activations, as in the recipe `bf16`.

    Attributes:
      x: The rounding of activations in `y = x @ w.T`.
      w: The rounding of weights in `y = x @ w.T`.
      dy_for_dx: The rounding of gradients in `dx = dy @ w`.
      w_for_dx: The rounding of weights in `dx = dy @ w`.
      dy_for_dw: The rounding of gradients in `dw = dy.T @ x`.
      x_for_dw: The rounding of activations in `dw = dy.T @ x`.
      only: The weight for which operands are rounded; None means every weight.
    """

    x: Grid | None = None
    w: Grid | None = None
    dy_for_dx: Grid | None = None
    w_for_dx: Grid | None = None
    dy_for_dw: Grid | None = None
    x_for_dw: Grid | None = None
    only: Weight | None = None

    def __call__(
        self, x: Float[Array, "*batch k"], w: Float[Array, "... k"]
    ) -> Float[Array, "..."]:
        """Computes `x @ w.T` in the dtype of `x`.

        Raises:
          ValueError: If the contracted sizes differ.
        """
        operands = self if self.only in (None, _weight_of(w)) else Operands()
        return matmul.in_rows(partial(_product, operands), x, w)


def _weight_of(w: Float[Array, "... k"]) -> Weight:
    """Returns the name of the weight of a layer that has the shape of `w`."""
    if w.ndim == 3:
        return "gate_up"
    rows, columns = w.shape
    if rows == 3 * columns:
        return "qkv"
    return "out" if rows == columns else "down"


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(operands, x, w):
    return _product_fwd(operands, x, w)[0]


def _product_fwd(operands, x, w):
    rows = w.reshape(-1, w.shape[-1])
    weight = _rounded(operands.w, rows).astype(x.dtype)
    return _rounded(operands.x, x) @ weight.T, (x, w)


def _product_bwd(operands, residuals, dy):
    x, w = residuals
    rows = w.reshape(-1, w.shape[-1])
    weight = _rounded(operands.w_for_dx, rows).astype(x.dtype)
    dx = _rounded(operands.dy_for_dx, dy) @ weight
    dw = _rounded(operands.dy_for_dw, dy).T @ _rounded(operands.x_for_dw, x)
    return dx, dw.astype(w.dtype).reshape(w.shape)


_product.defvjp(_product_fwd, _product_bwd)


def _rounded(grid: Grid | None, x: Float[Array, "m n"]) -> Float[Array, "m n"]:
    return x if grid is None else grid(x)
