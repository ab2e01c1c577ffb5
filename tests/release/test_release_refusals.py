"""Tests what `coat.value_and_update` refuses, skips and clips."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.released import (
    after,
    assert_same_tree_bits,
    assert_steps_equal,
    loss_of,
    ordinary,
    parameters,
    tokens,
    unrolled,
)

import coat_jax as coat

SCANNED, UNROLLED = loss_of(coat.scan_layers), loss_of(unrolled)


def step_of(tx, loss=SCANNED, *, stacked=True, **options):
    """Traces a step; nothing is computed."""
    params = parameters(stacked=stacked)
    step = coat.value_and_update(loss, tx, **options)
    return jax.eval_shape(step, params, jax.eval_shape(tx.init, params), tokens())


def chained(*before):
    return optax.chain(*before, coat.fp8_adamw(1e-3))


COUPLED = {
    "global norm": (lambda: chained(optax.clip_by_global_norm(1.0)), "max_norm"),
    "finite": (lambda: optax.apply_if_finite(chained(), 3), "skip_not_finite"),
    "steps": (lambda: optax.MultiSteps(chained(), 2), "larger batch"),
    "steps, chained": (
        lambda: optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
        "larger batch",
    ),
    "steps within a chain": (
        lambda: optax.chain(
            optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
            optax.scale(1.0),
        ),
        "larger batch",
    ),
    "update norm": (
        lambda: chained(optax.normalize_by_update_norm()),
        "depends on the gradient of",
    ),
}


@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "unrolled"])
def test_steps_that_read_all_gradients_are_refused(stacked, name):
    make, match = COUPLED[name]
    tx = make()
    if isinstance(tx, optax.MultiSteps):
        tx = optax.GradientTransformation(tx.init, tx.update)
    with pytest.raises(ValueError, match=match):
        step_of(tx, SCANNED if stacked else UNROLLED, stacked=stacked)


NORMS = {
    "lamb": lambda: optax.lamb(1e-3),
    "lars": lambda: optax.lars(1e-3),
    "muon": lambda: optax.contrib.muon(1e-3),
    "block rms": lambda: optax.chain(optax.clip_by_block_rms(1e-3), optax.sgd(0.1)),
    "adaptive": lambda: optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=8),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_of_whole_stacks_are_refused(name):
    with pytest.raises(ValueError, match=r"mixes layers|has no axis|belongs to no"):
        step_of(NORMS[name]())


@pytest.mark.parametrize("name", ["lamb", "block rms"])
def test_norms_of_unrolled_parameters_step(name):
    assert_steps_equal(UNROLLED, NORMS[name](), parameters(stacked=False), tokens())


def test_a_parameter_is_read_in_one_place():
    def twice(params, tokens):
        def run(fn, x, layers):
            return coat.scan_layers(fn, coat.scan_layers(fn, x, layers), layers)

        return loss_of(run)(params, tokens)

    def beside(params, tokens):
        decay = sum(jnp.sum(p**2) for p in jax.tree.leaves(params["layers"]))
        return SCANNED(params, tokens) + decay.astype(jnp.float32)

    def shared(params, tokens):
        first = [params["layers"][0]]
        return loss_of(unrolled)(params | {"layers": first * 2}, tokens)

    for loss, stacked in ((twice, True), (beside, True), (shared, False)):
        with pytest.raises(ValueError, match=r"is read by .* and by .* one place"):
            step_of(optax.adam(1e-3), loss, stacked=stacked)


def test_a_parameter_may_be_read_twice_without_a_gradient():
    def loss(params, tokens):
        norm = optax.tree.norm(jax.lax.stop_gradient(params))
        return SCANNED(params, tokens) + 0 * norm

    assert_steps_equal(loss, optax.adam(1e-3), parameters(stacked=True), tokens())


def test_bad_arguments_are_named():
    with pytest.raises(TypeError, match="tx must be an optax transformation, got 3"):
        coat.value_and_update(SCANNED, 3)
    with pytest.raises(ValueError, match="max_norm must be a positive number, got -1"):
        coat.value_and_update(SCANNED, optax.sgd(1.0), max_norm=-1)
    with pytest.raises(ValueError, match="return_norms needs max_norm"):
        coat.value_and_update(SCANNED, optax.sgd(1.0), return_norms=True)
    params = {"w": jnp.ones(3), "count": jnp.arange(3)}
    step = coat.value_and_update(lambda p: p["w"].sum(), optax.sgd(1.0))
    with pytest.raises(TypeError, match=r"\['count'\] must be floating, got int32"):
        step(params, optax.sgd(1.0).init(params))
    params = {"w": jnp.ones(3)}
    with pytest.raises(ValueError, match="key is for the stochastic rounding"):
        step(params, optax.sgd(1.0).init(params), key=jax.random.key(0))
    tx, bf16 = optax.adam(1e-3), {"w": jnp.ones(3, jnp.bfloat16)}
    state = optax.tree.map_params(tx, lambda m: m.astype(jnp.float16), tx.init(bf16))
    step = coat.value_and_update(lambda p: p["w"].sum().astype(jnp.float32), tx)
    with pytest.raises(ValueError, match=r"state of params\['w'\] from float16"):
        step(bf16, state)


@pytest.mark.parametrize(
    "stacked", [{}, {"a": jnp.ones(())}, {"a": jnp.ones((2, 3)), "b": jnp.ones(3)}]
)
def test_stacks_need_one_axis_of_layers(stacked):
    with pytest.raises(ValueError, match="one leading axis of layers"):
        coat.scan_layers(lambda p, x: x, jnp.ones(3), stacked)


def test_layers_that_lax_scan_hides_give_a_warning():
    def loss(params, tokens):
        def run(fn, x, layers):
            return jax.lax.scan(lambda x, p: (fn(p, x), None), x, layers)[0]

        return loss_of(run)(params, tokens)

    params = parameters(stacked=True)
    large = jax.tree.map(lambda p: p, params)
    large["layers"] = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct((100, *p.shape[1:]), p.dtype), params["layers"]
    )
    tx = optax.sgd(0.1)
    step = coat.value_and_update(loss, tx)
    with pytest.warns(UserWarning, match=r"\['layers'\]\['a'\].*coat.scan_layers"):
        jax.eval_shape(step, large, tx.init(params), tokens())
    jax.eval_shape(coat.value_and_update(SCANNED, tx), large, tx.init(params), tokens())
    assert_steps_equal(loss, tx, params, tokens())


# --- Clipping by the global norm, and steps that are skipped. ---
def clipped(limit, tx):
    return optax.chain(optax.clip_by_global_norm(limit), tx)


@pytest.mark.parametrize(
    ("stacked", "limit"), [(True, 1e6), (True, 0.01), (False, 0.01)]
)
def test_a_limited_norm_has_the_bits_of_optaxs_clipping(stacked, limit):
    params, tx = parameters(stacked=stacked), optax.sgd(1.0)
    loss = SCANNED if stacked else UNROLLED
    chain = clipped(limit, tx)
    one = {"steps": 1}
    expected = after(ordinary(loss, chain), params, chain.init(params), tokens(), **one)
    step = coat.value_and_update(loss, tx, max_norm=limit)
    actual = after(step, params, tx.init(params), tokens(), **one)
    for a, b in zip(
        jax.tree.leaves(actual[1]), jax.tree.leaves(expected[1]), strict=True
    ):
        # The norm is a sum in another order, which may round a gradient differently.
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=2**-7, atol=1e-4)
        assert np.mean(a != b) < 0.01


@pytest.mark.parametrize(("stacked", "max_norm"), [(False, None), (True, 1.0)])
def test_steps_that_are_not_finite_change_no_bit(stacked, max_norm):
    loss, params = (SCANNED, UNROLLED)[not stacked], parameters(stacked=stacked)
    tx = optax.adamw(1e-2)
    step = coat.value_and_update(loss, tx, max_norm=max_norm, skip_not_finite=True)
    state = tx.init(params)
    bad = params | {"embedding": params["embedding"].at[tokens()[0, 0]].set(jnp.nan)}
    value, *same = jax.jit(step)(bad, state, tokens())
    assert np.isnan(value)
    assert_same_tree_bits(same, [bad, state])
    good = coat.value_and_update(loss, tx, max_norm=max_norm)
    expected, actual = (after(s, params, state, tokens()) for s in (good, step))
    assert_same_tree_bits(actual, expected)


def test_a_gradient_that_is_not_finite_is_skipped_if_there_is_a_norm():
    """Its loss is finite: the derivative of a root at zero is not."""

    def loss(params, tokens):
        zero = params["unread"][0, 0] - params["unread"][0, 0]
        return SCANNED(params, tokens) + jnp.sqrt(zero).astype(jnp.float32)

    params, tx = parameters(stacked=True), optax.adamw(1e-2)
    step = coat.value_and_update(loss, tx, max_norm=1.0, skip_not_finite=True)
    value, *same = jax.jit(step)(params, tx.init(params), tokens())
    assert np.isfinite(value)
    assert_same_tree_bits(same, [params, tx.init(params)])


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "unrolled"])
def test_norms_are_those_of_the_gradients(stacked):
    loss, params = (SCANNED, UNROLLED)[not stacked], parameters(stacked=stacked)
    tx = optax.sgd(0.1)
    step = coat.value_and_update(loss, tx, max_norm=0.1, return_norms=True)
    *_, norms = jax.jit(step)(params, tx.init(params), tokens())
    grads = jax.jit(jax.grad(loss))(params, tokens())
    expected = jax.tree.map(
        lambda g: np.linalg.norm(np.asarray(g, np.float64).reshape(-1)), grads
    )
    assert jax.tree.structure(norms) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(norms), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3)


def test_steps_above_a_loss_are_skipped():
    params, tx = parameters(stacked=True), optax.adamw(1e-2)
    step = jax.jit(coat.value_and_update(SCANNED, tx, skip_not_finite=True))
    value, *new = step(params, tx.init(params), tokens(), max_loss=100.0)
    _, *same = step(params, tx.init(params), tokens(), max_loss=value * 0.99)
    assert_same_tree_bits(same, [params, tx.init(params)])
    _, *expected = step(params, tx.init(params), tokens())
    assert_same_tree_bits(new, expected)
