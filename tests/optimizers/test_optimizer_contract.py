"""Tests that FP8 Adam keeps optax's contract, as optax tests its own optimizers."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.marks import slow_except
from helpers.optimizers import (
    FP8,
    SHAPE,
    assert_same_bits,
    assert_trees_equal,
    every_optimizer,
    gradients,
    run,
)

import coat_jax as coat


@pytest.mark.parametrize("make", slow_except([coat.fp8_adamw], FP8.values()), ids=FP8)
def test_updates_and_state_keep_their_types_and_compile_once(make):
    dtypes = [jnp.float16, jnp.bfloat16, jnp.float32]
    shapes = [(shape, dtype) for shape in (SHAPE, (3,)) for dtype in dtypes]
    params, tx = [jnp.ones(*which) for which in shapes], make(1e-2)
    traced = []

    @jax.jit
    def step(params, state, skip):
        traced.append(1)
        grads = jax.tree.map(lambda p: jnp.square(p) / 2, params)
        return jax.lax.cond(
            skip, lambda: (grads, state), lambda: tx.update(grads, state, params)
        )

    state = tx.init(params)
    for skip in (False, True, False):
        updates, after = step(params, state, skip)
        assert [u.dtype for u in updates] == dtypes * 2
        assert jax.eval_shape(lambda s: s, after) == jax.eval_shape(lambda s: s, state)
        state = after
    assert traced == [1]


def test_parameters_that_step_together_promote_no_ranks():
    params, tx = {name: jnp.ones(SHAPE) for name in "ab"}, coat.fp8_adamw(1e-2)
    with jax.numpy_rank_promotion("raise"):
        jax.eval_shape(tx.update, params, tx.init(params), params)


def test_extra_arguments_are_passed_by():
    extra = {"value": 1.0, "not_expected": 2}
    params, grads = jnp.ones(SHAPE), jnp.asarray(gradients(0))
    for tx in (
        coat.fp8_adamw(1e-2),
        optax.with_extra_args_support(coat.scale_by_fp8_adam()),
        optax.chain(coat.scale_by_fp8_adam(), optax.scale(-1.0)),
    ):
        state, update = tx.init(params), jax.jit(tx.update)
        with_extra = update(grads, state, params, **extra)
        assert_same_bits(with_extra, update(grads, state, params))


def test_parameters_are_needed_for_weight_decay_only():
    grads, tx = jnp.asarray(gradients(0)), coat.scale_by_fp8_adam()
    state = tx.init(jnp.ones(SHAPE))
    assert_same_bits(tx.update(grads, state), tx.update(grads, state, jnp.ones(SHAPE)))
    decaying = coat.fp8_adamw(1e-2)
    with pytest.raises(ValueError, match="params"):
        decaying.update(grads, decaying.init(jnp.ones(SHAPE)))


@every_optimizer
@pytest.mark.parametrize(
    "params", [{}, (), {"w": None, "b": np.float32(1)}, np.float32(2), 0.5]
)
def test_trees_without_leaves_with_none_and_scalars(make, params):
    grads = jax.tree.map(jnp.ones_like, params)
    tx = make(1e-1)
    updates, state = tx.update(grads, tx.init(params), params)
    decay = 1e-4 if make is coat.fp8_adamw else 0.0
    expected = optax.adamw(1e-1, weight_decay=decay)
    theirs, _ = expected.update(grads, expected.init(params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert_trees_equal(updates, theirs)
    assert state[0].count == 1


def test_none_beside_quantized_leaves():
    params = {"w": jnp.ones(SHAPE), "none": None, "empty": {}}
    grads = {"w": jnp.asarray(gradients(0)), "none": None, "empty": {}}
    tx = coat.fp8_adamw(1e-2)
    after, _, state = run(tx, params, [grads, grads], jit=True)
    alone = {"w": params["w"]}
    expected, _, _ = run(tx, alone, [{"w": grads["w"]}] * 2, jit=True)
    assert_trees_equal(after["w"], expected["w"])
    assert state[0].mu["none"] is None
    assert jax.tree.structure(coat.to_optax_state(state)[0].mu) == jax.tree.structure(
        params
    )


def test_the_state_is_a_scan_carry_and_vmaps():
    tx, grads = coat.fp8_adamw(1e-2), jnp.stack([gradients(i) for i in range(3)])

    def train(start, grads):
        def step(carry, g):
            updates, state = tx.update(g, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        return jax.lax.scan(step, (start, tx.init(start)), grads)[0]

    first, state = jax.jit(train)(jnp.ones(SHAPE), grads)
    several = jax.vmap(train, in_axes=(0, None))
    both, states = jax.jit(several)(jnp.stack([jnp.ones(SHAPE)] * 2), grads)
    for i in range(2):
        np.testing.assert_allclose(both[i], first, rtol=1e-5)
    assert states[0].mu.codes.shape == (2, *SHAPE)
    expected, _, _ = run(tx, jnp.ones(SHAPE), list(grads), jit=True)
    np.testing.assert_allclose(first, expected, rtol=1e-5)
    assert state[0].count == 3


def test_the_factories_sign_as_optax_does():
    """Positional arguments of optax.adamw have the same names and places."""

    def positional(fn):
        kinds = inspect.signature(fn).parameters.values()
        return [p.name for p in kinds if p.kind is p.POSITIONAL_OR_KEYWORD]

    ours, theirs = positional(coat.fp8_adamw), positional(optax.adamw)
    assert ours == theirs
    partial = functools.partial(coat.fp8_adamw, b1=0.8)
    assert isinstance(partial(1e-3), optax.GradientTransformation)


@pytest.mark.parametrize("by", ["gradients", "state"])
@pytest.mark.parametrize(
    "make",
    [coat.fp8_adamw, lambda rate: coat.with_quantized_state(optax.adam(rate))],
    ids=["fp8_adamw", "with_quantized_state"],
)
def test_steps_refuse_derivatives_that_codes_would_lose(make, by):
    tx, params = make(1e-2), jnp.ones(SHAPE)
    state, grads = tx.init(params), jnp.asarray(gradients(0))

    def loss(scale):
        after = tx.update(scale * grads, state, params)[1]
        updates, _ = tx.update(grads, after, params)
        return updates.sum()

    def of_step(scale):
        return tx.update(scale * grads, state, params)[0].sum()

    with pytest.raises(NotImplementedError, match="moments in 8 bits"):
        jax.grad(loss if by == "state" else of_step)(1.0)


def test_steps_in_float32_have_derivatives():
    options = {"eps": 1e-4, "weight_decay": 0.0}
    mine = coat.fp8_adamw(1e-2, quantize_mask=False, **options)
    theirs = optax.adamw(1e-2, **options)

    def loss(scale, tx):
        params, state = jnp.ones(SHAPE), tx.init(jnp.ones(SHAPE))
        for seed in range(2):
            grads = scale * jnp.asarray(gradients(seed)) + params
            updates, state = tx.update(grads, state, params)
            params += updates
        return jnp.square(params).sum()

    actual, expected = (jax.grad(loss)(0.5, tx) for tx in (mine, theirs))
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize("b2", [0.0, 0.1])
def test_a_small_b2_needs_the_first_moment_itself(b2):
    with pytest.raises(ValueError, match=r"b2 must be at least 0\.2 .* got 0\."):
        coat.fp8_adamw(1e-3, b2=b2)
    coat.fp8_adamw(1e-3, b2=b2, normalize_mu=False)
