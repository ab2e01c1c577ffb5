"""Tests FP8 Adam inside optax's combinators and wrappers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.marks import slow
from helpers.optimizers import (
    SHAPE,
    assert_same_bits,
    assert_trees_equal,
    every_optimizer,
    gradients,
    is_quantized,
    run,
    run_on,
    scaled,
)
from helpers.versions import as_pure, same_bits

import coat_jax as coat


@pytest.mark.parametrize(
    ("partition", "quantize_mask"),
    [
        (optax.partition, None),
        (optax.multi_transform, {"w": True, "v": False, "b": True}),
    ],
)
def test_partition_gives_each_its_own(partition, quantize_mask):
    params = {"w": jnp.ones(SHAPE), "v": jnp.ones(SHAPE), "b": jnp.ones((8,))}
    grads = jax.tree.map(lambda p: jnp.asarray(gradients(3, p.shape)), params)
    parts = {
        "fp8": coat.fp8_adamw(1e-2, quantize_mask=quantize_mask),
        "plain": optax.sgd(1.0),
    }
    tx = partition(parts, {"w": "fp8", "v": "plain", "b": "fp8"})
    _, updates, state = run(tx, params, [grads])
    for name in ("w", "b"):
        _, expected, _ = run(coat.fp8_adamw(1e-2), params[name], [grads[name]])
        np.testing.assert_allclose(updates[name], expected, rtol=1e-6)
    assert_trees_equal(updates["v"], -grads["v"])
    inner = state.inner_states["fp8"].inner_state[0]
    assert is_quantized(inner.mu["w"])
    assert isinstance(inner.mu["v"], optax.MaskedNode)


@every_optimizer
def test_functions_and_masks_pass_inject_hyperparams(make):
    """Functions that are no schedules must be in `static_args`, as in optax."""

    def biases_stay(params):
        return jax.tree.map(lambda p: p.ndim > 1, params)

    factory = coat.fp8_adamw if make is coat.fp8_adamw else coat.scale_by_fp8_adam
    options = {"quantize_mask": biases_stay, "b2": 0.95, "mu_format": coat.E5M2}
    static = ["quantize_mask"]
    if factory is coat.fp8_adamw:
        options |= {"mask": biases_stay, "learning_rate": 1e-2, "weight_decay": 0.1}
        static += ["mask"]
    params = {"w": jnp.ones(SHAPE), "b": jnp.ones((8192,))}
    grads = jax.tree.map(lambda p: jnp.asarray(gradients(0, p.shape)), params)
    injected = optax.inject_hyperparams(factory, static_args=static)(**options)
    _, updates, state = run(injected, params, [grads], jit=True)
    _, expected, inner = run(factory(**options), params, [grads], jit=True)
    np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-5)
    assert jax.tree.structure(state.inner_state) == jax.tree.structure(inner)
    assert state.hyperparams["b2"] == pytest.approx(0.95)
    assert "mask" not in state.hyperparams


@pytest.mark.parametrize("poison", [np.nan, -np.inf])
def test_a_non_finite_step_is_skipped_and_the_run_recovers_exactly(poison):
    good = [jnp.asarray(gradients(i)) for i in range(4)]
    bad = good[1].at[3, 7].set(poison)
    tx = optax.apply_if_finite(coat.fp8_adamw(1e-2), max_consecutive_errors=3)
    params = jnp.ones(SHAPE)
    after, _, state = run(tx, params, [*good[:2], bad, *good[2:]], jit=True)
    expected, _, clean = run(tx, params, good, jit=True)
    assert state.total_notfinite == 1
    assert_same_bits((after, state.inner_state), (expected, clean.inner_state))


@pytest.mark.parametrize(("poison", "normalize_mu"), [(np.nan, True), (np.inf, False)])
def test_without_apply_if_finite_the_group_is_lost(poison, normalize_mu):
    """optax.adamw loses one element; FP8 loses its group from the next step on."""
    good = [jnp.asarray(gradients(i)) for i in range(3)]
    bad = good[1].at[3, 7].set(poison)
    params = {"w": jnp.ones(SHAPE), "b": jnp.ones((8,))}
    grads = [{"w": g, "b": g[0, :8]} for g in (good[0], bad, good[2])]
    tx = coat.fp8_adamw(1e-2, normalize_mu=normalize_mu)
    clean, _, clean_state = run(
        tx, params, [{"w": g, "b": g[0, :8]} for g in good], jit=True
    )
    at_once, _, state = run(tx, params, grads[:2], jit=True)
    theirs, _, their_state = run(optax.adamw(1e-2), params, grads[:2], jit=True)
    element = np.zeros(SHAPE, bool)
    element[3, 7] = True
    np.testing.assert_array_equal(np.isnan(theirs["w"]), element)
    np.testing.assert_array_equal(np.isnan(at_once["w"]), element)

    later, _, state = run_on(tx, at_once, state, grads[2:], jit=True)
    theirs, _, _ = run_on(optax.adamw(1e-2), theirs, their_state, grads[2:], jit=True)
    group = np.zeros(SHAPE, bool)
    group[3, :128] = True
    np.testing.assert_array_equal(np.isnan(theirs["w"]), element)
    np.testing.assert_array_equal(np.isnan(later["w"]), group)
    # An infinite second moment is stored as a large one. The first moment carries the
    # NaN.
    for moment in ("nu", "mu") if np.isnan(poison) else ("mu",):
        actual = getattr(state[0], moment)["w"].dequantize()
        expected = getattr(clean_state[0], moment)["w"].dequantize()
        np.testing.assert_array_equal(np.isnan(actual), group)
    np.testing.assert_array_equal(actual[~group], expected[~group])
    for name, lost in (("w", group), ("b", np.zeros(8, bool))):
        np.testing.assert_array_equal(later[name][~lost], clean[name][~lost])


@pytest.mark.parametrize("size", [1e19, 3e38])
def test_a_finite_gradient_whose_square_overflows_spoils_nothing(size):
    """The element's update is optax's, and its neighbours stay finite."""
    good = [jnp.asarray(gradients(i)) for i in range(4)]
    grads = [good[0], good[1].at[3, 7].set(size), *good[2:]]
    params, tx, theirs = jnp.zeros(SHAPE), scaled(1e-2), optax.adam(1e-2)
    state, exact = tx.init(params), theirs.init(params)
    for g in grads:
        updates, state = jax.jit(tx.update)(g, state, params)
        expected, exact = theirs.update(g, exact, params)
        assert np.isfinite(updates).all()
    neighbours = np.asarray(updates)[3, 8:128] / np.asarray(expected)[3, 8:128]
    # The group spans 200 octaves, and adjacent codes are at most one octave apart.
    assert abs(np.median(neighbours) - 1) < 0.5
    np.testing.assert_allclose(updates[3, 7], expected[3, 7], rtol=0.1, atol=1e-6)
    assert size < 1e20 or expected[3, 7] == 0


@pytest.mark.parametrize("reset_state", [False, True])
def test_lookahead(reset_state):
    fast = coat.fp8_adamw(1e-2)
    tx = optax.lookahead(fast, 2, 0.5, reset_state=reset_state)
    start, grads = jnp.ones(SHAPE), [jnp.asarray(gradients(i)) for i in range(3)]
    params = optax.LookaheadParams.init_synced(start)
    state = tx.init(params)
    for g in grads[:2]:
        updates, state = tx.update(g, state, params)
        params = optax.apply_updates(params, updates)
    ahead, _, inner = run(fast, start, grads[:2])
    np.testing.assert_allclose(params.slow, (start + ahead) / 2, rtol=1e-6)
    np.testing.assert_allclose(params.fast, params.slow, rtol=1e-6)
    expected = fast.init(start) if reset_state else inner
    assert_same_bits(state.fast_state, expected)


@same_bits
@pytest.mark.parametrize(
    ("transform", "normalize_mu"), [slow(lambda fn: fn, True), (nnx.jit, False)]
)
def test_nnx_optimizers_do_as_the_transformation_does(transform, normalize_mu):
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), coat.fp8_adamw(1e-2, normalize_mu=normalize_mu)
    )
    model = nnx.Linear(128, 128, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    variables = jax.tree.map(jnp.cos, nnx.state(model, nnx.Param))
    params, grads = as_pure(nnx.state(model, nnx.Param)), as_pure(variables)
    state = tx.init(params)
    step = transform(lambda model, optimizer: optimizer.update(model, variables))
    update = jax.jit(tx.update) if transform is nnx.jit else tx.update
    for _ in range(3):
        step(model, optimizer)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    results = as_pure(optimizer.opt_state)
    assert jax.tree.structure(results) == jax.tree.structure(state)
    assert isinstance(results[1][0].mu["kernel"], coat.QuantizedArray)
    pairs = (results, state), (as_pure(nnx.state(model, nnx.Param)), params)
    for actual, expected in pairs:
        jax.tree.map(np.testing.assert_array_equal, actual, expected)
    names = {row["parameter"] for row in coat.moment_report(optimizer.opt_state).rows()}
    assert names == {"kernel"}


def test_states_of_variables_have_the_arrays_of_states_of_values():
    params = nnx.state(nnx.Linear(128, 128, rngs=nnx.Rngs(0)), nnx.Param)
    values = as_pure(params)
    tx = coat.fp8_adamw(1e-2, weight_decay=0.1)
    state, expected = tx.init(params), tx.init(values)
    step = jax.jit(functools.partial(coat.fused_update, tx, key=jax.random.key(0)))
    for _ in range(2):
        params, state = step(params, state, params)
        values, expected = step(values, expected, values)
    for actual, requested in ((params, values), (state, expected)):
        jax.tree.map(np.testing.assert_array_equal, as_pure(actual), requested)
    wide = coat.to_optax_state(state)
    assert isinstance(wide[0].nu["kernel"], nnx.Param)
    requested = coat.to_optax_state(expected)
    jax.tree.map(np.testing.assert_array_equal, as_pure(wide), requested)
    again = coat.from_optax_state(wide, state)
    assert jax.tree.structure(again) == jax.tree.structure(state)
