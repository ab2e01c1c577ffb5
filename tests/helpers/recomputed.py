"""Operations between two matmuls, and their gradients from FP8 copies by hand."""

import jax
import jax.numpy as jnp

from helpers.gradients import FP8, ROW, fake, saved
from helpers.models import normal


def between(pointwise):
    """Returns an operation between two matmuls, as a function of params and x."""
    return lambda params, x: pointwise(x @ params[0]) @ params[1]


def arguments(pointwise, *, inside: int = 128, scale: float = 0.2):
    """Returns weights, x and the output's cotangent.

    The operation's input has `inside` columns.
    """
    x = normal(3, 96, 64)
    out = jax.eval_shape(pointwise, jax.ShapeDtypeStruct((96, inside), x.dtype))
    params = normal(1, 64, inside, scale=scale), normal(2, out.shape[-1], 64, scale=0.2)
    return params, x, normal(4, 96, 64)


def copies(fn, *args) -> list[tuple[int, ...]]:
    return sorted(r.shape for r in saved(fn, *args) if r.dtype in FP8)


def by_hand(params, x, dy, h, slopes):
    """Returns gradients from the copies of x and h and the operation's derivative."""
    w1, w2 = params
    da = slopes(dy @ w2.T)
    return (x.T @ da, h.T @ dy), da @ w1.T


def from_inputs(pointwise, params, x, dy, saved):
    """Returns gradients if `pointwise` is recomputed from `saved`."""
    h, vjp = jax.vjp(pointwise, jnp.asarray(saved))
    return by_hand(params, fake(x, ROW), dy, h, lambda dh: vjp(dh)[0])
