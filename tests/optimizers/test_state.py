"""Tests the conversion of FP8 Adam's states to optax.adamw's states and back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.marks import slow_except
from helpers.optimizers import (
    SHAPE,
    assert_same_bits,
    assert_trees_equal,
    either_scheme,
    gradients,
    is_quantized,
    run,
    run_on,
)

import coat_jax as coat


def tree_of(seed: int) -> dict:
    shapes = {"w": SHAPE, "deep": {"v": (72, 128)}, "b": (8,)}
    return jax.tree.map(
        lambda shape: jnp.asarray(gradients(seed, shape)),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


GRADS = [tree_of(seed) for seed in range(4)]
PARAMS = tree_of(99)
WRAPPERS = {
    "chain": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "masked": lambda tx: optax.masked(tx, {"w": True, "deep": False, "b": True}),
    "multi_steps": lambda tx: optax.MultiSteps(tx, every_k_schedule=2),
    "partition": lambda tx: optax.partition(
        {"a": tx, "b": optax.adam(1e-2)}, {"w": "a", "deep": "a", "b": "b"}
    ),
}
# A partition has masks in it.
_FAST = [WRAPPERS[name] for name in ("multi_steps", "partition")]
every_wrapper = pytest.mark.parametrize(
    "wrap", slow_except(_FAST, WRAPPERS.values()), ids=WRAPPERS.keys()
)


@functools.cache
def trained(wrap, normalize_mu: bool = True):
    """Returns an optimizer, its parameters and its state after four steps."""
    tx = wrap(coat.fp8_adamw(1e-2, normalize_mu=normalize_mu))
    params, _, state = run(tx, PARAMS, GRADS, jit=True)
    return tx, params, state


@every_wrapper
def test_optax_adamw_goes_on_from_a_converted_state(wrap):
    mine, params, state = trained(wrap)
    theirs = wrap(optax.adamw(1e-2))
    converted = coat.to_optax_state(state)
    assert jax.tree.structure(converted) == jax.tree.structure(theirs.init(PARAMS))
    dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(converted)}
    assert dtypes <= {"float32", "int32", "bool"}
    after, updates, _ = run_on(theirs, params, converted, GRADS[:2], jit=True)
    _, expected, _ = run_on(mine, params, state, GRADS[:2], jit=True)
    for a, b in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(a - b) <= 0.05 * np.linalg.norm(b)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))


@every_wrapper
def test_fp8_goes_on_from_optax_adamws_state(wrap):
    mine, theirs = wrap(coat.fp8_adamw(1e-2)), wrap(optax.adamw(1e-2))
    params, _, state = run(theirs, PARAMS, GRADS, jit=True)
    like = jax.eval_shape(mine.init, PARAMS)
    converted = coat.from_optax_state(state, like)
    assert jax.eval_shape(lambda s: s, converted) == like
    _, updates, _ = run_on(mine, params, converted, GRADS[:2], jit=True)
    _, expected, _ = run_on(theirs, params, state, GRADS[:2], jit=True)
    for a, b in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(a - b) <= 0.05 * np.linalg.norm(b)


@either_scheme
@every_wrapper
def test_there_and_back(wrap, normalize_mu):
    """Codes with a fixed k come back unchanged; a group's own k is computed again."""
    _, _, state = trained(wrap, normalize_mu)
    back = coat.from_optax_state(coat.to_optax_state(state), like=state)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    pairs = zip(
        jax.tree.leaves(back, is_leaf=is_quantized),
        jax.tree.leaves(state, is_leaf=is_quantized),
        strict=True,
    )
    for new, old in pairs:
        if not is_quantized(old):
            # The random bits of the rounding start anew.
            assert new.dtype == old.dtype == jnp.int32 or np.array_equal(new, old)
        elif old.exponent is None:
            np.testing.assert_array_equal(new.codes, old.codes)
            np.testing.assert_allclose(new.scale, old.scale, rtol=1e-5)
        else:
            assert_rounded_once_more(new, old)


def assert_rounded_once_more(new, old):
    """Asserts that most values stay and the rest moves by at most half an E4M3 step."""
    np.testing.assert_allclose(new.scale, old.scale, rtol=1e-5)
    ratio = np.asarray(new.dequantize() / old.dequantize())
    assert np.median(np.abs(ratio - 1)) < 1e-5
    root = 16 / np.minimum(new.exponent, old.exponent).astype(np.float64)
    root = np.repeat(root, 128, axis=-1)[..., : new.shape[-1]]
    assert np.all(np.abs(np.log2(ratio)) <= np.log2(1.28) * root + 1e-3)


def test_moments_themselves_are_converted():
    params, grads = jnp.ones(SHAPE), [jnp.asarray(gradients(i)) for i in range(3)]
    _, _, state = run(coat.scale_by_fp8_adam(), params, grads, jit=True)
    _, _, theirs = run(optax.scale_by_adam(), params, grads, jit=True)
    converted = coat.to_optax_state(state)
    assert isinstance(converted, optax.ScaleByAdamState)
    assert converted.count == theirs.count
    np.testing.assert_allclose(converted.nu, theirs.nu, rtol=0.4)
    close = np.isclose(converted.mu, theirs.mu, rtol=0.25, atol=1e-4)
    assert np.mean(close) > 0.99
    exact = coat.from_optax_state(theirs, state)
    np.testing.assert_allclose(exact.nu.dequantize(), theirs.nu, rtol=0.4)


@pytest.mark.parametrize(
    ("around", "tree"),
    [
        (lambda tx: optax.chain(optax.clip(1.0), tx), lambda state: state),
        (lambda tx: tx, lambda state: (PARAMS, state)),
        (lambda tx: optax.masked(tx, True), lambda state: {"a": state, "b": (1, 2)}),
    ],
    ids=["chain", "tuple", "masked"],
)
@pytest.mark.parametrize("make", [optax.adamw, optax.lion, optax.scale_by_adam])
def test_states_within_tuples_are_converted(make, around, tree):
    """The state of `optax.adamw` is a plain tuple, as the state of a chain is."""
    inner = make() if make is optax.scale_by_adam else make(1e-3)
    like = tree(around(coat.with_quantized_state(inner)).init(PARAMS))
    converted = coat.from_optax_state(tree(around(inner).init(PARAMS)), like)
    assert jax.eval_shape(lambda: converted) == jax.eval_shape(lambda: like)


def test_other_leaves_and_states_without_adam_stay():
    state = {"step": 3, "sgd": optax.sgd(1e-2, momentum=0.9).init(PARAMS)}
    assert_same_bits(coat.to_optax_state(state["sgd"]), state["sgd"])
    assert coat.from_optax_state(state, state)["step"] == 3


def test_bf16_first_moments_of_optax_are_taken():
    theirs = optax.adamw(1e-2, mu_dtype=jnp.bfloat16)
    _, _, state = run(theirs, PARAMS, GRADS[:2], jit=True)
    like = jax.eval_shape(coat.fp8_adamw(1e-2).init, PARAMS)
    assert jax.eval_shape(coat.from_optax_state, state, like) == like
    actual = coat.to_optax_state(coat.from_optax_state(state, like))
    assert_trees_equal(actual[0].mu["b"], state[0].mu["b"].astype(jnp.float32))


def test_states_of_several_models_are_converted():
    """Under `jax.vmap` the models' counts have an axis, too."""
    params = jax.tree.map(lambda *x: jnp.stack(x), *GRADS[:2])
    grads = jax.tree.map(lambda *x: jnp.stack(x), *GRADS[2:])
    theirs, tx = optax.adamw(1e-2), coat.fp8_adamw(1e-2)
    step = jax.jit(jax.vmap(theirs.update))
    state = step(grads, jax.jit(jax.vmap(theirs.init))(params), params)[1]
    like = jax.eval_shape(jax.vmap(tx.init), params)
    converted = coat.from_optax_state(state, like)
    assert jax.eval_shape(lambda: converted) == like
    updates, _ = jax.jit(jax.vmap(tx.update))(grads, converted, params)
    expected, _ = step(grads, state, params)
    for a, b in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(a - b) <= 0.05 * np.linalg.norm(b)


LION = functools.partial(coat.with_quantized_state, optax.lion(1e-2))
CHANGES = {
    "has rounding stochastic, but the optimizer has nearest": {"rounding": "nearest"},
    r"has granularity PerGroup.size=128., .* has PerGroup.size=64.": {
        "granularity": coat.PerGroup(64)
    },
    "has mu as E4M3, k = 3 over the root of nu, .* has E5M2": {"mu_format": coat.E5M2},
    "has mu as .* over the root of nu, .* has E4M3, own k": {"normalize_mu": False},
    "has nu as UE4M4, own k, .* has LOG8, own k": {"nu_format": coat.LOG8},
    "has mu as E4M3, k = 2, but the optimizer has None": {"moments": {"mu": None}},
}


@pytest.mark.parametrize(("message", "options"), CHANGES.items())
def test_options_of_a_state_change_by_conversion_alone(message, options):
    make = LION if "moments" in options else functools.partial(coat.fp8_adamw, 1e-2)
    state, tx = jax.eval_shape(make().init, PARAMS), make(**options)
    steps = [tx.update, functools.partial(coat.fused_update, tx)]
    for step in steps[: 1 if make is LION else 2]:
        with pytest.raises(ValueError, match=message):
            step(GRADS[0], state, PARAMS)
    like = jax.eval_shape(tx.init, PARAMS)

    def converted(state):
        return coat.from_optax_state(coat.to_optax_state(state), like)

    converted = jax.eval_shape(converted, state)
    after = jax.eval_shape(tx.update, GRADS[0], converted, PARAMS)[1]
    assert jax.tree.structure(after) == jax.tree.structure(like)


def mismatches():
    like = jax.eval_shape(coat.fp8_adamw(1e-2).init, PARAMS)
    adamw = optax.adamw(1e-2)
    fewer = {name: PARAMS[name] for name in ("w", "b")}
    wider = PARAMS | {"deep": {"v": jnp.ones((72, 256))}}
    other = PARAMS | {"deep": {"u": jnp.ones((72, 128))}}
    return {
        "state.0. has no .mu..deep....v.., which": (adamw.init(fewer), like),
        "state.0. has no .mu..deep....v..": (adamw.init(other), like),
        r"state.0..mu.'deep'..'v'. must have shape \(72, 128\), got \(72, 256\)": (
            adamw.init(wider),
            like,
        ),
        "state has .3., which `like` has not": (
            (*adamw.init(PARAMS), jnp.ones(3)),
            like,
        ),
        "state has no .0.": (optax.adamw(1e-2).init(PARAMS)[0], like),
        "state.0. must be an optax state, ScaleByAdamState, got QuantizedState": (
            coat.fp8_adamw(1e-2).init(PARAMS),
            like,
        ),
        "state must have the structure": (list(adamw.init(PARAMS)), like),
        "in FP8 already, and `like` is not there": (
            coat.fp8_adamw(1e-2).init(PARAMS),
            adamw.init(PARAMS),
        ),
        # The first state is in FP8 in both trees, and is not what differs.
        r"state has \[3\], which `like` has not": (
            (*coat.fp8_adamw(1e-2).init(PARAMS), jnp.ones(3)),
            like,
        ),
    }


@pytest.mark.parametrize("message", mismatches())
def test_a_state_that_does_not_fit_is_refused_by_name(message):
    with pytest.raises(ValueError, match=message):
        coat.from_optax_state(*mismatches()[message])
