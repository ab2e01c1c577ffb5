"""Tests that `coat.fused_update` makes the chain's step in one pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.fused_steps import (
    ADAMW,
    BF16,
    F32,
    SHAPE,
    assert_close_states,
    chained,
    distance,
    fused,
    grown,
    jitted,
    some,
    tree,
)
from helpers.marks import slow
from helpers.optimizers import gradients, is_quantized

import coat_jax as coat


@pytest.mark.parametrize(
    ("normalize_mu", "nesterov"), [(True, False), slow(False, True)]
)
def test_the_step_is_adamws_from_the_stored_moments(normalize_mu, nesterov):
    """NumPy's AdamW in float64 from the state's stored moments gives the same step."""
    b1, b2, eps, eps_root, rate, decay = 0.8, 0.95, 1e-6, 1e-10, 1e-2, 0.3
    tx = coat.fp8_adamw(
        rate,
        b1,
        b2,
        eps,
        eps_root,
        weight_decay=decay,
        nesterov=nesterov,
        normalize_mu=normalize_mu,
    )
    params = grown(tree(0))
    state = tx.init(params)
    for count in range(1, 4):
        grads = tree(count)
        exact = coat.to_optax_state(state)[0]

        def step(p, g, m, v, t=count):
            p, g, m, v = (np.asarray(x, np.float64) for x in (p, g, m, v))
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            hat = m / (1 - b1**t)
            if nesterov:
                hat = b1 * m / (1 - b1 ** (t + 1)) + (1 - b1) * g / (1 - b1**t)
            update = hat / (np.sqrt(v / (1 - b2**t) + eps_root) + eps)
            return p - rate * (update + decay * p)

        expected = jax.tree.map(step, params, grads, exact.mu, exact.nu)
        params, state = fused(tx, params, [grads], state)
        assert state[0].count == count
        for p, e in zip(
            jax.tree.leaves(params), jax.tree.leaves(expected), strict=True
        ):
            np.testing.assert_allclose(p, e, rtol=3e-7)


@pytest.mark.parametrize("normalize_mu", [slow(False), True])
def test_states_are_the_chains(normalize_mu):
    tx = coat.fp8_adamw(1e-2, weight_decay=0.1, normalize_mu=normalize_mu)
    params, grads = grown(tree(0)), [tree(i) for i in (1, 2, 3)]
    _, state = fused(tx, params, grads)
    assert is_quantized(state[0].mu["w"])
    assert_close_states(state, chained(tx, params, grads)[1])


OPTIONS = {
    "learning_rate": optax.linear_schedule(1e-2, 1e-3, 3),
    "b2": 0.95,
    "eps_root": 1e-12,
    "weight_decay": 0.1,
    "mask": lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
}


def test_without_quantization_float32_is_optax_adamw():
    params, grads = grown(tree(0)), [tree(i) for i in (1, 2, 3)]
    after = fused(coat.fp8_adamw(**OPTIONS, quantize_mask=False), params, grads)
    expected, theirs = chained(optax.adamw(**OPTIONS), params, grads)
    for a, b in zip(jax.tree.leaves(after[0]), jax.tree.leaves(expected), strict=True):
        assert distance(a, b).max() <= 1
    state = coat.to_optax_state(after[1])
    assert_close_states(jax.tree.leaves(state), jax.tree.leaves(theirs))


@pytest.mark.parametrize("quantize_mask", [None, slow(False)])
def test_bfloat16_is_rounded_once(quantize_mask):
    """The result is the float32 step rounded once; optax rounds twice more."""
    tx = coat.fp8_adamw(1e-2, weight_decay=0.1, quantize_mask=quantize_mask)
    params, grads = some(grown(tree(0, BF16))), some(tree(1, BF16))
    after, state = fused(tx, params, [grads])
    wide = jax.tree.map(lambda x: x.astype(F32), (params, grads))
    exact, exact_state = fused(tx, wide[0], [wide[1]])
    assert_close_states(state, exact_state)
    chain, _ = chained(tx, params, [grads])
    leaves = map(jax.tree.leaves, (params, after, exact, chain))
    for p, a, e, c in zip(*leaves, strict=True):
        assert a.dtype == p.dtype
        nearest = np.asarray(e).astype(p.dtype)
        assert np.mean(distance(a, nearest) > 0) <= 2e-3
        assert distance(a, nearest).max() <= 1
        assert distance(a, c).max() <= 2


def test_gradients_and_parameters_of_other_dtypes():
    """Other dtypes take the same step; the kernel has no float16."""
    values, grads = 1 + np.abs(gradients(0, SHAPE)), gradients(1, SHAPE)
    dtypes = {"a": (BF16, F32), "b": (F32, BF16), "c": (jnp.float16, BF16)}
    dtypes |= {"d": (jnp.float8_e4m3fn, F32)}
    params = {name: jnp.asarray(values, kind) for name, (kind, _) in dtypes.items()}
    grads = {name: jnp.asarray(grads, kind) for name, (_, kind) in dtypes.items()}
    after, state = fused(ADAMW, params, [grads])
    wide = jax.tree.map(lambda x: x.astype(F32), (params, grads))
    exact, expected = fused(ADAMW, wide[0], [wide[1]])
    assert_close_states(state, expected)
    for name, (dtype, _) in dtypes.items():
        assert after[name].dtype == dtype
        nearest = np.asarray(exact[name]).astype(dtype)
        assert distance(after[name], nearest).max() <= 1


def test_float64_parameters_keep_their_bits():
    """A step of nothing leaves them as they are, and other steps are optax's."""
    with jax.enable_x64(True):
        wide = jnp.asarray(1 + 1e-12 * gradients(0, SHAPE).astype(np.float64))
        params = {"w": wide, "b": wide[0, :8]}
        grads = jax.tree.map(lambda p: jnp.ones(p.shape), params)
        after, _ = fused(coat.fp8_adamw(0.0), params, [grads])
        moved, _ = fused(coat.fp8_adamw(1e-2, weight_decay=0), params, [grads])
    arrays = map(jax.tree.leaves, jax.device_get((params, after, moved)))
    for p, same, new in zip(*arrays, strict=True):
        np.testing.assert_array_equal(same, p)
        np.testing.assert_allclose(new - new.ravel()[0], p - p.ravel()[0], atol=1e-15)
        np.testing.assert_allclose(new, p - 1e-2, rtol=1e-6)


def test_weight_decay_masks():
    """A step without gradients shrinks decayed parameters and leaves the others."""
    decayed = {"w": True, "wide": False, "nested": True}
    tx = coat.fp8_adamw(1e-2, weight_decay=0.5, mask=decayed)
    params = grown(tree(0))
    after, _ = fused(tx, params, [jax.tree.map(jnp.zeros_like, params)])
    for name, param in params.items():
        keep = 1 - 5e-3 if decayed[name] else 1.0
        leaves = jax.tree.leaves(after[name]), jax.tree.leaves(param)
        for a, p in zip(*leaves, strict=True):
            np.testing.assert_allclose(a, keep * p, rtol=2e-7 * decayed[name])


def test_injected_hyperparameters_are_read_back_and_may_be_changed():
    schedule = optax.linear_schedule(1e-2, 0.0, 4)
    injected = optax.inject_hyperparams(coat.fp8_adamw)(schedule, weight_decay=0.1)
    params, grads = some(grown(tree(0))), [some(tree(i)) for i in (1, 2)]
    after, state = fused(injected, params, grads)
    assert state.hyperparams["learning_rate"] == pytest.approx(7.5e-3)
    plain = coat.fp8_adamw(schedule, weight_decay=0.1)
    expected, inner = fused(plain, params, grads)
    assert jax.tree.structure(state.inner_state[0]) == jax.tree.structure(inner[0])
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)

    state = injected.init(params)
    state.hyperparams["weight_decay"] = jnp.float32(0.2)
    decayed, _ = fused(injected, params, grads[:1], state)
    state.hyperparams["weight_decay"] = jnp.float32(0)
    by_adam, _ = fused(injected, params, grads[:1], state)
    moved = decayed["w"] - by_adam["w"]
    np.testing.assert_allclose(moved, -2e-3 * params["w"], rtol=1e-3, atol=1e-6)


def test_clipping_before_it_and_frozen_parameters():
    params, grads = some(grown(tree(0))), some(tree(1))
    frozen = {"w": False, "wide": True}
    clip = optax.clip_by_global_norm(0.1)
    tx = optax.chain(clip, optax.selective_transform(ADAMW, freeze_mask=frozen))
    clipped, _ = clip.update(grads, optax.EmptyState())
    after, _ = fused(tx, params, [grads])
    np.testing.assert_array_equal(after["wide"], params["wide"])
    expected, _ = fused(ADAMW, params, [clipped])
    assert_close_states(after["w"], expected["w"])


def test_extra_arguments_reach_what_takes_them():
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=0)
    tx, params = optax.chain(plateau, coat.fp8_adamw(1e-2, eps=1.0)), jnp.ones(SHAPE)
    state = tx.init(params)
    for _ in range(3):
        params, state = jitted(tx)(params, state, params, value=1.0)
    assert float(state[0].scale) < 1


def test_masked_and_partition_leave_the_rest_to_others():
    params, grads = grown(tree(0)), tree(1)
    names = {"w": "fp8", "wide": "sgd", "nested": "fp8"}
    parts = {"fp8": ADAMW, "sgd": optax.sgd(0.5)}
    by_partition, state = fused(optax.partition(parts, names), params, [grads])
    masks = [{k: v == piece for k, v in names.items()} for piece in parts]
    masked = optax.chain(*map(optax.masked, parts.values(), masks))
    by_masks, _ = fused(masked, params, [grads])
    assert_close_states(by_partition, by_masks)
    np.testing.assert_allclose(
        by_masks["wide"], params["wide"] - 0.5 * grads["wide"], rtol=1e-6
    )
    mine = {name: params[name] for name in ("w", "nested")}
    alone, moments = fused(ADAMW, mine, [{name: grads[name] for name in mine}])
    assert_close_states({name: by_partition[name] for name in mine}, alone)
    inner = state.inner_states["fp8"].inner_state[0]
    assert_close_states(inner.nu["w"], moments[0].nu["w"])


FIRST = {"w": True, "b": False}
REFUSED = {
    "trace": optax.chain(ADAMW, optax.trace(0.9)),
    "scale": optax.chain(ADAMW, optax.scale(0.5)),
    "schedule": optax.chain(ADAMW, optax.scale_by_schedule(lambda count: 1.0)),
    "decay": optax.chain(ADAMW, optax.add_decayed_weights(0.1)),
    "clip": optax.chain(ADAMW, optax.clip(0.1)),
    "clip_by_global_norm": optax.chain(ADAMW, optax.clip_by_global_norm(0.1)),
    "zero_nans": optax.chain(ADAMW, optax.zero_nans()),
    "zero some": optax.chain(ADAMW, optax.masked(optax.set_to_zero(), FIRST)),
    "nonnegative": optax.chain(ADAMW, optax.keep_params_nonnegative()),
    "trust": optax.chain(ADAMW, optax.scale_by_trust_ratio()),
    "twice": optax.chain(ADAMW, ADAMW),
    "apply_if_finite": optax.apply_if_finite(ADAMW, 3),
    "conditionally": optax.conditionally_transform(ADAMW, lambda step: step > 0),
    "clip_by_block_rms": optax.chain(ADAMW, optax.clip_by_block_rms(1.0)),
    "plateau": optax.chain(ADAMW, optax.contrib.reduce_on_plateau()),
    "sam": optax.contrib.sam(ADAMW, optax.sgd(0.1)),
    "jit": optax.GradientTransformationExtraArgs(ADAMW.init, jax.jit(ADAMW.update)),
}


PARAMS = {"w": jnp.ones(SHAPE), "b": jnp.ones(8)}


@pytest.mark.parametrize("tx", REFUSED.values(), ids=REFUSED.keys())
def test_what_reads_its_updates_is_refused(tx):
    step, state = functools.partial(coat.fused_update, tx), tx.init(PARAMS)
    message = (
        r"something after or around it (reads its updates|fails: ).* Put fp8_adamw"
    )
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(step, PARAMS, state, PARAMS)


def test_errors_that_are_not_of_its_updates_stay_as_they_are():
    tx = optax.chain(optax.contrib.reduce_on_plateau(), ADAMW)
    with pytest.raises(TypeError, match="required keyword-only argument: 'value'"):
        coat.fused_update(tx, PARAMS, tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize("name", [slow("trace"), "apply_if_finite"])
def test_it_is_refused_without_jit_too(name):
    tx = REFUSED[name]
    with pytest.raises(ValueError, match=r"something after or around it reads its upd"):
        coat.fused_update(tx, PARAMS, tx.init(PARAMS), PARAMS)


UNASKED = {
    "adamw": optax.adamw(1e-2),
    "scale_by_fp8_adam": optax.chain(coat.scale_by_fp8_adam(), optax.scale(-1e-2)),
    "masked out": optax.masked(ADAMW, {"w": False, "b": False}),
    "hands no extra arguments on": optax.MultiSteps(ADAMW, 2),
}


@pytest.mark.parametrize("tx", UNASKED.values(), ids=UNASKED.keys())
def test_without_fp8_adamw_it_is_refused(tx):
    with pytest.raises(ValueError, match=r"no fp8_adamw was reached.* Put fp8_ad"):
        coat.fused_update(tx, PARAMS, jax.jit(tx.init)(PARAMS), PARAMS)


def test_swapped_arguments_are_named():
    params = {"w": jnp.ones(SHAPE)}
    state = ADAMW.init(params)
    for name, arguments in {
        "params": (params, params, state),
        "grads": (state, params, params),
    }.items():
        with pytest.raises(ValueError, match=rf"{name} has the state.*grads, state, p"):
            coat.fused_update(ADAMW, *arguments)


def test_none_leaves_and_empty_trees():
    params = {"w": jnp.ones(SHAPE), "none": None, "empty": {}, "zero": jnp.ones((0, 3))}
    after, state = fused(ADAMW, params, [params])
    assert jax.tree.structure(after) == jax.tree.structure(params)
    np.testing.assert_allclose(after["w"], 0.99, rtol=1e-5)
    assert after["zero"].shape == (0, 3)
    assert state[0].count == 1
    for nothing in ({}, (), {"none": None}):
        after, state = fused(ADAMW, nothing, [nothing])
        assert after == nothing
        assert state[0].count == 1


def test_numpy_arrays_and_python_scalars():
    params = {"s": 1.0, "a": np.ones(3, np.float32), "w": np.ones(SHAPE, np.float32)}
    grads = jax.tree.map(lambda p: np.full(np.shape(p), 0.1, np.float32), params)
    state = ADAMW.init(jax.tree.map(jnp.asarray, params))
    for leaf in jax.tree.leaves(coat.fused_update(ADAMW, grads, state, params)[0]):
        np.testing.assert_allclose(leaf, 0.99, rtol=1e-5)


def test_what_is_donated_is_written_in_place():
    params, key = some(grown(tree(0, BF16))), jax.random.key(0)
    state = ADAMW.init(params)

    @functools.partial(jax.jit, donate_argnames=("state", "params"))
    def step(grads, state, params, key):
        return coat.fused_update(ADAMW, grads, state, params, key=key)

    compiled = step.lower(params, state, params, key).compile()
    donated = sum(leaf.nbytes for leaf in jax.tree.leaves((params, state)))
    assert compiled.memory_analysis().alias_size_in_bytes == donated
