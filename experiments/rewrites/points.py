"""Operations that can occur at any point of a program: marks, layouts, rules, effects.

All of them preserve the shape of their array. Marks (names, sharding constraints and
barriers) are transparent: a program saves as many bytes with them as without them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.rewrites.grammar import Draw, Maker, Step, fixed, pure

_FAR = 30.0  # A constant that is large compared with activations.


@jax.custom_vjp
def clipped(x):
    """Returns `x`; the backward pass clips the gradient to [-0.5, 0.5]."""
    return x * 1


clipped.defvjp(
    lambda x: (x * 1, None), lambda _, g: (jnp.clip(g, -0.5, 0.5).astype(g.dtype),)
)


@jax.custom_jvp
def straight_through(x):
    """Clips an array to [-2, 2]; the gradient passes unchanged."""
    return jnp.clip(x, -2.0, 2.0)


@straight_through.defjvp
def _(primals, tangents):
    return straight_through(*primals), tangents[0]


@jax.custom_vjp
def frozen_scale(x, scale):
    """Multiplies `x` by a scale; the gradient of the scale is zero."""
    return x * scale.astype(x.dtype)


frozen_scale.defvjp(
    lambda x, s: (frozen_scale(x, s), s),
    lambda s, g: (g * s.astype(g.dtype), jnp.zeros_like(s)),
)


def fp8_dot(x):
    """Doubles an array; the name is the name of one of the library's operations."""
    return 2 * x


def fused_matmul(x):
    """Halves an array; the name is the name of one of the library's operations."""
    return x / 2


@functools.cache
def _mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))


def constrained(x):
    """Returns `x` with a sharding constraint on a mesh of one device."""
    spec = P("data", *[None] * (x.ndim - 1))
    return lax.with_sharding_constraint(x, NamedSharding(_mesh(), spec))


def _mark(fn) -> Maker:
    return fixed(lambda env, x: fn(x) if env.marked else x)


MARKS: dict[str, Maker] = {
    "name": _mark(lambda x: checkpoint_name(x, "x")),
    "constraint": _mark(constrained),
    "barrier": _mark(lax.optimization_barrier),
}


def _barrier_of_two(draw: Draw) -> Step:
    name = draw.parameter(draw.width, kind="scale")

    def step(env, x):
        x, scale = lax.optimization_barrier((x, env.params[name]))
        return x * scale.astype(x.dtype)

    return step


def _batch_norm(draw: Draw) -> Step:
    name = draw.parameter(draw.width, kind="scale")
    rng = np.random.default_rng(draw.random.randrange(1000))
    mean, variance = rng.normal(size=draw.width), rng.uniform(0.5, 2, draw.width)

    def step(env, x):
        mean_, variance_ = (jnp.asarray(a, x.dtype) for a in (mean, variance))
        y = (x - mean_) / jnp.sqrt(variance_ + 1e-5)
        return y * env.params[name].astype(x.dtype)

    return step


def _in_fortran_order(x):
    return jnp.ravel(x.reshape(-1, x.shape[-1]), order="F").reshape(x.shape)


def _transposed_twice(x):
    y = jnp.sin(x.reshape(-1, x.shape[-1]).T)
    return y.T.reshape(x.shape)


def _halves_swapped(x):
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([b, a], axis=-1)


def _strided(x):
    return jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)


def _padded(x):
    widths = [(0, 0)] * (x.ndim - 1) + [(0, 16)]
    return jnp.pad(x[..., 16:], widths)


def _heads_reversed(x):
    return x.reshape(*x.shape[:-1], 4, x.shape[-1] // 4)[..., ::-1, :].reshape(x.shape)


def _heads_transposed(x):
    return jnp.swapaxes(x.reshape(*x.shape[:-1], 4, x.shape[-1] // 4), -1, -2).reshape(
        x.shape
    )


def _scaled(draw: Draw) -> Step:
    name = draw.parameter(draw.width, kind="scale")
    rule = draw.random.choice([lambda x, s: x * s.astype(x.dtype), frozen_scale])
    return lambda env, x: rule(x, env.params[name])


def _masked(env, x):
    numbers = env.numbers
    if x.ndim > 1 and numbers.size == np.prod(x.shape[:-1]):
        mask = numbers.reshape(*x.shape[:-1], 1) % 3 > 0
    else:
        mask = jnp.sum(numbers) >= 0
    return jnp.where(mask, x, x / 2)


def _chosen(env, x):
    is_even = jnp.sum(env.numbers) % 2 == 0
    return lax.cond(is_even, lambda x: x * 2, jnp.tanh, x)


def _beside_random(x):
    noise = lax.rng_uniform(jnp.float32(0), jnp.float32(1), x.shape)
    return jnp.where(noise < -1, 0, x).astype(x.dtype)


def _called_back(x):
    jax.debug.callback(lambda: None)
    return x


def _half_stopped(x):
    return (x + lax.stop_gradient(x)) / 2


POINTS: dict[str, Maker] = MARKS | {
    "barrier of two": _barrier_of_two,
    "batch norm": _batch_norm,
    "callback": pure(_called_back),
    "cast": fixed(lambda env, x: x.astype(jnp.float32).astype(env.dtype)),
    "clip": pure(clipped),
    "cond": fixed(_chosen),
    "far and back": pure(lambda x: (x + _FAR) - _FAR),
    "fortran order": pure(_in_fortran_order),
    "half stopped": pure(_half_stopped),
    "halves swapped": pure(_halves_swapped),
    "heads reversed": pure(_heads_reversed),
    "heads transposed": pure(_heads_transposed),
    "jitted clip": pure(jax.jit(lambda x: clipped(x) * 2)),
    "mask": fixed(_masked),
    "named fp8_dot": pure(jax.jit(fp8_dot)),
    "named fused_matmul": pure(jax.jit(fused_matmul)),
    "padded": pure(_padded),
    "random": pure(_beside_random),
    "read twice": pure(lambda x: x + jnp.roll(x, 1, -1) / 2),
    "reversed": pure(lambda x: lax.rev(x, (x.ndim - 1,))),
    "scaled": _scaled,
    "shifted": pure(lambda x: x - 0.5),
    "shifted far": pure(lambda x: (x - _FAR) * 0.1),
    "straight through": pure(straight_through),
    "straight through, jitted": pure(jax.jit(straight_through)),
    "strided": pure(_strided),
    "times a number": pure(lambda x: x * 0.7),
    "transposed twice": pure(_transposed_twice),
}


def point(draw: Draw, probability: float = 0.2) -> Step:
    """Draws an operation with a probability, and otherwise returns the identity."""
    if not draw.chance(probability):
        return lambda env, x: x
    # About half of the operations should be marks, which leave fusions as they are.
    return draw.one_of(MARKS if draw.chance(0.4) else POINTS)
