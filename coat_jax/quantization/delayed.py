"""Delayed scaling: the scale of a tensor from its largest magnitudes in steps before.

A scale taken just in time needs a pass over the tensor before it is quantized. From a
history of maxima a scale is there at once, and the tensor's own maximum is found while
it is quantized (Micikevicius et al., arXiv 2209.05433; as in TransformerEngine and
`flax.linen.Fp8DotGeneralOp`). Histories pass through a step as parameters do, and their
gradients are the histories of the next step.
"""

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jaxtyping import Array, Float

import pallas_kernels as kernels
from coat_jax.quantization.array import Format, tensor_scale
from pallas_kernels.numerics import magnitude

# Steps that a history remembers.
LENGTH = 16


@nnx.register_variable_name(OVERWRITE_WITH_GRADIENT)
class OverwriteWithGradient(nnx.Variable):
    """A variable whose gradient is its next value, as of delayed scaling's histories.

    As a Linen collection it has the name that `flax.training.train_state` knows. Where
    a step sums the gradients of several passes, it takes the maximum of these.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import coat_jax as coat
      >>> from coat_jax.layers.decoder import DecoderLayer
      >>> from flax import nnx
      >>> layer = DecoderLayer(64, 128, 4, 2, 16, scaling="delayed", rngs=nnx.Rngs(0))
      >>> x = jnp.ones((2, 8, 64), jnp.bfloat16)
      >>> wrt = nnx.DiffState(0, (nnx.Param, coat.OverwriteWithGradient))
      >>> gradient = nnx.grad(lambda layer: layer(x).astype(float).mean(), argnums=wrt)
      >>> grads = nnx.jit(gradient)(layer)
      >>> grads, histories = nnx.split_state(grads, nnx.Param, ...)
      >>> nnx.update(layer, histories)  # `grads` are the optimizer's.
      >>> float(layer.amax["out_grad"][...][0]) > 0
      True
    """


def new_history(guess: Float[Array, ""] | float) -> Float[Array, " length"]:
    """The history before the first step; its guess is forgotten after that."""
    return jnp.zeros(LENGTH, jnp.float32).at[-1].set(guess)


def scale_of(
    format: Format,
    history: Float[Array, " length"] | None,
    bound: Callable[[], kernels.Bound],
) -> Float[Array, ""]:
    """A tensor's scale: for all that a history remembers, or just in time for a bound.

    Scales rise with maxima, so that the largest maximum has the largest scale. This way
    around XLA computes all scales and finds the largest in one kernel.
    """
    if history is not None:
        return magnitude(tensor_scale(history, format))
    (scale,) = kernels.tensor_scales(bound(), dtype=format.dtype)
    return scale


def recorded(
    history: Float[Array, " length"], largest: Float[Array, ""] | None
) -> Float[Array, " length"]:
    """The history with one more maximum in front, and its last forgotten.

    A maximum that is zero or not finite says nothing: the one before stands for it. So
    does None, of a tensor that was not quantized.
    """
    if largest is None:
        return history
    told = jnp.isfinite(largest) & (largest > 0)
    newest = jnp.where(told, largest, jnp.max(history))
    return jnp.concatenate([newest[None], history[:-1]])
