"""Delayed scaling: the scale of a tensor from its amax in earlier steps.

A scale computed just in time needs a pass over the tensor before it is quantized. A
scale from a history of amaxes is known at once, and the tensor's own amax is found
while it is quantized (Micikevicius et al., arXiv 2209.05433; TransformerEngine and
`flax.linen.Fp8DotGeneralOp` do the same). Histories pass through a step like
parameters, and their gradients are the histories of the next step.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax import lax
from jaxtyping import Array, Float

from coat_jax.quantization.array import tensor_scale
from coat_jax.quantization.formats import Format
from pallas_kernels.dispatch import array_types
from pallas_kernels.numerics import magnitude

# The number of steps for which a history holds an amax.
LENGTH = 16


@nnx.register_variable_name(OVERWRITE_WITH_GRADIENT)
class OverwriteWithGradient(nnx.Variable):
    """A variable that has its next value as its gradient, such as an amax history.

    Its Linen collection has the name that `flax.training.train_state` looks for. A step
    that sums the gradients of several passes must take the maximum of these variables'
    gradients instead.

    Examples:
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
    """Returns the history before the first step, with a guess of the amax.

    The first recorded amax replaces the guess.
    """
    return jnp.zeros(LENGTH, jnp.float32).at[-1].set(guess)


def spread[History](history: History, like: Array) -> History:
    """Returns a history that varies over devices as `like` does, within `shard_map`.

    `shard_map` would sum the devices' gradients. A history needs their maximum instead.
    With `check_vma=False` no derivative rule can change the sum, so differentiation
    raises ValueError.
    """
    if any(lax.axis_size(name) > 1 for name in array_types.unchecked_axes()):
        return jax.tree.map(_without_gradient, history)

    def varying(history):
        axes = array_types.varying_axes(like) - array_types.varying_axes(history)
        return _varying(history, tuple(axes)) if axes else history

    return jax.tree.map(varying, history)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _varying(history, axes):
    return lax.pcast(history, axes, to="varying")


def _varying_fwd(history, axes):
    return _varying(history, axes), None


def _varying_bwd(axes, _, following):
    return (array_types.largest_over(following, axes),)


_varying.defvjp(_varying_fwd, _varying_bwd)


@jax.custom_vjp
def _without_gradient(history):
    return history


def _without_gradient_fwd(history):
    return history, None


def _without_gradient_bwd(_, following):
    raise ValueError(
        "delayed scaling within shard_map needs check_vma=True, got False: JAX would "
        "add up the histories of devices, and the largest is needed"
    )


_without_gradient.defvjp(_without_gradient_fwd, _without_gradient_bwd)


def delayed_scale(history: Float[Array, " length"], format: Format) -> Float[Array, ""]:
    """Computes the scale of the largest amax in a history.

    Scales rise with the amax, so this is also the largest of the scales of all entries.
    It is computed as the largest scale, because XLA computes all scales and their
    maximum in one kernel.
    """
    return magnitude(tensor_scale(history, format))


def recorded(
    history: Float[Array, " length"], largest: Float[Array, ""] | None
) -> Float[Array, " length"]:
    """Returns the history with a new amax in front and without its last entry.

    An amax that is zero or not finite is replaced by the largest entry of the history.
    None means that the tensor was not quantized, and leaves the history unchanged.
    """
    if largest is None:
        return history
    is_amax = jnp.isfinite(largest) & (largest > 0)
    newest = jnp.where(is_amax, largest, jnp.max(history))
    return jnp.concatenate([newest[None], history[:-1]])
