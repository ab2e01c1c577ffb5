"""A recipe that composes a layer from plain functions."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import optax
from jaxtyping import Array, Float

from coat_jax.fp8 import matmul
from coat_jax.layers.experts import composed
from coat_jax.layers.experts.parallel import ExpertAxis
from coat_jax.layers.experts.products import Product
from coat_jax.layers.experts.routing import Experts, Shares
from coat_jax.layers.flow import Params, joined
from coat_jax.layers.parts import Heads, Norm
from coat_jax.layers.recipe import (
    GATES,
    LLAMA_ATTENTION,
    Attended,
    Attention,
    Recipe,
    Residual,
    Scaling,
    Wrapper,
)
from pallas_kernels import Activation


def identity(fn: Callable) -> Callable:
    """Returns `fn` itself: the wrapper for recipes that do not wrap a function."""
    return fn


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainRecipe(Recipe):
    """A recipe of plain functions, which JAX differentiates.

    A wrapper is a function that takes a function and returns one of the same signature,
    such as `jax.checkpoint`. Wrappers determine which residuals are saved.

    Attributes:
      linear: A function (x, w) that computes `x @ w.T`.
      stacked: Whether one matmul computes both gate and up; otherwise each has its own.
      product: A function that multiplies rows by the weights of experts; None if the
        recipe does not support experts.
      pointwise: The wrapper of norms, gates and RoPE.
      outside: The wrapper of functions outside of segments; see `Recipe`.
      segment: The wrapper of the segments before and after attention, functions
        (parameters, x).
      projection: The wrapper of the output projection, a function (parameters, o, x).
      attention: The wrapper of attention together with the projection.
      optimizer: The optimizer to train with.
    """

    linear: Callable[[Array, Array], Array]
    stacked: bool = True
    product: Product | None = None
    pointwise: Wrapper = identity
    outside: Wrapper = identity
    segment: Wrapper = identity
    projection: Wrapper = identity
    attention: Wrapper = identity
    optimizer: Callable[..., Any] = optax.adamw
    scalings: ClassVar[tuple[Scaling, ...]] = ("just_in_time",)
    takes_codes: ClassVar[bool] = False

    def enter(
        self, x: Float[Array, "b s h"], batch_axes: str | tuple[str, ...] | None = None
    ) -> Residual:
        """Returns `x`: the residual stream is a plain array in this recipe."""
        return x

    def attention_in(
        self, params: Params, x: Residual, *, norm: Norm | None, heads: Heads
    ) -> Attended:
        """Computes queries, keys and values with plain functions.

        `Recipe.attention_in` documents the arguments and the results.
        """

        def segment(params, x):
            y = self.project_in(params, x, norm=norm)
            split = partial(heads.split, start=heads.starts(x))
            return self.pointwise(split)(y)

        return *self.segment(segment)(params, x), (), x

    def attention_out(
        self,
        params: Params,
        q: Array,
        k: Array,
        v: Array,
        kept: tuple[Array, ...],
        x: Array,
        segment_ids: Array | None = None,
        *,
        attention: Attention = LLAMA_ATTENTION,
        local: Array | None = None,
    ) -> Residual:
        """Computes attention and the output projection with plain functions.

        `Recipe.attention_out` documents the arguments and the result.
        """
        context = attention.context

        def project(params, o, x):
            return self.project_out(params, o, x, norm=attention.out_norm)

        def segment(params, q, k, v, x):
            if attention.steps is not None:
                start = attention.starts(x)
                apply = partial(attention.steps.apply, start=start, local=local)
                steps = self.pointwise(apply)
                q, k, v = self.segment(steps)(params["heads"], q, k, v)
            o = attention.run(q, k, v, kept, segment_ids, local)
            o = o if context is None else context.to_rows(o)
            return self.projection(project)(params, o, x)

        return self.attention(segment)(params, q, k, v, x)

    def project_in(
        self, params: Params, x: Array, *, norm: Norm | None
    ) -> Float[Array, "b s m"]:
        """Computes `norm(x) @ qkv.T`, the columns of all heads; None means no norm."""
        h = x if norm is None else self.norm(norm)(params["norm"], x)
        return matmul.once(self.linear(h, params["qkv"]))

    def project_out(
        self,
        params: Params,
        o: Float[Array, "b s n d"],
        x: Array,
        *,
        norm: Norm | None = None,
    ) -> Float[Array, "b s h"]:
        """Computes `x + norm(o @ out.T)`; None means no norm.

        `params` holds `out` [h, n * d], and `out_norm` [h] if there is a norm.
        """
        y = self.linear(joined(o), params["out"])
        if norm is not None:
            y = self.norm(norm)(params["out_norm"], y)
        return matmul.once(x + y)

    def gated_mlp(
        self,
        params: Params,
        x: Residual,
        *,
        norm: Norm | None,
        gate: Activation = "silu",
        out_norm: Norm | None = None,
    ) -> Residual:
        """Computes the gated MLP and the residual sum with plain functions.

        `Recipe.gated_mlp` documents the arguments and the result.
        """

        def segment(params, x):
            h = x if norm is None else self.norm(norm)(params["norm"], x)
            a = self.pointwise(GATES[gate])(*self._gate_and_up(h, params["gate_up"]))
            y = self.linear(a, params["down"])
            if out_norm is not None:
                y = self.norm(out_norm)(params["out_norm"], y)
            return x + y

        return self.segment(segment)(params, x)

    def _gate_and_up(self, h: Array, weights: Array) -> tuple[Array, Array]:
        if self.stacked:
            y = matmul.once(self.linear(h, weights))
            return y[..., 0, :], y[..., 1, :]
        gate, up = (matmul.once(self.linear(h, w)) for w in weights)
        return gate, up

    @property
    def has_experts(self) -> bool:
        """True if the recipe has a matmul of experts."""
        return self.product is not None

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
        """Adds the outputs of each token's experts to `x` with plain functions.

        `Recipe.experts` documents the arguments and the results.
        """
        axis = ExpertAxis.of(params, x, batch_axes, experts, sent)

        def segment(params, x):
            h = self.norm(norm)(params["norm"], x)
            y, shares = composed.experts_sum(
                params,
                h.reshape(-1, h.shape[-1]),
                product=self.product,
                gated=self.pointwise(partial(composed.weighted_gate, GATES[gate])),
                experts=experts,
                axis_name=axis.name,
            )
            return x + y.reshape(x.shape), shares

        return composed.over_shards_of(self.segment(segment), params, x, axis)

    def leave(self, x: Residual) -> Float[Array, "b s h"]:
        """Returns `x`: the residual stream is a plain array in this recipe."""
        return x
