"""The loss of a language model, from chunks of its logits."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import array_types, operations
from pallas_kernels.dispatch.axes import Axes

# The number of logits in a chunk of `weighted_loss`, at most: 256 MiB in float32.
_LOGITS_PER_CHUNK = 2**26


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
@array_types.on_common_mesh
def weighted_loss(
    hidden: Float[Array, "b s h"],
    head: Float[Array, "h vocab"],
    targets: Int[Array, "b s"],
    shares: Float[Array, "b s"],
    softcap: float | None = None,
) -> Float[Array, ""]:
    """Computes the sum of all tokens' losses, each multiplied by its share.

    If the function is differentiated, the forward pass computes the gradients of a
    chunk together with its loss, while the chunk's logits exist. These are already
    gradients of the sum, so that no other pass multiplies them by the shares. Shares
    have no gradients.
    """
    return _Loss(softcap)(hidden, head, targets, shares)


@array_types.on_common_mesh
def _weighted_loss_fwd(hidden, head, targets, shares, softcap):
    loss, *grads = _LossAndGrads(softcap)(hidden, head, targets, shares)
    return loss, grads


def _weighted_loss_bwd(softcap, grads, dloss):
    dhidden, dhead = (g * dloss.astype(g.dtype) for g in grads)
    return dhidden, dhead, None, None


weighted_loss.defvjp(_weighted_loss_fwd, _weighted_loss_bwd)


def check_shapes(tokens: Int[Array, "b s"], **arrays: Array | None) -> None:
    """Raises ValueError unless each array is None or has the shape of `tokens`."""
    for name, array in arrays.items():
        if array is not None and array.shape != tokens.shape:
            raise ValueError(
                f"{name} must have the shape {tokens.shape} of tokens, got "
                f"{array.shape}"
            )


def token_shares(
    targets: Int[Array, "b s"], weights: Array | None
) -> Float[Array, "b s"]:
    """Returns each token's share of a mean: its weight over the sum of all weights.

    Without weights all tokens count alike. If all weights are zero, all shares are
    zero.
    """
    if weights is None:
        return jnp.full(targets.shape, 1 / targets.size, jnp.float32)
    weights = weights.astype(jnp.float32)
    total = jnp.sum(weights)
    return weights / jnp.where(total == 0, 1.0, total)


@dataclasses.dataclass(frozen=True)
class _Loss(operations.OfParts):
    """The sum of all tokens' losses times their shares, in chunks of tokens.

    On a mesh each device has chunks of its own tokens.
    """

    softcap: float | None = None
    name = "cross_entropy"

    def reference(self, hidden, head, targets, shares):
        def add(total, chunk):
            return total + _chunk_loss(head, *chunk, self.softcap), None

        zero = array_types.varying_alike(jnp.zeros((), jnp.float32), hidden)
        return lax.scan(add, zero, _chunks(hidden, head, targets, shares))[0]

    def axes(self, *arrays) -> tuple:
        tokens = Axes("b s")
        operands = Axes("b s _"), Axes("_ _"), tokens, tokens
        return operands, Axes("", reduced="sum")


@dataclasses.dataclass(frozen=True)
class _LossAndGrads(_Loss):
    """The operation of `weighted_loss` with gradients of `hidden` and `head`."""

    def reference(self, hidden, head, targets, shares):
        def add(carry, chunk):
            total, dhead = carry
            grad = jax.value_and_grad(_chunk_loss, (0, 1))
            loss, grads = grad(head, *chunk, self.softcap)
            return (total + loss, dhead + grads[0]), grads[1]

        zeros = jnp.zeros((), jnp.float32), jnp.zeros_like(head)
        zeros = array_types.varying_alike(zeros, hidden)
        chunks = _chunks(hidden, head, targets, shares)
        (total, dhead), dhidden = lax.scan(add, zeros, chunks)
        return total, dhidden.reshape(hidden.shape), dhead

    def axes(self, *arrays) -> tuple:
        operands, loss = super().axes(*arrays)
        return operands, (loss, operands[0], Axes("h vocab", reduced="sum"))


def _chunk_loss(
    head: Array, hidden: Array, targets: Array, shares: Array, softcap: float | None
) -> Float[Array, ""]:
    """Computes the sum of a chunk's losses, each multiplied by its share."""
    scores = logits(hidden, head, softcap)
    # A comparison selects the target's logit, because its gradient fuses with the
    # gradient of the other logits. The gradient of an index is a scatter, which would
    # read and write arrays of this size twice more.
    is_target = targets[:, None] == jnp.arange(scores.shape[1])[None]
    picked = jnp.sum(jnp.where(is_target, scores, 0.0), axis=-1)
    return jnp.sum(shares * (jax.nn.logsumexp(scores, axis=-1) - picked))


def _chunks(
    hidden: Array, head: Array, targets: Array, shares: Array
) -> tuple[Array, Array, Array]:
    count = _num_chunks(targets.size, head.shape[1])
    hidden = hidden.reshape(count, -1, hidden.shape[-1])
    return hidden, targets.reshape(count, -1), shares.reshape(count, -1)


def logits(
    hidden: Array, head: Array, softcap: float | None = None
) -> Float[Array, "*b vocab"]:
    """Computes `hidden @ head` in the dtype of `hidden`, with a float32 result.

    With a soft cap the result is `softcap * tanh(hidden @ head / softcap)`.

    The backward pass rounds the gradient of the logits to the dtype of `hidden`.
    Otherwise XLA would run the matmuls of the backward pass in float32.
    """
    scores = _logits(*array_types.varying_alike((hidden, head)))
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


@jax.custom_vjp
def _logits(hidden, head):
    where = jax.typeof(hidden).sharding
    (columns,) = jax.typeof(head).sharding.spec[1:]
    taken = {name for names in where.spec for name in array_types.axis_names(names)}
    columns = columns if taken.isdisjoint(array_types.axis_names(columns)) else None
    where = where.update(spec=P(*where.spec[:-1], columns))
    numbers = ((hidden.ndim - 1,), (0,)), ((), ())
    return _product(hidden, head.astype(hidden.dtype), numbers, where)


def _product(
    a: Array, b: Array, numbers: lax.DotDimensionNumbers, where: jax.NamedSharding
) -> Float[Array, "..."]:
    """Computes a matmul with a float32 result, sharded as `where` on explicit axes.

    `numbers` are the dimension numbers of `lax.dot_general`.
    """
    return lax.dot_general(
        a,
        b,
        numbers,
        preferred_element_type=jnp.float32,
        out_sharding=where if where.mesh.explicit_axes else None,
    )


def _logits_fwd(hidden, head):
    return _logits(hidden, head), (hidden, head)


def _logits_bwd(residuals, dlogits):
    hidden, head = residuals
    dlogits = dlogits.astype(hidden.dtype)
    of_hidden, of_head = (jax.typeof(x).sharding for x in residuals)
    numbers = ((hidden.ndim - 1,), (1,)), ((), ())
    dhidden = _product(dlogits, head.astype(hidden.dtype), numbers, of_hidden)
    tokens = tuple(range(hidden.ndim - 1))
    dhead = _product(hidden, dlogits, ((tokens, tokens), ((), ())), of_head)
    return dhidden.astype(hidden.dtype), dhead.astype(head.dtype)


_logits.defvjp(_logits_fwd, _logits_bwd)


def chunk_of_logits(tokens: int, vocab_size: int) -> tuple[int, int]:
    """Returns the shape of a chunk of logits in `cross_entropy`."""
    return tokens // _num_chunks(tokens, vocab_size), vocab_size


def _num_chunks(tokens: int, vocab_size: int) -> int:
    """Returns the smallest number of chunks of equal size for a number of tokens.

    A chunk has at most `_LOGITS_PER_CHUNK` logits.
    """
    fewest = math.ceil(tokens * vocab_size / _LOGITS_PER_CHUNK)
    return next(n for n in range(max(fewest, 1), tokens + 1) if tokens % n == 0)
