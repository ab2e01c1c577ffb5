"""Operations between two matmuls, and their gradients by hand from FP8 copies."""

import jax
import jax.numpy as jnp

from helpers.gradients import FP8, ROW, fake, saved
from helpers.models import normal


def between(pointwise):
    """Returns a function of params and x that runs `pointwise` between two matmuls."""
    return lambda params, x: pointwise(x @ params[0]) @ params[1]


def arguments(pointwise, *, inside: int = 128, scale: float = 0.2):
    """Returns the matmuls' weights, x, and the output's cotangent.

    The operation's input has `inside` columns.
    """
    x = normal(3, 96, 64)
    out = jax.eval_shape(pointwise, jax.ShapeDtypeStruct((96, inside), x.dtype))
    params = normal(1, 64, inside, scale=scale), normal(2, out.shape[-1], 64, scale=0.2)
    return params, x, normal(4, 96, 64)


def copies(fn, *args) -> list[tuple[int, ...]]:
    return sorted(r.shape for r in saved(fn, *args) if r.dtype in FP8)


def by_hand(params, x, dy, h, slopes):
    """Returns the gradients of the weights and of x, for an operation between matmuls.

    Args:
      params: The weights of the first and of the second matmul.
      x: The copy of the first matmul's input.
      dy: The cotangent of the second matmul's result.
      h: The copy of the second matmul's input, which the operation returns.
      slopes: Maps the cotangent of h to the cotangent of the operation's input.
    """
    w1, w2 = params
    da = slopes(dy @ w2.T)
    return (x.T @ da, h.T @ dy), da @ w1.T


def from_inputs(pointwise, params, x, dy, saved):
    """Returns gradients with `pointwise` recomputed from `saved`, its saved input."""
    h, vjp = jax.vjp(pointwise, jnp.asarray(saved))
    return by_hand(params, fake(x, ROW), dy, h, lambda dh: vjp(dh)[0])
