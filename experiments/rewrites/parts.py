"""Norms, activations, gates, weights and biases, in many spellings and as near misses.

A near miss is similar to a pattern that the library rewrites, but computes something
else.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from experiments.rewrites.grammar import Draw, Maker, Step, fixed, pure
from experiments.rewrites.points import clipped, constrained, point, straight_through


def _mean(x):
    return jnp.mean(x, axis=-1, keepdims=True)


def _rms(x, eps):
    return x * lax.rsqrt(_mean(x * x) + eps)


def _layer(x, eps):
    x = x - _mean(x)
    return x / jnp.sqrt(_mean(jnp.square(x)) + eps)


def _stopped(x, eps):
    return x * lax.stop_gradient(lax.rsqrt(_mean(x * x) + eps))


def _in_halves(x, eps):
    halves = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
    return _rms(halves, eps).reshape(x.shape)


_ruled = jax.custom_vjp(_rms, nondiff_argnums=(1,))
_ruled.defvjp(lambda x, eps: (_rms(x, eps), None), lambda eps, _, g: (g,))

STANDARDS = {
    "rms": _rms,
    "rms, divided": lambda x, eps: x / jnp.sqrt(_mean(jnp.square(x)) + eps),
    "rms, power": lambda x, eps: x * lax.rsqrt(jnp.mean(x**2, -1)[..., None] + eps),
    "rms of sums": lambda x, eps: (
        x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) / x.shape[-1] + eps)
    ),
    "rms, marked inside": lambda x, eps: x * lax.rsqrt(constrained(_mean(x * x)) + eps),
    "layer": _layer,
    "layer, var": lambda x, eps: (
        (x - _mean(x)) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + eps)
    ),
    "layer, at once": lambda x, eps: (
        (x - _mean(x)) * lax.rsqrt(_mean(x * x) - _mean(x) ** 2 + eps)
    ),
    "layer of rms": lambda x, eps: _layer(_rms(x, eps), eps),
    "norm with a rule": _ruled,
    # Near misses.
    "eps outside": lambda x, eps: x / (jnp.sqrt(_mean(x * x)) + eps),
    "in halves": _in_halves,
    "length": lambda x, eps: 8 * x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + eps),
    "mean of others": lambda x, eps: x * lax.rsqrt(_mean(x * x)[::-1] + eps),
    "stopped statistic": _stopped,
    "uncentered": lambda x, eps: x * lax.rsqrt(jnp.var(x, -1, keepdims=True) + eps),
    "unbiased": lambda x, eps: (
        (x - _mean(x)) * lax.rsqrt(jnp.var(x, -1, keepdims=True, ddof=1) + eps)
    ),
    "read twice": lambda x, eps: _rms(x, eps) + 0.1 * jnp.sin(x),
}


def norm(draw: Draw) -> Step:
    """Draws a norm, its precision, its scale and bias, and operations around it."""
    if draw.chance(0.15):
        return _flax_norm(draw)
    name = draw.random.choice(list(STANDARDS))
    draw.elements.append(name)
    standard, eps = STANDARDS[name], draw.random.choice([1e-6, 1e-5, 0.1, 1.0])
    wide, early = draw.chance(0.8), draw.chance(0.3)
    on_input, between, after = point(draw, 0.15), point(draw, 0.1), point(draw, 0.15)
    affine = _affine(draw)
    through_jit = draw.chance(0.2)

    def step(env, x):
        x = on_input(env, x)
        dtype = jnp.float32 if wide else x.dtype
        fn = jax.jit(standard, static_argnums=1) if through_jit else standard
        y = fn(x.astype(dtype), eps)
        y = between(env, y.astype(env.dtype) if early else y)
        return after(env, affine(env, y).astype(env.dtype))

    return step


def _affine(draw: Draw) -> Step:
    scale, bias = (draw.parameter(draw.width, kind=kind) for kind in ("scale", "bias"))
    forms = {
        "no scale": lambda s, b, y: y,
        "scale": lambda s, b, y: y * s,
        "scale plus one": lambda s, b, y: y * (1 + s),
        "scale and bias": lambda s, b, y: y * s + b,
        "bias": lambda s, b, y: b + y,
        "frozen scale": lambda s, b, y: y * lax.stop_gradient(s) + b,
        "scale of two": lambda s, b, y: y * s * b,
        "one scale": lambda s, b, y: y * s[0],
        "row of scales": lambda s, b, y: y * s.reshape(1, -1) - b,
        "scale minus bias": lambda s, b, y: (y - b) * s,
        "scale twice": lambda s, b, y: y * s + s,
    }
    name = draw.random.choice(list(forms))
    draw.elements.append(name)
    form = forms[name]
    return lambda env, y: form(env.params[scale], env.params[bias], y)


def _flax_norm(draw: Draw) -> Step:
    scale, bias = (draw.parameter(draw.width, kind=kind) for kind in ("scale", "bias"))
    layer = draw.chance(0.5)
    draw.elements.append("flax LayerNorm" if layer else "flax RMSNorm")
    on_input = point(draw)

    def step(env, x):
        params = {"scale": env.params[scale]}
        params |= {"bias": env.params[bias]} if layer else {}
        module = (nn.LayerNorm if layer else nn.RMSNorm)(dtype=env.dtype)
        return module.apply({"params": params}, on_input(env, x))

    return step


@jax.custom_jvp
def _silu_with_rule(x):
    return jax.nn.silu(x)


@_silu_with_rule.defjvp
def _(primals, tangents):
    return _silu_with_rule(*primals), tangents[0]


ACTIVATIONS = {
    "silu": jax.nn.silu,
    "silu, written": lambda x: jax.nn.sigmoid(x) * x,
    "silu, divided": lambda x: x / (1 + jnp.exp(-x)),
    "silu, jitted": jax.jit(lambda x: jax.nn.silu(x)),
    "silu, widened": lambda x: jax.nn.silu(x.astype(jnp.float32)).astype(x.dtype),
    "gelu": jax.nn.gelu,
    "gelu exact": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu, jitted clip": jax.jit(lambda x: jax.nn.gelu(clipped(x))),
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
    # Near misses.
    "half silu": lambda x: jax.nn.silu(x) * 0.5,
    "quick gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "silu plus one": lambda x: jax.nn.silu(x) + 1,
    "silu of negative": lambda x: jax.nn.silu(-x),
    "silu twice": lambda x: jax.nn.silu(jax.nn.silu(x)),
    "silu with a rule": _silu_with_rule,
    "silu with a rule, jitted": jax.jit(_silu_with_rule),
    "silu and itself": lambda x: jax.nn.silu(x) + 0.1 * x,
    "squared relu": lambda x: jnp.square(jax.nn.relu(x)),
    "stopped gate": lambda x: x * lax.stop_gradient(jax.nn.sigmoid(x)),
    "straight through silu": lambda x: straight_through(jax.nn.silu(x)),
}


def activation(draw: Draw) -> Step:
    """Draws an activation, sometimes with operations before and after it."""
    name = draw.random.choice(list(ACTIVATIONS))
    draw.elements.append(name)
    fn, on_input, after = ACTIVATIONS[name], point(draw, 0.15), point(draw, 0.15)
    return lambda env, x: after(env, fn(on_input(env, x)))


GATES = {
    "gate": lambda act, g, u: act(g) * u,
    "gate on the right": lambda act, g, u: u * act(g),
    "gate widened": lambda act, g, u: (
        act(g.astype(jnp.float32)) * u.astype(jnp.float32)
    ).astype(g.dtype),
    # Near misses.
    "gate of both": lambda act, g, u: act(g) * jax.nn.silu(u),
    "gate halved": lambda act, g, u: act(g) * u / 2,
    "gate plus one": lambda act, g, u: act(g) * (u + 1),
    "gate read twice": lambda act, g, u: act(g) * u + 0.1 * g,
    "gate of itself": lambda act, g, u: act(g) * g + 0.1 * u,
    "gate of a sum": lambda act, g, u: act(g + u) * u,
    "gate squared": lambda act, g, u: act(g) * u * u / 4,
    "gate with a factor read twice": lambda act, g, u: act(g) * u + jnp.sin(u),
}
WEIGHTS = {
    "weight": lambda w: w,
    "transposed weight": jnp.transpose,
    "widened weight": lambda w: w.astype(jnp.float32).astype(w.dtype),
    "tanh of a weight": lambda w: jnp.tanh(w),
    "centered weight": lambda w: w - jnp.mean(w, axis=0, keepdims=True),
    "stopped weight": lax.stop_gradient,
    "reversed weight": lambda w: w[::-1],
    "weight, read twice": lambda w: w + 0.1 * w[::-1],
    "clipped weight": clipped,
    "low rank": lambda w: w + w[:, :8] @ w[:8] / 4,
}
BIASES: dict[str, Maker] = {
    "no bias": pure(lambda y: y),
    **{
        name: lambda draw, form=form: _bias(draw, form)
        for name, form in {
            "bias": lambda y, b: y + b.astype(y.dtype),
            "bias on the left": lambda y, b: b.astype(y.dtype) + y,
            "bias in rows": lambda y, b: y + b.reshape(1, -1).astype(y.dtype),
            "bias repeated": lambda y, b: y + jnp.broadcast_to(b, y.shape),
            "bias twice": lambda y, b: y + b + b,
            "bias derived": lambda y, b: y + jnp.flip(jnp.tanh(b)).astype(y.dtype),
            "bias subtracted": lambda y, b: y - b,
            "bias of one number": lambda y, b: y + b[0],
            "bias stopped": lambda y, b: y + lax.stop_gradient(b),
            "bias after a clip": lambda y, b: clipped(y) + b,
            "bias before a clip": lambda y, b: clipped(y + b),
            "bias, result read twice": lambda y, b: y + b + 0.1 * jnp.sin(y),
        }.items()
    },
    "bias of a constant": pure(lambda y: y + jnp.arange(y.shape[-1], dtype=y.dtype)),
    "number added": pure(lambda y: y + 1.0),
    "index added": fixed(lambda env, y: y + jnp.max(env.numbers, initial=0) % 2),
}


def _bias(draw: Draw, form) -> Step:
    name = draw.parameter(draw.width, kind="bias")
    return lambda env, y: form(y, env.params[name])
