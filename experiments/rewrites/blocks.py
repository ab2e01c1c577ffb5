"""Blocks of random programs: matmuls, operations around them, and calls of blocks."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from experiments.rewrites.grammar import WIDTH, Draw, Maker, Step
from experiments.rewrites.parts import BIASES, GATES, WEIGHTS, activation, norm
from experiments.rewrites.points import clipped, point


def product(draw: Draw, width: int | None = None) -> Step:
    """Draws a matmul and optionally a bias, each optionally followed by an operation.

    `width` is the last axis of the result, by default `draw.width`. `draw.width` is set
    to the last axis of the result.
    """
    form = draw.random.choice(["weight", *WEIGHTS] if draw.chance(0.5) else ["weight"])
    draw.elements.append(form)
    rows, columns = draw.width, width or draw.width
    is_transposed = form == "transposed weight"
    name = draw.parameter(*((columns, rows) if is_transposed else (rows, columns)))
    draw.width = columns
    multiply = _multiply(draw)
    after = point(draw, 0.1)
    bias = draw.one_of(BIASES) if draw.chance(0.5) else lambda env, y: y
    last = point(draw, 0.1)

    def step(env, x):
        w = WEIGHTS[form](env.params[name]).astype(env.dtype)
        return last(env, bias(env, after(env, multiply(env, x, w))))

    return step


def _multiply(draw: Draw):
    """Draws a form of the matmul of an array and a weight, and returns its function."""

    def plain(env, x, w):
        return env.dot(x, w, (((x.ndim - 1,), (0,)), ((), ())))

    def of_rows(env, x, w):
        y = plain(env, x.reshape(-1, x.shape[-1]), w)
        return y.reshape(*x.shape[:-1], w.shape[-1])

    def of_transposed(env, x, w):
        return env.dot(x, w.T, (((x.ndim - 1,), (1,)), ((), ())))

    def in_heads(env, x, w):
        y = plain(env, x, w.reshape(w.shape[0], 4, -1))
        return y.reshape(*x.shape[:-1], w.shape[-1])

    def of_heads(env, x, w):
        x = x.reshape(*x.shape[:-1], 4, x.shape[-1] // 4)
        w = w.reshape(4, -1, w.shape[-1])
        axes = (x.ndim - 2, x.ndim - 1), (0, 1)
        return env.dot(x, w, (axes, ((), ())))

    def weight_first(env, x, w):
        rows = x.reshape(-1, x.shape[-1])
        y = env.dot(w, rows, (((0,), (1,)), ((), ()))).T
        return y.reshape(*x.shape[:-1], w.shape[-1])

    def without_fp8(env, x, w):
        return jnp.matmul(x, w, precision="highest")

    forms = [of_rows, of_transposed, in_heads, of_heads, weight_first, without_fp8]
    form = draw.random.choice(forms) if draw.chance(0.35) else plain
    draw.elements.append(f"matmul {form.__name__.replace('_', ' ')}")
    return form


def _linear(draw: Draw) -> Step:
    return product(draw)


def _mlp(draw: Draw) -> Step:
    up = product(draw, draw.random.choice([128, 256]))
    act = activation(draw)
    down = product(draw, WIDTH)
    return lambda env, h: down(env, act(env, up(env, h)))


def _gated(draw: Draw) -> Step:
    width = draw.random.choice([128, 256])
    first = product(draw, width)
    draw.width = WIDTH
    second = product(draw, width)
    name = draw.random.choice(list(GATES))
    draw.elements.append(name)
    act, middle = activation(draw), point(draw, 0.15)
    down = product(draw, WIDTH)

    def step(env, h):
        a, b = first(env, h), second(env, h)
        return down(env, middle(env, GATES[name](lambda x: act(env, x), a, b)))

    return step


def _gated_at_once(draw: Draw) -> Step:
    both = product(draw, 256)
    draw.width = 128
    name = draw.random.choice(list(GATES))
    draw.elements.append(name)
    act = activation(draw)
    down = product(draw, WIDTH)

    def step(env, h):
        a, b = jnp.split(both(env, h), 2, axis=-1)
        return down(env, GATES[name](lambda x: act(env, x), a, b))

    return step


def _several(draw: Draw) -> Step:
    """Draws several matmuls of the same array, some with an activation."""
    branches = []
    for _ in range(draw.random.choice([2, 3, 4])):
        multiply = product(draw, WIDTH)
        branches.append((multiply, activation(draw) if draw.chance(0.5) else None))

    def step(env, h):
        results = [
            act(env, multiply(env, h)) if act else multiply(env, h)
            for multiply, act in branches
        ]
        return sum(results[1:], results[0]) / len(results)

    return step


def _attention(draw: Draw) -> Step:
    q, k, v, out = (product(draw, WIDTH) for _ in range(4))
    in_fp8 = draw.chance(0.3)
    at_heads = point(draw, 0.1)

    def step(env, h):
        rows = h.reshape(-1, 16, h.shape[-1])

        def heads(multiply):
            x = at_heads(env, multiply(env, rows))
            return x.reshape(*x.shape[:-1], 4, WIDTH // 4).swapaxes(1, 2)

        def dot(a, b, axis):
            numbers = (((3,), (axis,)), ((0, 1), (0, 1)))
            if in_fp8:
                return env.dot(a, b, numbers)
            return lax.dot_general(a, b, numbers, precision="highest")

        scores = dot(heads(q), heads(k), 3) / 32**0.5
        weights = env.softmax(scores.astype(jnp.float32)).astype(env.dtype)
        mixed = dot(weights, heads(v), 2).swapaxes(1, 2)
        return out(env, mixed.reshape(h.shape))

    return step


INNER: dict[str, Maker] = {
    "linear": _linear,
    "mlp": _mlp,
    "gated mlp": _gated,
    "gated mlp at once": _gated_at_once,
    "several matmuls": _several,
    "attention": _attention,
}
STREAMS = {
    "no stream": lambda h, n, y: y,
    "stream": lambda h, n, y: h + y,
    "stream on the right": lambda h, n, y: y + h,
    "stream, clipped result": lambda h, n, y: h + clipped(y),
    "stream, clipped": lambda h, n, y: clipped(h) + y,
    "stream twice": lambda h, n, y: (h + y + h) / 2,
    "stream, halved result": lambda h, n, y: h + y / 2,
    "stream less": lambda h, n, y: h - y,
    "stream of the norm": lambda h, n, y: n + y,
    "stream, result read twice": lambda h, n, y: h + y + 0.1 * jnp.sin(y),
    "stream stopped": lambda h, n, y: lax.stop_gradient(h) + y,
    "stream scaled": lambda h, n, y: 0.5 * h + y,
    "stream of both": lambda h, n, y: h + n + y,
    "stream reversed": lambda h, n, y: h[::-1] + y,
    "stream of a later sum": lambda h, n, y: (h + y) + 0.1 * jnp.tanh(h),
}


def block(draw: Draw) -> Step:
    """Draws a block: a norm or an operation, matmuls, and a kind of residual sum."""
    pre_norm = norm(draw) if draw.chance(0.7) else point(draw)
    inner = draw.one_of(INNER)
    name = draw.random.choice(list(STREAMS))
    if draw.chance(0.4):
        name = "stream"
    draw.elements.append(name)
    after = point(draw)

    def step(env, h):
        n = pre_norm(env, h)
        return after(env, STREAMS[name](h, n, inner(env, n)).astype(env.dtype))

    return step


# Ways to call a block: functions of the environment, of the block as a function of
# parameters, array and integers, and of the array.


def _called_twice(env, fn, h):
    jitted = jax.jit(fn)
    return jitted(env.params, jitted(env.params, h))


def _mapped(env, fn, h):
    entries = h.reshape(2, h.size // (2 * WIDTH), WIDTH)
    return jax.vmap(lambda h: fn(env.params, h))(entries).reshape(h.shape)


def _chosen(env, fn, h):
    is_even = jnp.sum(env.numbers) % 2 == 0
    return lax.cond(is_even, lambda h: fn(env.params, h), lambda h: h * 2, h)


def _with_rule(env, fn, h):
    def backward(saved, g):
        params, h, numbers = saved
        pullback = jax.vjp(lambda p, h: fn(p, h, numbers), params, h)[1]
        return *pullback(g / 2), None

    # Functions with a custom rule must not close over traced arrays.
    ruled = jax.custom_vjp(fn)
    ruled.defvjp(lambda *arrays: (fn(*arrays), arrays), backward)
    return ruled(dict(env.params), h, env.numbers)


def _gradient_inside(env, fn, h):
    # FP8 matmuls have no second derivatives.
    fixed = lax.stop_gradient(dict(env.params))
    summed = jax.grad(lambda h: jnp.sum(fn(fixed, h).astype(jnp.float32)))
    return fn(env.params, h) + 0.1 * summed(lax.stop_gradient(h))


def _calling(call: Callable[..., Array]) -> Maker:
    """Returns a maker of random blocks that the function `call` calls."""

    def make(draw: Draw) -> Step:
        inner = block(draw)

        def step(env, h):
            def fn(params, h, numbers=env.numbers):
                around = env.with_params(params)
                return inner(dataclasses.replace(around, numbers=numbers), h)

            return call(env, fn, h)

        return step

    return make


def _scanned(draw: Draw) -> Step:
    count = len(draw.shapes)
    inner = block(draw)
    names = list(draw.shapes)[count:]
    draw.shapes |= {name: (2, *draw.shapes[name]) for name in names}

    def step(env, h):
        def body(h, params):
            return inner(env.with_params(params), h), None

        return lax.scan(body, h, {name: env.params[name] for name in names})[0]

    return step


CALLS: dict[str, Maker] = {
    "called twice": _calling(_called_twice),
    "checkpoint": _calling(lambda env, fn, h: jax.checkpoint(fn)(env.params, h)),
    "cond of a block": _calling(_chosen),
    "gradient inside": _calling(_gradient_inside),
    "jit": _calling(lambda env, fn, h: jax.jit(lambda h: fn(env.params, h))(h)),
    "nested fp8_remat": _calling(lambda env, fn, h: env.remat(fn)(env.params, h)),
    "rule around a block": _calling(_with_rule),
    "scan": _scanned,
    "vmap": _calling(_mapped),
}


def called_block(draw: Draw) -> Step:
    """Draws a random block, sometimes inside one of `CALLS`."""
    return draw.one_of(CALLS) if draw.chance(0.4) else block(draw)
