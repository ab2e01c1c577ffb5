"""Trees, steps and distances that tests of `coat.fused_update` share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import coat_jax as coat
from helpers.optimizers import gradients

BF16, F32 = jnp.bfloat16, jnp.float32
SHAPE = (40, 264)  # Large enough to be quantized, with a short last group.
SHAPES = {"w": SHAPE, "wide": SHAPE, "nested": [(6, 40), {"b": (7,), "s": ()}]}


ADAMW = coat.fp8_adamw(1e-2)
WITHOUT_DECAY = coat.fp8_adamw(1e-3, weight_decay=0.0)


def some(leaves: dict) -> dict:
    return {name: leaves[name] for name in ("w", "wide")}


def is_shape(node) -> bool:
    return isinstance(node, tuple)


def tree(seed: int, dtype=F32):
    """Returns a tree of numbers of many magnitudes; the leaf `wide` is float32."""
    rng = np.random.default_rng(seed)

    def values(path, shape):
        of_case = F32 if path[0].key == "wide" else dtype
        return jnp.asarray(gradients(rng.integers(1 << 30), shape), of_case)

    return jax.tree_util.tree_map_with_path(values, SHAPES, is_leaf=is_shape)


def grown(params):
    """Returns parameters of magnitudes 1 to 2, which steps of tests cannot cancel."""
    return jax.tree.map(
        lambda p: (jnp.sign(p) + p / (jnp.max(jnp.abs(p)) + 1)).astype(p.dtype), params
    )


@functools.cache
def jitted(tx):
    return jax.jit(functools.partial(coat.fused_update, tx))


def fused(tx, params, grads, state=None, **key):
    """Returns the parameters and the state after one fused step for each gradient."""
    state = tx.init(params) if state is None else state
    for g in grads:
        params, state = jitted(tx)(g, state, params, **key)
    return params, state


def chained(tx, params, grads):
    @jax.jit
    def step(g, state, params):
        updates, state = tx.update(g, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for g in grads:
        params, state = step(g, state, params)
    return params, state


def steps(x) -> np.ndarray:
    """Maps floats to integers in their order, so that neighbours differ by one."""
    x = np.asarray(x)
    bits = x.view({1: np.int8, 2: np.int16, 4: np.int32}[x.itemsize]).astype(np.int64)
    return np.where(bits < 0, -(bits & ((1 << (8 * x.itemsize - 1)) - 1)), bits)


def distance(a, b) -> np.ndarray:
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    return np.abs(steps(a) - steps(b))


def assert_close_states(actual, expected):
    """Asserts equal containers and nearly equal leaves.

    A few codes at rounding boundaries may fall to either side. The two paths compute a
    stored ratio in another order. XLA also rounds shared operations differently in
    different programs, for instance x / c as x * (1 / c).
    """
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if a.dtype == F32:
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-30)
        elif a.dtype.itemsize < 4:
            # If the scale or the exponent of a group differs, all its codes may differ.
            assert np.mean(steps(a) != steps(b)) < 5e-3
        else:
            np.testing.assert_array_equal(a, b)
