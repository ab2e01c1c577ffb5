"""Gradients, runs and comparisons that tests of the optimizer share."""

import jax
import numpy as np
import optax
import pytest

import coat_jax as coat

SHAPE = (64, 160)  # Above 8,192 elements, with a short last group.

either_scheme = pytest.mark.parametrize(
    "normalize_mu", [True, False], ids=["normalized", "coat"]
)


def scaled(learning_rate, **options):
    """Chains `scale_by_fp8_adam` with a learning rate."""
    return optax.chain(
        coat.scale_by_fp8_adam(**options), optax.scale_by_learning_rate(learning_rate)
    )


FP8 = {"fp8_adamw": coat.fp8_adamw, "scale_by_fp8_adam": scaled}
every_optimizer = pytest.mark.parametrize("make", FP8.values(), ids=FP8.keys())


def gradients(seed: int, shape=SHAPE) -> np.ndarray:
    rng = np.random.default_rng(seed)
    size = np.exp2(rng.uniform(-12, 0, shape))
    return (rng.standard_normal(shape) * size).astype(np.float32)


def run(tx, params, grads: list, jit: bool = False):
    """Returns parameters, updates of the last step and state after all gradients."""
    return run_on(tx, params, tx.init(params), grads, jit)


def run_on(tx, params, state, grads: list, jit: bool = False):
    """Runs as `run` does, from a given state."""
    update = jax.jit(tx.update) if jit else tx.update
    for g in grads:
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)
    return params, updates, state


def assert_trees_equal(actual, expected):
    """Asserts leaves of equal values and dtypes; containers may be of other types."""
    actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
    for a, b in zip(actual, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def assert_same_bits(actual, expected):
    """Asserts equal containers, static parts included, and all bits of the leaves."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def is_quantized(leaf) -> bool:
    return isinstance(leaf, coat.QuantizedArray)


def dequantized(tree):
    return jax.tree.map(
        lambda m: m.dequantize() if is_quantized(m) else m, tree, is_leaf=is_quantized
    )
