"""What to save between a forward and a backward pass, for `jax.checkpoint`."""

import math
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from coat_jax.remat.trace import PRODUCTS, is_foreign

# Numbers that an element of attention's scores is a product of, at most.
_LARGEST_HEAD = 256


def products_saveable(primitive: core.Primitive, *types: Any, **params: Any) -> bool:
    """Saves what matrix products, convolutions, kernels and barriers return.

    The rest, norms and gates and other cheap operations, is computed again. So are
    products with batch axes that sum 256 numbers or fewer an element, such as
    attention's scores, but not those of a layer's experts. It is what COAT's residuals
    become without FP8 products (arXiv 2410.19313, section 5).

    A policy of `jax.checkpoint` and `coat.fp8_remat`; unlike
    `jax.checkpoint_policies.dots_with_no_batch_dims_saveable` it knows convolutions and
    kernels such as cuDNN's flash attention, which are costly to repeat.

    Example:
      >>> import coat_jax as coat, jax.numpy as jnp
      >>> from coat_jax.remat.policies import products_saveable
      >>> def mlp(params, x):
      ...     return jnp.tanh(jnp.sin(x @ params["up"])) @ params["down"]
      >>> params = {"up": jnp.ones((64, 256)), "down": jnp.ones((256, 64))}
      >>> light = coat.fp8_remat(mlp, policy=products_saveable)
      >>> saved = coat.residual_report(light, params, jnp.ones((128, 64))).rows
      >>> [row.shape for row in saved if row.dtype == jnp.float8_e4m3fn]
      [(128, 256), (128, 64)]
    """
    if primitive.name == "dot_general":
        (summed, _), (batch, _) = params["dimension_numbers"]
        lhs, _ = types
        return not batch or math.prod(lhs.shape[i] for i in summed) > _LARGEST_HEAD
    if primitive.name in PRODUCTS or primitive.name == "optimization_barrier":
        # Of a product behind a barrier what is read: XLA fuses across no barrier.
        return True
    # Random numbers are made again: their operands are keys.
    return is_foreign(primitive) and any(
        jnp.issubdtype(t.dtype, jnp.floating) for t in types
    )
