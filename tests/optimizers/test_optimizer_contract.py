"""Tests that FP8 Adam keeps optax's contract, as optax tests its own optimizers."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.kernels import OPTIMIZED
from helpers.optimizers import (
    SHAPE,
    assert_same_bits,
    assert_trees_equal,
    every_optimizer,
    gradients,
    is_quantized,
    run,
    scaled,
)

import coat_jax as coat


def parabola(params):
    x, y = params
    return jnp.sum(jnp.square(x - 1)) + jnp.sum(jnp.square(y + 1)), (1.0, -1.0)


def rosenbrock(params):
    x, y = params
    return jnp.sum(jnp.square(1 - x) + 100 * jnp.square(y - x * x)), (1.0, 1.0)


def starts(seed: int) -> tuple:
    """Returns one start per element for x and y, enough elements for FP8."""
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.uniform(-1, 1, SHAPE), jnp.float32) for _ in "xy")


@pytest.mark.parametrize(
    ("make", "problem"), [(scaled, parabola), (coat.fp8_adamw, rosenbrock)]
)
def test_optimization(make, problem):
    params = starts(0)
    options = {"weight_decay": 0} if make is coat.fp8_adamw else {}
    tx = make(optax.cosine_decay_schedule(3e-1, 2000), **options)

    # Optimized compilation pays off over so many steps.
    @functools.partial(jax.jit, compiler_options=OPTIMIZED)
    def train(params, state):
        def step(carry, _):
            params, state = carry
            grads = jax.grad(lambda p: problem(p)[0])(params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, state), length=2000)[0]

    params, state = train(params, tx.init(params))
    for actual, expected in zip(params, problem(params)[1], strict=True):
        np.testing.assert_allclose(actual, expected, rtol=3e-2, atol=3e-2)
    assert is_quantized(state[0].mu[0])


@every_optimizer
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_updates_and_state_keep_their_types_and_compile_once(make, dtype):
    params, tx = [jnp.ones(SHAPE, dtype), jnp.ones((3,), dtype)], make(1e-2)
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
        assert [u.dtype for u in updates] == [dtype, dtype]
        assert jax.eval_shape(lambda s: s, after) == jax.eval_shape(lambda s: s, state)
        state = after
    assert traced == [1]


@pytest.mark.parametrize("extra", [{}, {"value": 1.0, "not_expected": 2}])
def test_extra_arguments_are_passed_by(extra):
    params, grads = jnp.ones(SHAPE), jnp.asarray(gradients(0))
    for tx in (
        coat.fp8_adamw(1e-2),
        optax.with_extra_args_support(coat.scale_by_fp8_adam()),
        optax.chain(coat.scale_by_fp8_adam(), optax.scale(-1.0)),
    ):
        state = tx.init(params)
        with_extra = tx.update(grads, state, params, **extra)
        assert_same_bits(with_extra, tx.update(grads, state, params))


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


def test_complex_parameters_are_refused():
    with pytest.raises(
        ValueError, match=r"must be real, got complex64 at parameter\['z'\]"
    ):
        coat.fp8_adamw(1e-2).init({"w": jnp.ones(3), "z": jnp.ones(3, jnp.complex64)})


def test_decay_is_masked_by_parameter():
    params = {"w": jnp.ones(SHAPE), "b": jnp.ones((8,))}
    zero = jax.tree.map(jnp.zeros_like, params)
    for mask in (
        {"w": True, "b": False},
        lambda p: jax.tree.map(lambda x: x.ndim > 1, p),
    ):
        tx = coat.fp8_adamw(0.1, weight_decay=0.5, mask=mask)
        _, updates, _ = run(tx, params, [zero])
        np.testing.assert_allclose(updates["w"], -0.05, rtol=1e-6)
        assert not np.any(updates["b"])


def test_schedules_scale_each_step():
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, 2, 6)
    grads, params = [jnp.asarray(gradients(i)) for i in range(4)], jnp.ones(SHAPE)
    tx, unit = coat.fp8_adamw(schedule, weight_decay=0.0), scaled(1.0)
    state, unit_state = tx.init(params), unit.init(params)
    for step, g in enumerate(grads):
        updates, state = tx.update(g, state, params)
        expected, unit_state = unit.update(g, unit_state, params)
        np.testing.assert_allclose(updates, schedule(step) * expected, rtol=1e-6)


def test_tree_utilities_find_the_moments():
    params = {"w": jnp.ones(SHAPE), "b": jnp.ones((8,))}
    tx = optax.chain(optax.clip_by_global_norm(1.0), coat.fp8_adamw(1e-3))
    state = tx.init(params)
    assert (
        optax.tree.get(state, "count", filtering=lambda path, _: "0" in str(path)) == 0
    )
    assert is_quantized(optax.tree.get(state, "nu")["w"])
    marked = optax.tree.map_params(tx, lambda m: "moment", state)
    assert marked[1][0].mu["b"] == marked[1][0].mu["w"].codes == "moment"
    assert marked[1][0].count == 0


@every_optimizer
def test_map_params_maps_moments_and_nothing_else(make):
    params = {"w": jnp.ones(SHAPE), "b": jnp.ones((8,))}
    tx = make(optax.constant_schedule(1e-2))
    state = tx.init(params)
    assert_same_bits(optax.tree.map_params(tx, lambda leaf: leaf, state), state)
    shapes = optax.tree.map_params(
        tx, lambda leaf: leaf.shape, state, transform_non_params=lambda _: "other"
    )
    assert shapes[0].count == "other"
    assert shapes[0].mu["b"] == (8,)
    assert shapes[0].nu["w"].codes == SHAPE
    specs = optax.tree.map_params(
        tx,
        lambda moment, spec: jax.tree.map(lambda _: spec, moment),
        state,
        {"w": "model", "b": "none"},
        is_leaf=is_quantized,
    )
    assert specs[0].nu["w"].scale == specs[0].nu["w"].codes == "model"
    assert specs[0].mu["b"] == "none"


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
    """Positional arguments of optax.adamw have the same places."""

    def positional(fn):
        kinds = inspect.signature(fn).parameters.values()
        return [p.name for p in kinds if p.kind is p.POSITIONAL_OR_KEYWORD]

    ours, theirs = positional(coat.fp8_adamw), positional(optax.adamw)
    assert ours == theirs
    partial = functools.partial(coat.fp8_adamw, b1=0.8)
    assert isinstance(partial(1e-3), optax.GradientTransformation)
