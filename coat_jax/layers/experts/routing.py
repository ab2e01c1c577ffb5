"""The router of a mixture of experts: choices, weights and auxiliary losses.

Logits, scores, weights and losses are float32.
"""

import dataclasses
import math
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from coat_jax.layers.parts import Norm
from pallas_kernels.checks import check_sizes
from pallas_kernels.dispatch import array_types

RouterScores = Literal["softmax", "sigmoid"]
# A product of float32 numbers as three products of bfloat16 numbers.
_PRECISION = lax.DotAlgorithmPreset.BF16_BF16_F32_X3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of a layer, and how tokens choose among them.

    The scores of a token are the softmax of its logits over all experts, or the logits'
    sigmoids. The token's output is the sum of the outputs of its `top_k` experts, each
    times the expert's score. Shared experts are added with weight 1 for every token.

    Attributes:
      num_experts: The number of experts to choose from, E.
      top_k: The number of experts that a token chooses.
      num_shared: The number of shared experts, which every token has in addition. A
        shared gated MLP with n times an expert's hidden size is n shared experts.
      scores: "softmax" as in Mixtral and Qwen3, or "sigmoid" as in DeepSeek-V3.
      normalized: Whether the chosen scores are divided by their sum.
      scale: A factor on the weights of chosen experts.
      selection_bias: Whether a bias for each expert is added to the scores, only to
        choose experts, as in DeepSeek-V3 (arXiv 2412.19437, section 2.1.2). Gradients
        do not change the bias; see `updated_bias`.
      balance_weight: The weight of the load-balancing loss in `llama.training_loss`.
      z_weight: The weight of the z loss in `llama.training_loss`.
      buffer: The number of rows that a device can send to another device if a mesh axis
        "expert" splits the experts, relative to the mean over all pairs of devices,
        which is `top_k` times a device's tokens over the size of the axis. If any
        device has more rows for another device, the layer's output is NaN on all
        devices along the axis, so that no row is dropped without notice. None means
        room for all rows, up to the size of the axis times the mean. Rows then travel
        in parts of 1.25 times the mean, as many as the pair with the most rows needs,
        and the host waits for that number at each exchange.

    Raises:
      ValueError: If a number is out of its range, or a name is unknown.

    Examples:
      >>> from coat_jax.layers.experts.routing import Experts
      >>> Experts(num_experts=128, top_k=8).num_groups
      128
    """

    num_experts: int
    top_k: int
    num_shared: int = 0
    scores: RouterScores = "softmax"
    normalized: bool = True
    scale: float = 1.0
    selection_bias: bool = False
    balance_weight: float = 0.01
    z_weight: float = 0.001
    buffer: float | None = None

    def __post_init__(self) -> None:
        check_sizes(num_experts=self.num_experts, top_k=self.top_k)
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k must be at most num_experts {self.num_experts}, got "
                f"{self.top_k}"
            )
        if type(self.num_shared) is not int or self.num_shared < 0:
            raise ValueError(
                f"num_shared must be an integer of 0 or more, got {self.num_shared!r}"
            )
        if self.scores not in get_args(RouterScores):
            names = ", ".join(get_args(RouterScores))
            raise ValueError(f"scores must be one of {names}, got {self.scores!r}")
        if not 0 < self.scale < math.inf:
            raise ValueError(f"scale must be positive, got {self.scale!r}")
        for name in ("balance_weight", "z_weight"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name} must be 0 or more, got {value!r}")
        if self.buffer is not None and not 1 <= self.buffer < math.inf:
            raise ValueError(f"buffer must be 1 or more, got {self.buffer!r}")

    @property
    def num_groups(self) -> int:
        """The number of experts, including the shared ones, which are the last."""
        return self.num_experts + self.num_shared

    @property
    def choices(self) -> int:
        """The number of experts of each token, including the shared ones."""
        return self.top_k + self.num_shared


class Shares(NamedTuple):
    """Statistics of a layer's router, with a row for each shard of the batch.

    Attributes:
      load: The fraction of all choices that fall on each expert. It has no gradient.
      score: The mean over tokens of each expert's score, divided by the sum of the
        token's scores.
      z: The mean over tokens of `logsumexp(logits) ** 2`.
    """

    load: Float[Array, "shards experts"]
    score: Float[Array, "shards experts"]
    z: Float[Array, " shards"]


class Routing(NamedTuple):
    """Auxiliary losses and loads of the experts of one layer or several layers.

    Attributes:
      load: The fraction of all choices that fall on each expert, float32.
      balance: The load-balancing loss: the number of experts times the sum of load
        times mean score (arXiv 2101.03961, equation 4). It is 1 if loads are equal.
      z: The z loss: the mean over tokens of `logsumexp(logits) ** 2` (arXiv 2202.08906,
        equation 5).
    """

    load: Float[Array, "*layers experts"]
    balance: Float[Array, ""]
    z: Float[Array, ""]

    @classmethod
    def of(cls, shares: Shares) -> "Routing":
        """Returns a layer's loads and losses, as means over the shards of the batch."""
        load, score, z = (jnp.mean(x, axis=0) for x in shares)
        # Within `shard_map` the caller averages losses over devices. The balance loss
        # needs the load of all tokens: a mean of products is not a product of means.
        axes = array_types.varying_axes(load) | array_types.unchecked_axes()
        if axes:
            load = lax.pmean(load, tuple(sorted(axes)))
        balance = load.size * jnp.sum(lax.stop_gradient(load) * score)
        return cls(lax.stop_gradient(load), balance, z)


def router_logits(
    h: Float[Array, "tokens h"], router: Float[Array, "experts h"]
) -> Float[Array, "tokens experts"]:
    """Computes the logits `h @ router.T`, nearly with the precision of float32.

    On GPUs the result is the sum of three BF16 matmuls. For rows of 2,048 elements its
    error is 2e-5, 2.5 times the error of a float32 matmul, which takes twice the time.
    """
    h, router = (x.astype(jnp.float32) for x in (h, router))
    return _product(h, router, (-1, -1))


def normed_logits(
    norm: Norm,
    x: Float[Array, "tokens h"],
    weight: Float[Array, " h"] | None,
    router: Float[Array, "experts h"],
) -> Float[Array, "tokens experts"]:
    """Computes `router_logits` of a norm's output, from the norm's input `x`.

    For an RMSNorm of bfloat16 numbers the norm's output is not written to memory. The
    reciprocal root mean square of a token is a factor of its logits, and the norm's
    weight is a factor of the router's columns, so the matmul reads `x` itself. `x` is
    one exact BF16 operand, and the router is split into two. For rows of 2,048 elements
    the error is 2e-6 if router and weight are bfloat16, and otherwise 9e-6.
    """
    if norm.kind != "rms" or x.dtype != jnp.bfloat16:
        return router_logits(norm.values(x, weight), router)
    halves = _halves(_weighted(router, weight), axis=0)
    sums = jnp.tensordot(x, halves, axes=(-1, -1), preferred_element_type=jnp.float32)
    high, low = jnp.split(sums, 2, axis=1)
    return (high + low) * norm.rate(x)


def logits_gradient(
    norm: Norm,
    x: Float[Array, "tokens h"],
    weight: Float[Array, " h"] | None,
    router: Float[Array, "experts h"],
    dlogits: Float[Array, "tokens experts"],
) -> tuple[Float[Array, "tokens h"], Float[Array, "experts h"]]:
    """Computes the gradients of the norm's output and of the router.

    If the norm is an RMSNorm of bfloat16 numbers, both matmuls have bfloat16 operands,
    as in `normed_logits`: `dlogits` is split into two, which keep 16 bits, and the
    router is rounded to bfloat16, as the gradient of the norm's output is.

    Args:
      norm: The norm.
      x: The norm's input, bfloat16 or float32.
      weight: The norm's weight.
      router: The router.
      dlogits: The gradient of the logits, float32.

    Returns:
      The gradient of the norm's output, in the dtype of `x`, and the gradient of the
      router, in the router's dtype.
    """
    if norm.kind != "rms" or x.dtype != jnp.bfloat16:
        dh = _product(dlogits, router.astype(jnp.float32), (-1, 0))
        d_router = _product(dlogits, norm.values(x, weight), (0, 0))
        return dh.astype(x.dtype), d_router.astype(router.dtype)
    twice = jnp.concatenate([router, router]).astype(x.dtype)
    dh = jnp.matmul(_halves(dlogits, axis=1), twice, preferred_element_type=x.dtype)
    halves = _halves(dlogits * norm.rate(x), axis=1)
    sums = jnp.tensordot(halves, x, axes=(0, 0), preferred_element_type=jnp.float32)
    high, low = jnp.split(sums, 2)
    return dh, _weighted(high + low, weight).astype(router.dtype)


def _product(
    a: Float[Array, "_ _"], b: Float[Array, "_ _"], axes: tuple[int, int]
) -> Float[Array, "_ _"]:
    """Contracts an axis of `a` with one of `b`, nearly with the precision of float32.

    For one token and one expert XLA computes no matmul but a sum or a product, which
    CPUs have in float32 alone.
    """
    is_matmul = max(len(a), len(b)) > 1
    precision = _PRECISION if is_matmul else lax.Precision.HIGHEST
    return jnp.tensordot(a, b, axes=axes, precision=precision)


def _halves(x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    """Splits `x` into two bfloat16 arrays, which are joined along an axis.

    Their sum is `x`, rounded to 16 significant bits.
    """
    high = lax.reduce_precision(x, 8, 7)
    return jnp.concatenate([high, x - high], axis=axis).astype(jnp.bfloat16)


def _weighted(
    router: Float[Array, "experts h"], weight: Float[Array, " h"] | None
) -> Float[Array, "experts h"]:
    """Multiplies the columns of a router by a norm's weight, in float32."""
    router = router.astype(jnp.float32)
    return router if weight is None else router * weight.astype(jnp.float32)[None]


def chosen_experts(
    logits: Float[Array, "tokens experts"],
    experts: Experts,
    bias: Float[Array, " experts"] | None = None,
) -> Int[Array, "tokens choices"]:
    """Returns the indices of each token's experts, best first and shared ones last.

    Among experts with equal scores, the one with the lowest index comes first.
    """
    scores = _scores(lax.stop_gradient(logits), experts)
    if bias is not None:
        scores = scores + bias.astype(jnp.float32)[None]
    ids = _largest(scores, experts.top_k)
    shared = jnp.arange(experts.num_experts, experts.num_groups, dtype=ids.dtype)
    shared = jnp.broadcast_to(shared, (len(ids), len(shared)))
    return jnp.concatenate([ids, shared], axis=1)


def routed(
    logits: Float[Array, "tokens experts"],
    ids: Int[Array, "tokens choices"],
    experts: Experts,
) -> tuple[Float[Array, "tokens choices"], Shares]:
    """Returns the weights of each token's experts, and the `Shares` of all experts.

    Weights and shares, except loads, are differentiable functions of the logits.
    """
    ids = ids[:, : experts.top_k]
    # Scores divided by their sum are the softmax of their logarithms. The softmax and
    # its derivative stay finite if all sigmoids are zero, or if their sum is so small
    # that its square, by which the derivative of a quotient divides, is zero.
    sigmoid = experts.scores == "sigmoid"
    logs = jax.nn.log_sigmoid(logits) if sigmoid else logits
    scores = logs if experts.normalized else _scores(logits, experts)
    weights = jnp.take_along_axis(scores, ids, axis=1)
    if experts.normalized:
        weights = jax.nn.softmax(weights, axis=-1)
    shared = jnp.ones((len(ids), experts.num_shared), weights.dtype)
    weights = jnp.concatenate([weights * experts.scale, shared], axis=1)
    counts = group_sizes(ids, experts.num_experts)
    shares = Shares(
        load=(counts / max(ids.size, 1))[None],
        score=jnp.mean(jax.nn.softmax(logs, axis=-1), axis=0)[None],
        z=jnp.mean(jax.nn.logsumexp(logits, axis=1) ** 2)[None],
    )
    return weights, shares


def group_sizes(ids: Int[Array, "*any"], groups: int) -> Int[Array, " groups"]:
    """Counts how often each group from 0 to `groups - 1` occurs in `ids`.

    XLA fuses the comparison and the sum into one pass.
    """
    is_of = ids.reshape(-1, 1) == jnp.arange(groups, dtype=ids.dtype)[None]
    return jnp.sum(is_of, axis=0, dtype=jnp.int32)


def updated_bias(
    bias: Array, load: Float[Array, "*layers experts"], rate: float
) -> Any:
    """Returns the selection bias after a step: it rises for experts with little load.

    DeepSeek-V3 adds or subtracts `rate`, 0.001 in most of its training (arXiv
    2412.19437, sections 2.1.2 and 4.2).

    Args:
      bias: The bias of each expert, of one layer or of all.
      load: The loads of the step, of the same shape.
      rate: The number that is added or subtracted.

    Examples:
      >>> import jax.numpy as jnp
      >>> from coat_jax.layers.experts.routing import updated_bias
      >>> updated_bias(jnp.zeros(2), jnp.array([0.75, 0.25]), 0.5).tolist()
      [-0.5, 0.5]
    """
    mean = jnp.mean(load, axis=-1, keepdims=True)
    return bias + rate * jnp.sign(mean - load).astype(bias.dtype)


def _largest(
    scores: Float[Array, "tokens experts"], count: int
) -> Int[Array, "tokens choices"]:
    """Returns the indices that `lax.top_k` returns, by `count` argmaxes of each row.

    For `lax.top_k` XLA sorts whole rows, which takes longer on GPUs.
    """
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    # Integers in the order of the scores. A score that is chosen becomes `least`, which
    # is below all others. The maximum makes two integers equal that both stand for NaN.
    least = jnp.iinfo(jnp.int32).min
    order = jnp.maximum(bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF)), least + 1)
    at, ids = jnp.arange(scores.shape[1], dtype=jnp.int32), []
    for _ in range(count):
        ids.append(jnp.argmax(order, axis=1).astype(jnp.int32))
        order = jnp.where(at[None] == ids[-1][:, None], least, order)
    return jnp.stack(ids, axis=1)


def _scores(logits: Array, experts: Experts) -> Array:
    if experts.scores == "sigmoid":
        return jax.nn.sigmoid(logits)
    return jax.nn.softmax(logits, axis=-1)
