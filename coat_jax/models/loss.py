"""The loss of a language model, from chunks of its logits."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
    gradients of the sum, so that no other pass multiplies them by the shares. The
    gradient of a share is its token's loss.
    """
    return _Loss(softcap)(hidden, head, targets, shares)


@array_types.on_common_mesh
def _weighted_loss_fwd(hidden, head, targets, shares, softcap):
    loss, *grads = _LossAndGrads(softcap)(hidden, head, targets, shares)
    return loss, grads


def _weighted_loss_bwd(softcap, grads, dloss):
    dhidden, dhead, dshares = (g * dloss.astype(g.dtype) for g in grads)
    return dhidden, dhead, None, dshares


weighted_loss.defvjp(_weighted_loss_fwd, _weighted_loss_bwd)


def check_shapes(tokens: Int[Array, "b s"], **arrays: Array | None) -> None:
    """Raises ValueError unless each array is None or has the shape of `tokens`.

    `tokens` must be integers, with two axes and at least one token. An array that is
    named `targets` must be integers, too.
    """
    for name, array in (("tokens", tokens), ("targets", arrays.get("targets"))):
        if array is not None and not _is_integer(array):
            kind = getattr(array, "dtype", type(array).__name__)
            raise ValueError(f"{name} must be an array of integers [b, s], got {kind}")
    if tokens.ndim != 2 or not tokens.size:
        raise ValueError(
            "tokens must have the shape [b, s] and at least one token, got "
            f"{tokens.shape}"
        )
    for name, array in arrays.items():
        if array is not None and array.shape != tokens.shape:
            raise ValueError(
                f"{name} must have the shape {tokens.shape} of tokens, got "
                f"{array.shape}"
            )


def _is_integer(x: Any) -> bool:
    is_array = isinstance(x, jax.Array | np.ndarray)
    return is_array and jnp.issubdtype(x.dtype, jnp.integer)


def comparable(tokens: Int[Array, "b s"]) -> Int[Array, "b s"]:
    """Returns tokens in a dtype that has all numbers of a vocabulary.

    JAX would wrap the number 256 around to 0, to compare it with tokens in uint8, and
    refuses tokens in int8 as indices of 128 rows or more.
    """
    return tokens if tokens.dtype.itemsize >= 4 else tokens.astype(jnp.int32)


def token_shares(
    targets: Int[Array, "b s"], weights: Array | None, vocab_size: int
) -> Float[Array, "b s"]:
    """Returns each token's share of a mean: its weight over the sum of all weights.

    Without weights all tokens count alike. If all weights are zero, all shares are
    zero. A target outside the vocabulary has the share NaN unless its weight is zero.
    """
    targets = comparable(targets)
    outside = (targets < 0) | (targets >= vocab_size)
    if weights is None:
        shares = jnp.full(targets.shape, 1 / targets.size, jnp.float32)
        return jnp.where(outside, jnp.nan, shares)
    weights = weights.astype(jnp.float32)
    total = jnp.sum(weights)
    shares = weights / jnp.where(total == 0, 1.0, total)
    return jnp.where(outside & (weights != 0), jnp.nan, shares)


@dataclasses.dataclass(frozen=True)
class _Loss(operations.OfParts):
    """The sum of all tokens' losses times their shares, in chunks of tokens.

    On a mesh each device has chunks of its own tokens.
    """

    softcap: float | None = None
    name = "cross_entropy"

    def reference(self, hidden, head, targets, shares):
        def add(total, chunk):
            return total + _chunk_loss(head, *chunk, self.softcap)[0], None

        zero = array_types.varying_alike(jnp.zeros((), jnp.float32), hidden)
        return lax.scan(add, zero, _chunks(hidden, head, targets, shares))[0]

    def axes(self, *arrays) -> tuple:
        tokens = Axes("b s")
        operands = Axes("b s _"), Axes("_ _"), tokens, tokens
        return operands, Axes("", reduced="sum")


@dataclasses.dataclass(frozen=True)
class _LossAndGrads(_Loss):
    """The operation of `weighted_loss` with gradients of all but the targets."""

    def reference(self, hidden, head, targets, shares):
        def add(carry, chunk):
            total, dhead = carry
            grad = jax.value_and_grad(_chunk_loss, (0, 1), has_aux=True)
            (loss, losses), grads = grad(head, *chunk, self.softcap)
            return (total + loss, dhead + grads[0]), (grads[1], losses)

        zeros = jnp.zeros((), jnp.float32), jnp.zeros_like(head)
        zeros = array_types.varying_alike(zeros, hidden)
        chunks = _chunks(hidden, head, targets, shares)
        (total, dhead), of_chunks = lax.scan(add, zeros, chunks)
        dhidden, losses = (
            x.reshape(-1, *x.shape[2:])[: targets.size] for x in of_chunks
        )
        return (
            total,
            dhidden.reshape(hidden.shape),
            dhead,
            losses.reshape(targets.shape),
        )

    def axes(self, *arrays) -> tuple:
        operands, loss = super().axes(*arrays)
        of_head = Axes("h vocab", reduced="sum")
        return operands, (loss, operands[0], of_head, operands[-1])


def _chunk_loss(
    head: Array, hidden: Array, targets: Array, shares: Array, softcap: float | None
) -> tuple[Float[Array, ""], Float[Array, " tokens"]]:
    """Computes the sum of a chunk's losses, each multiplied by its share.

    It also returns the losses.
    """
    scores = logits(hidden, head, softcap)
    # A comparison selects the target's logit, because its gradient fuses with the
    # gradient of the other logits. The gradient of an index is a scatter, which would
    # read and write arrays of this size twice more.
    is_target = targets[:, None] == jnp.arange(scores.shape[1])[None]
    picked = jnp.sum(jnp.where(is_target, scores, 0.0), axis=-1)
    losses = jax.nn.logsumexp(scores, axis=-1) - picked
    return jnp.sum(shares * losses), losses


def _chunks(
    hidden: Array, head: Array, targets: Array, shares: Array
) -> tuple[Array, Array, Array]:
    """Splits tokens into chunks of equal size; padding has shares of zero."""
    tokens = targets.size
    size, _ = chunk_of_logits(tokens, head.shape[1])
    padding = -tokens % size if isinstance(tokens, int) else 0

    def split(x: Array, *inner: int) -> Array:
        x = x.reshape(-1, *inner)
        if padding:
            x = jnp.pad(x, [(0, padding)] + [(0, 0)] * len(inner))
        return x.reshape(-1, size, *inner)

    return split(hidden, hidden.shape[-1]), split(targets), split(shares)


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
    """Returns the shape of a chunk of logits in `cross_entropy`.

    A chunk has at most `_LOGITS_PER_CHUNK` logits, or the logits of one token. Chunks
    are as few as this allows, or up to twice as many if that makes them equal in size.
    Otherwise the last chunk is padded. A number of tokens that `jax.export` leaves open
    is one chunk.
    """
    if not isinstance(tokens, int):
        return tokens, vocab_size
    fewest = math.ceil(tokens / max(_LOGITS_PER_CHUNK // vocab_size, 1))
    equal = (n for n in range(fewest, 2 * fewest) if tokens % n == 0)
    return math.ceil(tokens / next(equal, fewest)), vocab_size
