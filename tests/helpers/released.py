"""A small model and steps that tests of `coat.value_and_update` share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import coat_jax as coat
from coat_jax.optimizers.fused import NotFusedError

HIDDEN, INNER, VOCAB, LAYERS = 64, 128, 128, 3


def layer(p, x):
    mean = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    h = x * jax.lax.rsqrt(mean + 1e-6).astype(x.dtype) * p["norm"]
    return x + jax.nn.silu(h @ p["a"] + p["bias"]) @ p["b"]


def parameters(*, stacked: bool, dtype=jnp.bfloat16, seed: int = 0):
    """Returns parameters; each of `a` and `b` has 8,192 elements in a layer."""
    rng = np.random.default_rng(seed)

    def weight(*shape):
        return jnp.asarray(rng.standard_normal(shape) * 0.1, dtype)

    def one():
        return {
            "a": weight(HIDDEN, INNER),
            "b": weight(INNER, HIDDEN),
            "norm": jnp.ones(HIDDEN, dtype),
            "bias": weight(INNER),
        }

    layers = [one() for _ in range(LAYERS)]
    if stacked:
        layers = jax.tree.map(lambda *xs: jnp.stack(xs), *layers)
    return {
        "embedding": weight(VOCAB, HIDDEN),
        "layers": layers,
        "unread": weight(HIDDEN, INNER),
    }


def tokens(seed: int = 1):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(0, VOCAB, (4, 9)), jnp.int32)


def loss_of(run):
    """Returns the loss of a model with tied embeddings; `run` applies its layers."""

    def loss(params, tokens):
        x = params["embedding"][tokens[:, :-1]]
        x = run(layer, x, params["layers"])
        logits = (x @ params["embedding"].T).astype(jnp.float32)
        loss = optax.softmax_cross_entropy_with_integer_labels
        return jnp.mean(loss(logits, tokens[:, 1:]))

    return loss


def unrolled(fn, x, layers):
    for params in layers:
        x = coat.apply_layer(fn, x, params)
    return x


def ordinary(loss, tx):
    """Returns a step that computes all gradients first and then runs the optimizer."""

    def step(params, state, *args, key=None):
        value, grads = jax.value_and_grad(loss)(params, *args)
        try:
            new = coat.fused_update(tx, grads, state, params, key=key)
        except NotFusedError:
            updates, state = tx.update(grads, state, params)
            new = optax.apply_updates(params, updates), state
        return value, *new

    return step


def after(step, params, state, *args, steps: int = 2, **options):
    """Returns the last loss, parameters and state after some steps."""
    step = jax.jit(step)
    for _ in range(steps):
        value, params, state = step(params, state, *args, **options)
    return value, params, state


def assert_steps_equal(loss, tx, params, *args, steps: int = 2, **options):
    """Asserts that `coat.value_and_update` has all bits of the ordinary step."""
    state = tx.init(params)
    expected = after(ordinary(loss, tx), params, state, *args, steps=steps, **options)
    released = coat.value_and_update(loss, tx)
    actual = after(released, params, state, *args, steps=steps, **options)
    assert_same_tree_bits(actual, expected)


SCANNED, SGD = loss_of(coat.scan_layers), optax.sgd(0.1)


@functools.cache
def plain():
    """Returns loss, parameters and state after an ordinary step on scanned layers."""
    params = parameters(stacked=True)
    return after(ordinary(SCANNED, SGD), params, SGD.init(params), tokens(), steps=1)


def assert_step_is_plain(loss):
    """Asserts that a step of `coat.value_and_update` has the bits of `plain()`.

    The loss is another form of `SCANNED`, and may be a sum in another order.
    """
    params = parameters(stacked=True)
    step = coat.value_and_update(loss, SGD)
    actual = after(step, params, SGD.init(params), tokens(), steps=1)
    np.testing.assert_allclose(actual[0], plain()[0], rtol=1e-6)
    assert_same_tree_bits(actual[1:], plain()[1:])


def assert_same_tree_bits(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    leaves = jax.tree_util.tree_leaves_with_path(actual)
    for (path, a), b in zip(leaves, jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert a.tobytes() == b.tobytes(), jax.tree_util.keystr(path)
