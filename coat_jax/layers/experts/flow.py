"""The experts of a layer in the FP8 flow, with one derivative rule.

The forward pass quantizes the norm's output once, with a scale per token, and gathers
codes into the order of experts. It saves FP8 copies, in groups of 16, of the layer's
input and of gate and up, and the routing: the experts, the logits and the order of the
rows. The backward pass recomputes all other arrays. The matmuls of weight gradients
read transposed codes, in which the columns of every expert begin at a multiple of 128.

The router's weight of a choice multiplies the input of `down`, not the output. In the
forward pass the weight is a factor of a row's scale. Its gradient is the sum of the
gate's output times the gradient of this output, so the outputs of experts are not
saved. In the backward pass, arrays that are multiplied by these weights have one scale
for all experts and a power of two for each expert, so that gradients of an expert with
small weights do not underflow.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

import pallas_kernels as kernels
from coat_jax.fp8.gated_experts import by_group, grouped_gate_gradient
from coat_jax.fp8.matmul import quantize_tensor, tensor_scales
from coat_jax.fp8.ragged_dot import stored
from coat_jax.layers.experts.parallel import WEIGHTS, ExpertAxis
from coat_jax.layers.experts.products import (
    WeightOfExperts,
    forward_product,
    input_gradient,
    merged,
    weight_gradient,
)
from coat_jax.layers.experts.routing import (
    Experts,
    Shares,
    chosen_experts,
    logits_gradient,
    normed_logits,
    routed,
)
from coat_jax.layers.experts.sent import restored, sorted_rows
from coat_jax.layers.flow import Params
from coat_jax.layers.parts import Norm, Stream
from coat_jax.layers.shards import by_shards, over_shards
from coat_jax.meshes import on_explicit_tokens
from coat_jax.quantization.formats import E5M2
from pallas_kernels import Activation, Scaled
from pallas_kernels.dispatch import array_types
from pallas_kernels.numerics import GROUP
from pallas_kernels.ops.grouped_matmul.tiles import BLOCK


def experts_mlp(
    params: Params,
    stream: Stream,
    norm: Norm,
    gate: Activation,
    experts: Experts,
    axis: ExpertAxis,
) -> tuple[Stream, Shares]:
    """Adds the weighted sum of each token's experts to the stream; see `Experts`.

    An expert is a gated MLP of `norm(x)` with the activation `gate`, where x is the
    array of `stream`. `params` holds `norm` [h] or None, `router` [e, h], `router_bias`
    [e] or None, `gate_up` [g, 2, f, h] and `down` [g, h, f]. There are e experts to
    choose from, and g - e shared experts. `axis` says whether a mesh axis splits the
    experts.

    Returns:
      The residual stream, and how tokens are spread over experts.
    """

    def segment(params, stream):
        return _segment(params, stream, norm, gate, experts, axis)

    tokens = stream.tokens(), Shares(1, 1, 1)
    return on_explicit_tokens(segment, stream.x, tokens)(params, stream)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _segment(params, stream, norm, gate, experts, axis):
    return _forward(params, stream, norm, gate, experts, axis)[0]


@array_types.on_common_mesh
def _forward(params, stream, norm, gate, experts, axis):
    run = partial(_shard, norm, gate, experts, axis.name)
    weights = {name: WeightOfExperts.forward(merged(params[name])) for name in WEIGHTS}
    of_experts = {name: w.scale_of_experts for name, w in weights.items()}
    if axis.spread:
        split = axis.split(params | weights)
        run = axis.over_devices(run, stream.x, (axis.params, axis.tokens), axis.tokens)
        y, shares, residuals = run(split, stream.x)
    else:
        y, shares, residuals = over_shards(partial(run, params | weights), stream)
    return (stream.with_array(y), shares), (params, of_experts, *residuals)


def _shard(norm, gate, experts, axis_name, params, x):
    """Computes a layer of experts on one shard of the tokens, x [b, s, h].

    The weights of experts among `params` are `WeightOfExperts`, as in `_shard_grads`.

    Returns:
      The outputs [b, s, h], the experts' `Shares`, and the residuals.
    """
    flat = x.reshape(-1, x.shape[-1])
    h, groups = norm.forward(flat, params["norm"])
    logits = normed_logits(norm, flat, params["norm"], params["router"])
    ids = chosen_experts(logits, experts, params["router_bias"])
    weights, shares = routed(logits, ids, experts)
    # The gate's backward kernel reads rows after the last expert's.
    rows = sorted_rows(ids, experts, axis_name, padding=BLOCK)
    h_rows = jax.tree.map(rows.of_tokens, h)
    y = forward_product(h_rows, params["gate_up"], rows, x.dtype)
    y = y.reshape(len(y), 2, -1)
    out = kernels.gated(y, activation=gate, scale="row", keep_groups=True)
    of_rows = rows.of_choices(weights)
    relative, _ = by_group(of_rows, rows.sizes)
    product_scale = out.scale * relative
    a = Scaled(out.values, out.scale * of_rows)
    y = forward_product(a, params["down"], rows, x.dtype)
    y = rows.sums(y, flat, x.dtype).reshape(x.shape)
    inner = out.groups, out.largest_scale
    h_scale, a_scale = tensor_scales(h, a._replace(scale=product_scale))
    routing = ids, logits, rows.saved
    scales = rows.common(h_scale)[None], a_scale[None]
    return y, shares, (groups, inner, routing, scales)


@array_types.on_common_mesh
def _backward(norm, gate, experts, axis, residuals, cotangents):
    run = partial(_shard_grads, norm, gate, experts, axis.name)
    params, of_experts, *saved = residuals
    weights = {
        name: WeightOfExperts.backward(merged(params[name]), scale)
        for name, scale in of_experts.items()
    }
    residuals = params | weights, *saved
    if not axis.spread:
        return _grads_by_shards(run, residuals, cotangents)
    return axis.backward(run, residuals, cotangents)


@by_shards(False, True, True, True, True)
def _grads_by_shards(run, residuals, cotangents):
    return run(residuals, cotangents)


def _shard_grads(norm, gate, experts, axis_name, residuals, cotangents):
    """Computes the gradients of the parameters and the stream, from one shard's tokens.

    The gradients of the parameters are still to be summed over shards.
    """
    params, groups, (inner, inner_scale), (ids, logits, saved), scales = residuals
    (h_scale,), (a_scale,) = scales
    dy, dshares = cotangents
    rows = restored(saved, ids.shape, experts, axis_name, padding=BLOCK)
    flat, dy_scale = dy.x.reshape(-1, dy.x.shape[-1]), rows.common(dy.scale)
    codes = quantize_tensor(flat, E5M2, copies="row", scale=dy_scale).row
    gradient = Scaled(rows.of_tokens(codes), dy_scale)
    da, da_maxima = input_gradient(
        gradient, params["down"], rows, flat.dtype, keep_maxima=True
    )
    (weights, _), of_logits = jax.vjp(lambda x: routed(x, ids, experts), logits)
    relative, of_expert = by_group(rows.of_choices(weights), rows.sizes)
    bounds = inner_scale, da_maxima
    scale, inner_grads = grouped_gate_gradient(
        inner, da, bounds, relative, rows.sizes, a_scale, gate
    )
    a = Scaled(inner_grads.product, a_scale * of_expert)
    transposed = kernels.grouped_transpose(gradient.codes, rows.sizes)
    gradient = Scaled(transposed, dy_scale)
    d_down = weight_gradient(gradient, a, rows, params["down"].dtype)
    (dlogits,) = of_logits((rows.to_choices(inner_grads.weights), dshares))
    dh_router, d_router = logits_gradient(
        norm, _numbers(groups, flat.dtype), params["norm"], params["router"], dlogits
    )
    gate_up = params["gate_up"].scaled(of_expert)
    d_gate_up = Scaled(inner_grads.values.reshape(len(da), -1), scale)
    dh = input_gradient(d_gate_up, gate_up, rows, flat.dtype)
    dh = rows.sums(dh, dh_router, flat.dtype)
    h = kernels.norm(
        groups, params["norm"], kind=norm.kind, eps=norm.eps, scale=h_scale
    )
    h = Scaled(rows.transposed(h.y), h_scale)
    d_gate_up = Scaled(inner_grads.transposed, scale * of_expert)
    dw = weight_gradient(d_gate_up, h, rows, gate_up.dtype)
    dx, dnorm, _ = norm.backward(groups, dh, params["norm"], None, flat, False)
    bias = params["router_bias"]
    grads = {
        "norm": dnorm,
        "router": d_router,
        "router_bias": None if bias is None else jnp.zeros_like(bias),
        "gate_up": dw.reshape(len(dw), 2, -1, dw.shape[-1]),
        "down": d_down,
    }
    return grads, dx._replace(x=dx.x.reshape(dy.x.shape))


_segment.defvjp(_forward, _backward)


def _numbers(groups: Scaled, dtype: DTypeLike) -> Float[Array, "..."]:
    """Dequantizes groups to bfloat16 if that is `dtype`, and otherwise to float32."""
    # XLA fuses the reference implementation, unlike a kernel, with its readers.
    return kernels.dequantize_groups(
        groups, dtype=stored(dtype), group=GROUP, implementation="reference"
    )
