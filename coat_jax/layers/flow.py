"""The FP8 precision flow: segments of a layer whose backward passes read FP8.

COAT (arXiv 2410.19313, section 5). What a norm or a gate reads is quantized once, in
groups of 16. The backward pass reads that, and computes norm outputs, gated products
and rotary embeddings again; attention keeps what it reads and writes. Matrix products
take E4M3 codes, in forward with a scale for each token and for each output of the
weights, and E5M2 gradients with one scale a tensor. The residual stream stays wide and
goes through `attention_in`, so that its gradient is added where the norm's is computed.

Weights are quantized in the layout that a product needs where it needs it: of them
nothing but a scale lives between the passes. Or they come as `Fp8Weight`s.

Scales are taken just in time, those of the stream's gradients where these come from:
between segments it is a `Stream`. Those of gradients are delayed ones if a segment's
parameters hold `amax`, histories that are called `qkv_grad` where the gradient is that
of what `qkv` is multiplied to. The gradients of histories are the next histories.
"""

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import pallas_kernels as kernels
from coat_jax.devices import on_one_device
from coat_jax.layers.functional import angles, rotary
from coat_jax.layers.matmul import (
    Codes,
    Rows,
    Weight,
    input_gradient,
    product,
    product_heads,
    tensor_scales,
    weight_gradient,
)
from coat_jax.quantization.array import E4M3, E5M2
from coat_jax.quantization.delayed import recorded, scale_of
from pallas_kernels.ops.rope.reference import split_heads

GateName = Literal["silu", "gelu", "gelu_exact"]
NormName = Literal["rms", "layer"]
Params = Mapping[str, Weight | None]
Amax = Mapping[str, Float[Array, " length"]]
# No slope of these gates is larger.
_STEEPEST = {"silu": 1.1, "gelu": 1.13, "gelu_exact": 1.13}


class Stream(NamedTuple):
    """The residual stream, whose gradient comes with its scale.

    Attributes:
      x: The stream [b, s, h].
      scale: A float32 scalar that says nothing. Its gradient is the scale for codes of
        that of `x`, or says nothing where scaling is delayed. So nothing else may be
        added to the gradient of `x`: there is one reader of a stream.
    """

    x: Float[Array, "b s h"]
    scale: Float[Array, ""]

    @classmethod
    def of(cls, x: Float[Array, "b s h"]) -> "Stream":
        """The stream before the first segment."""
        return cls(x, jnp.zeros((), jnp.float32))

    @classmethod
    def gradient(
        cls, dx: Float[Array, "b s h"], maxima: Array | None = None
    ) -> "Stream":
        """A gradient with its scale, from its `maxima` where these are known."""
        found = kernels.maxima(dx) if maxima is None else maxima
        return cls(dx, scale_of(E5M2, None, lambda: kernels.Bound((found,))))

    def codes(self, history: Array | None) -> Codes:
        """Codes of a gradient, both copies."""
        scale = self.scale if history is None else None
        how = {"copies": "both", "scale": scale, "history": history}
        return Codes.of(self.x, E5M2, **how)


@jax.custom_vjp
def leave(stream: Stream) -> Float[Array, "b s h"]:
    """The stream behind the last segment."""
    return stream.x


def _leave_grads(_, dx):
    return (Stream.gradient(dx),)


leave.defvjp(lambda stream: (stream.x, None), on_one_device(_leave_grads))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heads:
    """The order of heads in the columns of the matmul before attention.

    For every key head there are its queries, then its key, then its value.

    Attributes:
      num_kv_heads: Number of key heads, k.
      head_dim: Size of a head, d.
      theta: Base of the rotary embedding.
    """

    num_kv_heads: int
    head_dim: int
    theta: float

    def angles(self, length: int) -> tuple[Array, Array]:
        """Cosines and sines of the angles of so many positions, [length, d / 2]."""
        return angles(length, self.head_dim, self.theta)

    def split(self, y: Float[Array, "b s m"]) -> tuple[Array, Array, Array]:
        """Queries [b, s, n, d], keys and values [b, s, k, d], rotated."""
        how = {"num_kv_heads": self.num_kv_heads, "dtype": y.dtype}
        return split_heads(y, *self.angles(y.shape[1]), **how)

    def gradient(
        self, q: Array, k: Array, v: Array, history: Array | None = None
    ) -> Codes:
        """The gradient of what `split` takes, from those of what it returns."""
        cos, sin = self.angles(q.shape[1])

        def bound():
            # No rotation makes a number larger than this.
            return kernels.Bound((kernels.maxima(q, k, v),), math.sqrt(2))

        scale = scale_of(E5M2, history, bound)
        how = {"dtype": E5M2.dtype, "keep_maxima": history is not None}
        codes = kernels.join_heads(q, k, v, cos, sin, scale, **how)
        return Codes.found(codes.row, codes.transposed, scale, codes.largest)

    def bias_gradient(self, q: Array, k: Array, v: Array) -> Float[Array, " m"]:
        """The sum of that gradient over all tokens."""
        q, k = (rotary(x, theta=self.theta, inverse=True) for x in (q, k))
        q = q.reshape(*k.shape[:3], -1, self.head_dim)
        sums = [_token_sum(q)]
        sums += [_token_sum(x)[:, None] for x in (k, v)]
        return jnp.concatenate(sums, axis=1).reshape(-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm:
    """The norm at the beginning of a segment.

    Attributes:
      kind: Its kind.
      eps: Its epsilon.
    """

    kind: NormName
    eps: float

    def forward(
        self, x: Float[Array, "b s h"], weight: Array | None
    ) -> tuple[Rows, kernels.Groups]:
        """The norm's output, and `x` as backward reads it."""
        how = dataclasses.asdict(self)
        out = kernels.norm(x, weight, scale="row", keep_groups=True, **how)
        return Rows(out.y, out.scale), out.groups

    def backward(
        self,
        x: kernels.Groups,
        dy: Array,
        weight: Array | None,
        scale: Float[Array, ""],
        add: Array,
        delayed: bool,
    ) -> tuple[Stream, Array | None, Float[Array, "h tokens"]]:
        """The gradient of `x` plus `add`, that of the weight, and the norm's output.

        The first has its scale unless scaling is delayed, and the output comes again as
        transposed codes.
        """
        fused = add.dtype == jnp.bfloat16
        how = {"y_scale": scale, "add": add if fused else None}
        how |= {"keep_maxima": fused and not delayed, **dataclasses.asdict(self)}
        out = kernels.norm_grad(x, dy, weight, **how)
        dx = out.dx if fused else out.dx + add
        stream = Stream.of(dx) if delayed else Stream.gradient(dx, out.largest)
        dweight = None if weight is None else out.dweight.astype(weight.dtype)
        return stream, dweight, out.y


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def attention_in(
    params: Params,
    stream: Stream,
    norm: Norm,
    heads: Heads,
    keep_copies: bool = False,
) -> tuple[Array, Array, Array, tuple[Array, ...], Array]:
    """Queries, keys and values of the normed stream, copies if wanted, and the stream.

    `params` holds `norm` [h] or None, `qkv` [m, h] and maybe `qkv_bias` [m]. Copies are
    for backward to save: in a loop over layers the product writes them where they are
    stacked, while what attention reads would have to be copied. They have no gradients.
    """
    (q, k, v, _, x), _ = _attention_in(params, stream, norm, heads, False)
    return q, k, v, (q, k, v) if keep_copies else (), x


@on_one_device
def _attention_in(params, stream, norm, heads, keep_copies):
    x = stream.x
    h, groups = norm.forward(x, params["norm"])
    if (bias := params.get("qkv_bias")) is None:
        how = {"angles": heads.angles(x.shape[1]), "num_kv_heads": heads.num_kv_heads}
        how |= {"copies": 1 + keep_copies}
        (q, k, v, *kept), w = product_heads(h, params["qkv"], x.dtype, **how)
    else:
        y, w = product(h, params["qkv"], x.dtype)
        q, k, v = heads.split(biased(y, bias))
        kept = (q, k, v) if keep_copies else ()
    return (q, k, v, tuple(kept), x), (params, groups, *tensor_scales(h, w))


@on_one_device
def _attention_in_grads(norm, heads, keep_copies, residuals, cotangents):
    params, groups, scale, w_scale = residuals
    amax = params.get("amax", {})
    *dheads, _, dx = cotangents
    gradient = heads.gradient(*dheads, history=amax.get("qkv_grad"))
    # Weights are quantized again not before attention's backward pass is over.
    how = {"after": gradient.transposed}
    dh = input_gradient(gradient, params["qkv"], w_scale, dx.dtype, **how)
    delayed = "amax" in params
    dx, dnorm, h = norm.backward(groups, dh, params["norm"], scale, dx, delayed)
    grads = {
        "norm": dnorm,
        "qkv": weight_gradient(h, scale, gradient, params["qkv"]),
        "amax": _recorded(amax, qkv_grad=gradient),
    }
    if (bias := params.get("qkv_bias")) is not None:
        grads["qkv_bias"] = heads.bias_gradient(*dheads).astype(bias.dtype)
    return {name: grads.get(name) for name in params}, dx


attention_in.defvjp(_attention_in, _attention_in_grads)


@jax.custom_vjp
def attention_out(
    params: Params, o: Float[Array, "b s n d"], x: Float[Array, "b s h"]
) -> Stream:
    """`x` plus the product of attention's output.

    `params` holds `out` [h, n * d] and maybe `out_bias` [h]. Backward reads `o`, the
    array that attention's keeps too.
    """
    return _attention_out(params, o, x)[0]


@on_one_device
def _attention_out(params, o, x):
    rows = Rows.of(joined(o))
    x = biased(x, params.get("out_bias"))
    y, w = product(rows, params["out"], x.dtype, x)
    return Stream.of(y), (params, o, *tensor_scales(rows, w))


@on_one_device
def _attention_out_grads(residuals, dy):
    params, o, scale, w_scale = residuals
    amax = params.get("amax", {})
    gradient = dy.codes(amax.get("out_grad"))
    codes = Codes.of(joined(o), E4M3, copies="transposed", scale=scale)
    grads = {
        "out": weight_gradient(codes.transposed, scale, gradient, params["out"]),
        "amax": _recorded(amax, out_grad=gradient),
    }
    if (bias := params.get("out_bias")) is not None:
        grads["out_bias"] = _token_sum(dy.x, bias)
    do = input_gradient(gradient, params["out"], w_scale, o.dtype)
    return {name: grads.get(name) for name in params}, do.reshape(o.shape), dy.x


attention_out.defvjp(_attention_out, _attention_out_grads)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def gated_mlp(params: Params, stream: Stream, norm: Norm, gate: GateName) -> Stream:
    """The stream plus the gated MLP of it normed.

    `params` holds `norm` [h] or None, `gate_up` [2, f, h], `down` [h, f] and maybe
    `gate_up_bias` [2, f] and `down_bias` [h].
    """
    return _gated_mlp(params, stream, norm, gate)[0]


@on_one_device
def _gated_mlp(params, stream, norm, gate):
    x = stream.x
    h, groups = norm.forward(x, params["norm"])
    y, gate_up = product(h, params["gate_up"], x.dtype)
    y = biased(y.reshape(*y.shape[:-1], 2, -1), params.get("gate_up_bias"))
    out = kernels.gated(y, activation=gate, scale="row", keep_groups=True)
    a = Rows(out.values, out.scale)
    x = biased(x, params.get("down_bias"))
    y, down = product(a, params["down"], x.dtype, x)
    scales = tensor_scales(h, a, gate_up, down)
    inner = out.groups, out.largest_scale
    return Stream.of(y), (params, groups, inner, scales)


@on_one_device
def _gated_mlp_grads(norm, gate, residuals, dy):
    params, groups, (inner_groups, largest_scale), scales = residuals
    h_scale, a_scale, gate_up_scale, down_scale = scales
    amax = params.get("amax", {})
    gradient, dy = dy.codes(amax.get("down_grad")), dy.x
    da, da_maxima = input_gradient(
        gradient, params["down"], down_scale, dy.dtype, keep_maxima=True
    )
    history = amax.get("gate_up_grad")
    inner, a = _gate_gradient(
        inner_groups, largest_scale, da, da_maxima, gate, a_scale, history
    )
    # Weights are quantized again not before `da` is gone and the codes of its gradients
    # are transposed, so that they go with this product, and the weights' gradient can
    # be next.
    how = {"after": inner.transposed}
    dh = input_gradient(inner, params["gate_up"], gate_up_scale, dy.dtype, **how)
    delayed = "amax" in params
    dx, dnorm, h = norm.backward(groups, dh, params["norm"], h_scale, dy, delayed)
    grads = {
        "norm": dnorm,
        "gate_up": weight_gradient(h, h_scale, inner, params["gate_up"]),
        "down": weight_gradient(a, a_scale, gradient, params["down"]),
        "amax": _recorded(amax, gate_up_grad=inner, down_grad=gradient),
    }
    if (bias := params.get("down_bias")) is not None:
        grads["down_bias"] = _token_sum(dy, bias)
    if (bias := params.get("gate_up_bias")) is not None:
        wide = kernels.gated_grad(inner_groups, da, activation=gate).values
        grads["gate_up_bias"] = _token_sum(wide, bias)
    return {name: grads.get(name) for name in params}, dx


gated_mlp.defvjp(_gated_mlp, _gated_mlp_grads)


def _gate_gradient(
    gate_up: kernels.Groups,
    largest_scale: Float[Array, "..."],
    da: Array,
    da_maxima: Float[Array, " parts"],
    gate: GateName,
    a_scale: Float[Array, ""],
    history: Array | None,
) -> tuple[Codes, Float[Array, "f tokens"]]:
    """Returns the gradient of gate and up as per-tensor codes, and a's codes again.

    Just-in-time scaling uses an upper bound of the amax: the amax of a product is at
    most the product of the factors' amaxes. The exact amax would need another pass.
    E5M2 keeps its precision over 30 binades, so a loose bound costs nothing.
    """

    def bound():
        factors = largest_scale, da_maxima
        return kernels.Bound(factors, E4M3.max * _STEEPEST[gate])

    scale = scale_of(E5M2, history, bound)
    how = {"activation": gate, "dtype": E5M2.dtype}
    out = kernels.gated_grad(gate_up, da, scale=scale, product_scale=a_scale, **how)
    codes = out.values.reshape(*da.shape[:-1], -1)
    # A kernel of its own transposes: `da` is free by now, so that backward needs no
    # more memory at a time than BF16.
    transposed = kernels.transpose(codes)
    maxima = None if history is None else out.largest
    return Codes.found(codes, transposed, scale, maxima), out.product


def _recorded(amax: Amax, **quantized: Codes) -> Amax:
    """The histories of the next step."""
    return {name: recorded(amax[name], quantized[name].largest) for name in amax}


def joined(o: Float[Array, "b s n d"]) -> Float[Array, "b s m"]:
    """All heads of a position as one vector."""
    return o.reshape(*o.shape[:2], -1)


def _token_sum(dy: Float[Array, "b s ..."], like: Array | None = None) -> Array:
    """The gradient of what is added to every token, in the dtype of `like`."""
    total = jnp.sum(dy, (0, 1), dtype=jnp.float32)
    return total if like is None else total.astype(like.dtype)


def biased(y: Array, bias: Array | None) -> Array:
    """`y` plus a bias, if there is one, in the dtype of `y`."""
    return y if bias is None else y + bias.astype(y.dtype)
