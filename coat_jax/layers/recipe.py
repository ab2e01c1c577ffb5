"""The interface of recipes, which compute the three segments of a decoder layer.

The segments are the norm and matmul before attention, attention with the output
projection, and the gated MLP or the experts.
"""

import abc
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal

import optax
from jaxtyping import Array, Bool, Float, Int

from coat_jax.layers import functional
from coat_jax.layers.attention import LLAMA_SCORES, Scores, causal_attention
from coat_jax.layers.context import ContextParallel
from coat_jax.layers.experts.routing import Experts, Shares
from coat_jax.layers.flow import Params
from coat_jax.layers.heads import HeadSteps
from coat_jax.layers.parts import Heads, Norm, Stream
from pallas_kernels import Activation, NormKind

Scaling = Literal["just_in_time", "delayed"]
# Places of a layer's norms: before attention and the MLP as in Llama, on their outputs
# as in OLMo 2, or in both places as in Gemma.
NormPlacement = Literal["before", "after", "both"]
# The residual stream between segments. A `Stream`, in the FP8 flow, also carries the
# scale of its gradient.
Residual = Float[Array, "b s h"] | Stream
# Queries [b, s, n, d], keys and values [b, s, k, d], copies of them to save for
# backward (may be empty), and the residual stream for the next segment.
Attended = tuple[Array, Array, Array, tuple[Array, ...], Residual]
# A function that wraps a function and keeps its signature.
Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
NORMS: dict[NormKind, Callable[..., Array]] = {
    "rms": functional.rms_norm,
    "layer": functional.layer_norm,
}
GATES: dict[Activation, Callable[..., Array]] = {
    "silu": functional.swiglu,
    "gelu": functional.geglu,
    "gelu_exact": partial(functional.geglu, approximate=False),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """The options of attention and of the operations around it, in one layer.

    Attributes:
      scores: The scale, soft cap and window of attention's scores.
      steps: The operations between the `qkv` matmul and attention, such as RoPE and
        norms of heads; None means that the matmul has applied RoPE.
      out_norm: The norm of the projection's output, before it is added to the residual
        stream; None means no norm.
      context: How sequences are split over devices; None means that they are whole.
    """

    scores: Scores = LLAMA_SCORES
    steps: HeadSteps | None = None
    out_norm: Norm | None = None
    context: ContextParallel | None = None

    def starts(self, x: Float[Array, "b s ..."]) -> Int[Array, " b"] | int:
        """Returns the position of the first token of each row of `x`."""
        return 0 if self.context is None else self.context.starts(*x.shape[:2])

    def run(
        self,
        q: Float[Array, "b s n d"],
        k: Float[Array, "b s k d"],
        v: Float[Array, "b s k d"],
        copies: tuple[Array, ...],
        segment_ids: Int[Array, "b s"] | None,
        local: Bool[Array, ""] | None,
    ) -> Float[Array, "b s n d"]:
        """Computes `causal_attention` with these options.

        Args:
          q: Queries. With a context, b counts the rows of `ContextParallel.enter`.
          k: Keys.
          v: Values.
          copies: Copies of queries, keys and values, or (). The backward pass reads the
            copies in place of q, k and v. With a context the copies are not used,
            because the backward pass reads the arrays that the devices have exchanged.
          segment_ids: The document of each token, or None.
          local: Whether the window of `scores` applies in this layer; None means yes.
        """

        def attention(q, k, v, segment_ids, local, copies=()):
            return causal_attention(
                q, k, v, copies, segment_ids, scores=self.scores, local=local
            )

        if self.context is None:
            return attention(q, k, v, segment_ids, local, copies)
        return self.context.attend(attention, q, k, v, segment_ids, local)


LLAMA_ATTENTION = Attention()


class Recipe(abc.ABC):
    """A way to compute the segments of a layer, and the activations that they save.

    A stack of layers calls `enter`, then the three segments of each layer, and then
    `leave`.

    Attributes:
      scalings: When the scales of gradients may be computed; see `DecoderLayer`.
      optimizer: The optimizer to train with, a function that takes the arguments of
        `optax.adamw`.
      takes_codes: Whether segments also take weights that are quantized beforehand.
      pointwise: The wrapper of the functions that compute norms, gates and RoPE outside
        of the FP8 flow.
      outside: The wrapper of functions outside of segments, such as a model's last
        norm.
    """

    scalings: ClassVar[tuple[Scaling, ...]]
    optimizer: ClassVar[Callable[..., optax.GradientTransformation]]
    takes_codes: ClassVar[bool]
    pointwise: Wrapper
    outside: Wrapper

    @property
    @abc.abstractmethod
    def has_experts(self) -> bool:
        """True if the recipe has matmuls of experts."""

    def norm(self, norm: Norm) -> Callable[[Array | None, Array], Array]:
        """Returns a function (weight, x) that computes this norm of x.

        The weight may be None.
        """
        fn = NORMS[norm.kind]
        return self.pointwise(lambda weight, x: fn(x, weight, eps=norm.eps))

    @abc.abstractmethod
    def enter(
        self, x: Float[Array, "b s h"], batch_axes: str | tuple[str, ...] | None = None
    ) -> Residual:
        """Returns the residual stream in the form that the first segment takes.

        Args:
          x: The residual stream.
          batch_axes: The mesh axes that split the batch, if the mesh's axes are
            automatic. Each shard's gradients then have scales of their own.

        Raises:
          ValueError: If the recipe uses the FP8 flow and `x` is neither bfloat16 nor
            float32.
        """

    @abc.abstractmethod
    def attention_in(
        self, params: Params, x: Residual, *, norm: Norm | None, heads: Heads
    ) -> Attended:
        """Computes queries, keys and values: `norm(x) @ qkv.T`, then RoPE.

        Args:
          params: The parameters: `norm` [h] or None, and
            `qkv` [k * (n / k + 2) * d, h].
          x: The residual stream.
          norm: The norm; None means no norm.
          heads: The order of heads in the columns of the matmul.

        Returns:
          Queries [b, s, n, d], keys and values [b, s, k, d], copies of the three to
          save for the backward pass or (), and the residual stream for `attention_out`.
        """

    @abc.abstractmethod
    def attention_out(
        self,
        params: Params,
        q: Float[Array, "b s n d"],
        k: Float[Array, "b s k d"],
        v: Float[Array, "b s k d"],
        kept: tuple[Array, ...],
        x: Residual,
        segment_ids: Int[Array, "b s"] | None = None,
        *,
        attention: Attention = LLAMA_ATTENTION,
        local: Bool[Array, ""] | None = None,
    ) -> Residual:
        """Computes `x + causal_attention(q, k, v) @ out.T`.

        Args:
          params: The parameters: `out` [h, n * d]; `heads`, the parameters of
            `attention.steps`, if there are any; and `out_norm` [h], if there is
            `attention.out_norm`.
          q: Queries.
          k: Keys.
          v: Values.
          kept: The copies of q, k and v that `attention_in` returns.
          x: The residual stream.
          segment_ids: The number of each token's document in packed sequences, which
            attention does not cross; None means that a sequence is one document.
          attention: The options of attention. They can add operations before attention,
            and a norm of the projection's output.
          local: Whether the layer's attention is local; see `causal_attention` and
            `HeadSteps.apply` for the meaning of None.
        """

    @abc.abstractmethod
    def gated_mlp(
        self,
        params: Params,
        x: Residual,
        *,
        norm: Norm | None,
        gate: Activation = "silu",
        out_norm: Norm | None = None,
    ) -> Residual:
        """Computes `x + (act(g) * u) @ down.T`, the gated MLP on the residual stream.

        g and u are the two halves of `norm(x) @ gate_up.T`, and act is the activation
        `gate`.

        Args:
          params: The parameters: `norm` [h] or None, `gate_up` [2, f, h], and `down`
            [h, f].
          x: The residual stream.
          norm: The norm of the input; None means no norm.
          gate: The name of the activation.
          out_norm: The norm of the output before it is added to `x`, with the weight
            `params["out_norm"]`; None means no norm.
        """

    @abc.abstractmethod
    def experts(
        self,
        params: Params,
        x: Residual,
        *,
        norm: Norm,
        gate: Activation,
        experts: Experts,
        batch_axes: str | tuple[str, ...] | None = None,
        sent: bool = True,
    ) -> tuple[Residual, Shares]:
        """Computes `x` plus the weighted sum of the outputs of each token's experts.

        An expert is a gated MLP of `norm(x)`.

        Args:
          params: The parameters: `norm` [h] or None, `router` [e, h], `router_bias` [e]
            or None, `gate_up` [g, 2, f, h] and `down` [g, h, f]. There are e experts to
            choose from, and g - e shared experts.
          x: The residual stream.
          norm: The norm of the input.
          gate: The name of the activation in the gated MLPs.
          experts: The number of experts, and how tokens choose among them.
          batch_axes: The mesh axes that split the batch, if the mesh's axes are
            automatic and one is named "expert".
          sent: Whether tokens are sent to the devices of a mesh axis "expert". If not,
            XLA gathers the weights of experts.

        Returns:
          The residual stream, and how tokens are spread over experts.

        Raises:
          ValueError: If the recipe has no matmuls of experts, or the mesh cannot split
            the experts or the batch; see `coat_jax.layers.experts.parallel.ExpertAxis`.
        """

    @abc.abstractmethod
    def leave(self, x: Residual) -> Float[Array, "b s h"]:
        """Returns the residual stream as an array, from the last segment's result."""
