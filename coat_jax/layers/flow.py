"""The FP8 precision flow: segments of a layer with backward passes that read FP8.

The flow follows COAT (arXiv 2410.19313, section 5). The input of a norm or a gate is
quantized once, in groups of 16, and saved. The backward pass reads this copy, and
recomputes the outputs of norms and gates and the angles of RoPE. Attention saves its
inputs and its output.

Forward matmuls take E4M3 codes, with per-token scales of activations and one scale per
output feature of weights. In backward matmuls every operand has a per-tensor scale, and
gradients are E5M2. The residual stream is not quantized. It passes through
`attention_in`, so that the kernel of the norm's gradient adds the stream's gradient.

Each matmul quantizes its weights when it runs, in the layout that it needs. Only one
scale per weight is saved between the passes. Weights can also be `Fp8Weight`s, which
are quantized beforehand.

Scales are computed just in time by default. The scale of the stream's gradient is
computed by the operation that computes the gradient, so between segments the stream is
a `Stream`, which carries the scale. On a mesh there is one scale for each shard of the
batch; see `coat_jax.layers.shards`. If the parameters of a segment hold `amax`, the
scales of gradients are delayed. `amax` has an amax history for each quantized gradient:
`qkv_grad` is the history for the output of the matmul with the weight `qkv`. The
gradient of a history is the history of the next step.
"""

from collections.abc import Mapping
from functools import partial

import jax
from jaxtyping import Array, Float

import pallas_kernels as kernels
from coat_jax.fp8.fused import gate_gradient
from coat_jax.fp8.matmul import (
    Weight,
    input_gradient,
    product,
    product_heads,
    quantize_tensor,
    quantize_tokens,
    tensor_scales,
    weight_gradient,
)
from coat_jax.layers.context import ContextParallel
from coat_jax.layers.parts import Heads, Norm, Stream
from coat_jax.layers.shards import by_shards
from coat_jax.meshes import on_explicit_tokens
from coat_jax.quantization.delayed import recorded, spread
from coat_jax.quantization.formats import E4M3
from pallas_kernels import Activation, Codes, Scaled
from pallas_kernels.dispatch import array_types, exchange

Params = Mapping[str, Weight | None]
Amax = Mapping[str, Float[Array, " length"]]


def attention_in(
    params: Params, stream: Stream, norm: Norm, heads: Heads, keep_copies: bool = False
) -> tuple[Array, Array, Array, tuple[Array, ...], Array]:
    """Computes queries, keys and values: `norm(x) @ qkv.T`, then RoPE.

    x is the array of `stream`. `params` holds `norm` [h] or None, and `qkv` [m, h].

    With `keep_copies` the matmul writes queries, keys and values twice, and attention
    saves the second copies for its backward pass. In a loop over layers the kernel
    writes these copies directly to their place in the stack of residuals. Without them,
    the arrays that attention reads would have to be copied there. The copies have no
    gradients.

    Returns:
      Queries, keys, values, the tuple of their copies, and the residual stream.
    """

    def segment(params, stream):
        return _attention_segment(params, stream, norm, heads, keep_copies)

    results = 2, 2, 2, (2,) * (3 * keep_copies), stream.tokens()
    run = on_explicit_tokens(segment, stream.x, results)
    return run(_with_histories(params, stream), stream)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _attention_segment(params, stream, norm, heads, keep_copies):
    # Nothing is saved if nothing is differentiated, so the copies need no arrays.
    (q, k, v, _, stream), _ = _attention_in(params, stream, norm, heads, False)
    return q, k, v, (q, k, v) if keep_copies else (), stream


@array_types.on_common_mesh
def _attention_in(params, stream, norm, heads, keep_copies):
    x = stream.x
    h, groups = norm.forward(x, params["norm"])
    starts = heads.starts(x)
    (q, k, v, *kept), w = product_heads(
        h,
        params["qkv"],
        x.dtype,
        heads.angles(x.shape[1], starts),
        heads.num_kv_heads,
        keep_copies=keep_copies,
    )
    starts = None if heads.context is None else starts
    residuals = params, groups, *tensor_scales(h, w), starts
    return (q, k, v, tuple(kept), stream), residuals


# Devices may sum this segment's weight gradients while they compute the gradients of
# the layer that backward reaches next.
@by_shards(False, True, False, False, True, known=False)
def _attention_in_grads(norm, heads, keep_copies, residuals, cotangents):
    params, groups, scale, w_scale, starts = residuals
    amax = params.get("amax", {})
    *dheads, _, (dx, _, token) = cotangents
    if token is not None:
        scale = scale + token  # Other segments' gradients are added up by now.
    history, start = amax.get("qkv_grad"), 0 if starts is None else starts
    gradient = heads.gradient(*dheads, history=history, start=start)
    # `after` delays the quantization of the weights until attention's backward pass is
    # over. XLA could quantize them earlier, and their codes would take memory. Devices
    # that gather the codes do it during attention's backward pass.
    after = gradient.transposed if token is None else dx
    dh = input_gradient(gradient, params["qkv"], w_scale, dx.dtype, after)
    delayed = "amax" in params
    dx, dnorm, h = norm.backward(groups, dh, params["norm"], scale, dx, delayed)
    grads = {
        "norm": dnorm,
        "qkv": weight_gradient(h, scale, gradient, params["qkv"]),
        "amax": _recorded(amax, qkv_grad=gradient),
    }
    return {name: grads.get(name) for name in params}, dx


_attention_segment.defvjp(_attention_in, _attention_in_grads)


def attention_out(
    params: Params,
    o: Float[Array, "b s n d"],
    stream: Stream,
    context: ContextParallel | None = None,
) -> Stream:
    """Computes `x + o @ out.T` for attention's output `o`.

    x is the array of `stream`. `params` holds `out` [h, n * d]. The backward pass reads
    `o`, which attention saves anyway for its own backward pass. With a context `o`
    comes from `ContextParallel.attend`, and its heads are sharded. Devices exchange `o`
    before the matmul, and again in the backward pass.
    """

    def segment(params, o, stream):
        return _out_segment(params, o, stream, context)

    run = on_explicit_tokens(segment, stream.x, stream.tokens())
    return run(_with_histories(params, stream), o, stream)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _out_segment(params, o, stream, context):
    return _attention_out(params, o, stream, context)[0]


def _attention_out(params, o, stream, context):
    params, o, stream = array_types.with_common_mesh((params, o, stream))
    rows = quantize_tokens(joined(o if context is None else context.to_rows(o)))
    y, w = product(rows, params["out"], stream.x.dtype, stream.x)
    return stream.with_array(y), (params, o, *tensor_scales(rows, w))


def _attention_out_grads(context, residuals, dy):
    if context is None:
        return _out_grads(residuals, dy)
    params, o, *scales = residuals
    grads, do, dy = _out_grads((params, context.to_rows(o), *scales), dy)
    return grads, context.to_heads(do), dy


@by_shards(False, True, False, False)
def _out_grads(residuals, dy):
    params, o, scale, w_scale = residuals
    amax = params.get("amax", {})
    gradient = dy.codes(amax.get("out_grad"))
    if dy.token is not None:
        scale = scale + dy.token  # The gradients of the MLP are added up by now.
    codes = quantize_tensor(joined(o), E4M3, copies="transposed", scale=scale)
    grads = {
        "out": weight_gradient(codes.transposed, scale, gradient, params["out"]),
        "amax": _recorded(amax, out_grad=gradient),
    }
    after = None if dy.token is None else gradient.row
    do = input_gradient(gradient, params["out"], w_scale, o.dtype, after)
    return {name: grads.get(name) for name in params}, do.reshape(o.shape), dy


_out_segment.defvjp(_attention_out, _attention_out_grads)


def gated_mlp(params: Params, stream: Stream, norm: Norm, gate: Activation) -> Stream:
    """Computes `x + (act(g) * u) @ down.T`, the gated MLP on the residual stream.

    x is the array of `stream`, and act is the activation that `gate` names. g and u are
    the two halves of `norm(x) @ gate_up.T`.

    Args:
      params: The parameters: `norm` [h] or None, `gate_up` [2, f, h], and `down`
        [h, f].
      stream: The residual stream.
      norm: The norm of the input.
      gate: The name of the activation.

    Returns:
      The residual stream after the MLP.
    """

    def segment(params, stream):
        return _mlp_segment(params, stream, norm, gate)

    run = on_explicit_tokens(segment, stream.x, stream.tokens())
    return run(_with_histories(params, stream), stream)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _mlp_segment(params, stream, norm, gate):
    return _gated_mlp(params, stream, norm, gate)[0]


@array_types.on_common_mesh
def _gated_mlp(params, stream, norm, gate):
    x = stream.x
    h, groups = norm.forward(x, params["norm"])
    y, gate_up = product(h, params["gate_up"], x.dtype)
    y = y.reshape(*y.shape[:-1], 2, -1)
    out = kernels.gated(y, activation=gate, scale="row", keep_groups=True)
    a = Scaled(out.values, out.scale)
    after = None if stream.token is None else y
    y, down = product(a, params["down"], x.dtype, x, after=after)
    if stream.token is not None:
        # Only backward reads per-tensor scales. Devices exchange the amax for them
        # after they have gathered the codes of the weights.
        a = a._replace(scale=exchange.ready(a.scale, y))
    scales = tensor_scales(h, a, gate_up, down)
    inner = out.groups, out.largest_scale
    return stream.with_array(y), (params, groups, inner, scales)


@by_shards(False, True, True, False)
def _gated_mlp_grads(norm, gate, residuals, dy):
    params, groups, (inner_groups, largest_scale), scales = residuals
    h_scale, a_scale, gate_up_scale, down_scale = scales
    amax = params.get("amax", {})
    gradient, dy = dy.codes(amax.get("down_grad")), dy.x
    da, da_maxima = input_gradient(
        gradient, params["down"], down_scale, dy.dtype, keep_maxima=True
    )
    history = amax.get("gate_up_grad")
    inner, a = gate_gradient(
        inner_groups, largest_scale, da, da_maxima, gate, a_scale, history
    )
    # `after` delays the quantization of the weights until `da` is freed and the codes
    # of the gradient of gate and up are transposed. The codes of the weights then live
    # for this matmul only, and the matmul of the weight gradient can follow at once.
    # Devices that gather the codes do it while the gate's gradient is computed.
    after = inner.transposed if array_types.mesh_of(da) is None else da
    dh = input_gradient(inner, params["gate_up"], gate_up_scale, dy.dtype, after)
    delayed = "amax" in params
    dx, dnorm, h = norm.backward(groups, dh, params["norm"], h_scale, dy, delayed)
    grads = {
        "norm": dnorm,
        "gate_up": weight_gradient(h, h_scale, inner, params["gate_up"]),
        "down": weight_gradient(a, a_scale, gradient, params["down"]),
        "amax": _recorded(amax, gate_up_grad=inner, down_grad=gradient),
    }
    return {name: grads.get(name) for name in params}, dx


_mlp_segment.defvjp(_gated_mlp, _gated_mlp_grads)


def _with_histories(params: Params, stream: Stream) -> Params:
    """Returns `params` with amax histories that vary over devices like the stream.

    Arrays vary over devices only within `shard_map`; see `spread`.
    """
    if "amax" not in params:
        return params
    return {**params, "amax": spread(params["amax"], stream.x)}


def _recorded(amax: Amax, **quantized: Codes) -> Amax:
    """Returns the amax histories, each with the new amax of its gradient put in front.

    `quantized` has the codes of each gradient, by the name of its history.
    """
    return {name: recorded(amax[name], quantized[name].largest) for name in amax}


def joined(o: Float[Array, "b s n d"]) -> Float[Array, "b s m"]:
    """Merges all heads of a position into one vector of m = n * d elements."""
    return o.reshape(*o.shape[:2], -1)
