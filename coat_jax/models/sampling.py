"""The choice of the next token from logits."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from pallas_kernels.checks import is_positive_number, positive_int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """The tokens among which `choose` samples.

    Attributes:
      top_k: The number of most likely tokens that may be sampled; None means all.
      top_p: The total probability that the tokens that may be sampled must reach. They
        are the fewest most likely tokens that reach it. None means all tokens.
    """

    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if self.top_k is not None:
            object.__setattr__(self, "top_k", positive_int("top_k", self.top_k))
        top_p = self.top_p
        if top_p is not None and not (is_positive_number(top_p) and top_p <= 1):
            raise ValueError(f"top_p must be above 0 and at most 1, got {top_p!r}")

    def choose(
        self,
        scores: Float[Array, "b vocab"],
        temperatures: Float[Array, " b"],
        key: Key[Array, ""] | None,
    ) -> Int[Array, " b"]:
        """Returns a token for each row of logits.

        Args:
          scores: The logits.
          temperatures: The number that divides each row; 0 takes the most likely token.
          key: The key of the random choices; None takes the most likely tokens.
        """
        likeliest = jnp.argmax(scores, axis=-1)
        if key is None:
            return likeliest
        # Differences to the largest logit stay finite or become -inf where a tiny
        # temperature divides them.
        divisors = jnp.maximum(temperatures, jnp.finfo(jnp.float32).tiny)[:, None]
        differences = scores - jnp.max(scores, axis=-1, keepdims=True)
        drawn = jax.random.categorical(key, self.masked(differences / divisors))
        return jnp.where(temperatures > 0, drawn, likeliest)

    def masked(self, scores: Float[Array, "b vocab"]) -> Float[Array, "b vocab"]:
        """Returns the logits with -inf for all tokens that must not be chosen.

        If only some of several equal logits may be kept, the tokens with the lowest
        indices keep theirs.
        """
        if self.top_k is None and self.top_p is None:
            return scores
        order = jnp.argsort(scores, axis=-1, descending=True, stable=True)
        ranked = jnp.take_along_axis(scores, order, axis=-1)
        ranks = jnp.arange(scores.shape[-1])[None]
        kept = ranks < (self.top_k or scores.shape[-1])
        ranked = jnp.where(kept, ranked, -jnp.inf)
        if self.top_p is not None:
            likely = jax.nn.softmax(ranked, axis=-1)
            before = jnp.cumsum(likely, axis=-1) - likely
            # A sum can round up to `top_p` too early, but the first token stays.
            kept &= (before < self.top_p) | (ranks == 0)
            ranked = jnp.where(kept, ranked, -jnp.inf)
        return jnp.take_along_axis(ranked, jnp.argsort(order, axis=-1), axis=-1)
