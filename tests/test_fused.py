"""`coat.fused_update`: the chain's step in one pass, wherever the chain can be."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from optimizers import assert_same_bits, either_scheme, gradients, is_quantized

import coat_jax as coat

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
    """Numbers of many magnitudes; those of `wide` stay in float32."""
    rng = np.random.default_rng(seed)

    def values(path, shape):
        own = F32 if path[0].key == "wide" else dtype
        return jnp.asarray(gradients(rng.integers(1 << 30), shape), own)

    return jax.tree_util.tree_map_with_path(values, SHAPES, is_leaf=is_shape)


def grown(params):
    """Parameters of sizes between 1 and 2, which no step of the tests makes cancel."""
    return jax.tree.map(
        lambda p: (jnp.sign(p) + p / (jnp.max(jnp.abs(p)) + 1)).astype(p.dtype), params
    )


@functools.cache
def jitted(tx):
    return jax.jit(functools.partial(coat.fused_update, tx))


def fused(tx, params, grads, state=None, **key):
    """Parameters and state after all gradients."""
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
    """Floats as integers in their order, so that neighbours differ by one."""
    x = np.asarray(x)
    bits = x.view({1: np.int8, 2: np.int16, 4: np.int32}[x.itemsize]).astype(np.int64)
    return np.where(bits < 0, -(bits & ((1 << (8 * x.itemsize - 1)) - 1)), bits)


def distance(a, b) -> np.ndarray:
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    return np.abs(steps(a) - steps(b))


def assert_close_states(actual, expected):
    """The same containers; codes at rounding boundaries fall to either side, rarely.

    The two paths compute a stored ratio in another order, and XLA rounds what they
    share otherwise in other programs, such as x / c as x * (1 / c).
    """
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if a.dtype == F32:
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-30)
        elif a.dtype.itemsize < 4:
            # Of a group whose scale or exponent is another, all codes may be.
            assert np.mean(steps(a) != steps(b)) < 5e-3
        else:
            np.testing.assert_array_equal(a, b)


@either_scheme
@pytest.mark.parametrize("nesterov", [False, True])
def test_the_step_is_adamws_from_the_stored_moments(normalize_mu, nesterov):
    """NumPy's AdamW in float64, which reads the state's own moments before a step."""
    b1, b2, eps, eps_root, rate, decay = 0.8, 0.95, 1e-6, 1e-10, 1e-2, 0.3
    tx = coat.fp8_adamw(
        rate, b1, b2, eps, eps_root, decay, nesterov=nesterov, normalize_mu=normalize_mu
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


@either_scheme
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


@pytest.mark.parametrize("options", [OPTIONS, OPTIONS | {"mask": None}])
def test_without_quantization_float32_is_optax_adamw(options):
    params, grads = grown(tree(0)), [tree(i) for i in (1, 2, 3)]
    after = fused(coat.fp8_adamw(**options, quantize_mask=False), params, grads)
    expected, theirs = chained(optax.adamw(**options), params, grads)
    for a, b in zip(jax.tree.leaves(after[0]), jax.tree.leaves(expected), strict=True):
        assert distance(a, b).max() <= 1
    assert_close_states(jax.tree.leaves(after[1]), jax.tree.leaves(theirs))


@pytest.mark.parametrize("quantize_mask", [None, False])
def test_bfloat16_is_rounded_once(quantize_mask):
    """The same step in float32, rounded by ml_dtypes; optax rounds twice more."""
    tx = coat.fp8_adamw(1e-2, weight_decay=0.1, quantize_mask=quantize_mask)
    params, grads = grown(tree(0, BF16)), tree(1, BF16)
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


@pytest.mark.parametrize("dtypes", [(BF16, F32), (F32, BF16), (jnp.float16, BF16)])
def test_gradients_and_parameters_of_other_dtypes(dtypes):
    """Float16 is none of the kernel's."""
    param = jnp.asarray(1 + np.abs(gradients(0, SHAPE)), dtypes[0])
    grad = jnp.asarray(gradients(1, SHAPE), dtypes[1])
    after, state = fused(ADAMW, param, [grad])
    exact, expected = fused(ADAMW, param.astype(F32), [grad.astype(F32)])
    assert after.dtype == dtypes[0]
    assert distance(after, np.asarray(exact).astype(after.dtype)).max() <= 1
    assert_close_states(state, expected)


@pytest.mark.parametrize("decayed", [{"w": True, "wide": False, "nested": True}, {}])
def test_weight_decay_masks(decayed):
    """Without gradients a step shrinks what decays and leaves the rest."""
    decayed = decayed or dict.fromkeys(SHAPES, False)
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

    injected = optax.inject_hyperparams(coat.fp8_adamw)(1e-2, weight_decay=0.0)
    state = injected.init(params)
    by_one, _ = fused(injected, params, grads[:1], state)
    state.hyperparams["learning_rate"] = jnp.float32(2e-2)
    by_two, _ = fused(injected, params, grads[:1], state)
    moved = by_one["w"] - params["w"]
    np.testing.assert_allclose(by_two["w"] - params["w"], 2 * moved, rtol=1e-4)


def test_clipping_before_it():
    params, grads = some(grown(tree(0))), some(tree(1))
    clip = optax.clip_by_global_norm(0.1)
    clipped, _ = clip.update(grads, optax.EmptyState())
    after, state = fused(optax.chain(clip, ADAMW), params, [grads])
    expected = fused(ADAMW, params, [clipped])
    assert_close_states((after, state[1]), expected)


def test_masked_and_partition_leave_the_rest_to_others():
    params, grads = grown(tree(0)), tree(1)
    names = {"w": "fp8", "wide": "sgd", "nested": "fp8"}
    parts = {"fp8": ADAMW, "sgd": optax.sgd(0.5)}
    by_partition, state = fused(optax.partition(parts, names), params, [grads])
    masks = [{k: v == part for k, v in names.items()} for part in parts]
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


def test_frozen_parameters():
    params, grads = some(grown(tree(0))), some(tree(1))
    frozen = {"w": False, "wide": True}
    tx = optax.selective_transform(ADAMW, freeze_mask=frozen)
    after, _ = fused(tx, params, [grads])
    np.testing.assert_array_equal(after["wide"], params["wide"])
    expected, _ = fused(ADAMW, params, [grads])
    assert_close_states(after["w"], expected["w"])


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
}


PARAMS = {"w": jnp.ones(SHAPE), "b": jnp.ones(8)}


@pytest.mark.parametrize("tx", REFUSED.values(), ids=REFUSED.keys())
def test_what_reads_its_updates_is_refused(tx):
    step, state = functools.partial(coat.fused_update, tx), tx.init(PARAMS)
    with pytest.raises(ValueError, match=r"something after or around it reads its upd"):
        jax.eval_shape(step, PARAMS, state, PARAMS)


@pytest.mark.parametrize("name", ["trace", "apply_if_finite"])
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
    with pytest.raises(ValueError, match=r"no fp8_adamw in it was asked.* Put fp8_ad"):
        coat.fused_update(tx, PARAMS, tx.init(PARAMS), PARAMS)


def test_lookahead_is_refused():
    """It hands no extra arguments on."""
    tx = optax.lookahead(ADAMW, 2, 0.5)
    params = optax.LookaheadParams.init_synced(jnp.ones(SHAPE))
    with pytest.raises(ValueError, match="no fp8_adamw in it was asked"):
        coat.fused_update(tx, jnp.ones(SHAPE), tx.init(params), params)


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
    for step in (jitted(ADAMW), functools.partial(coat.fused_update, ADAMW)):
        for leaf in jax.tree.leaves(step(grads, state, params)[0]):
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


def stochastic(key, tx=WITHOUT_DECAY):
    return fused(tx, grown(tree(0, BF16)), [tree(1, BF16)], key=key)


@pytest.mark.parametrize("quantize_mask", [None, False])
def test_stochastic_rounding_takes_a_neighbour_and_is_right_on_average(quantize_mask):
    tx = coat.fp8_adamw(1e-3, weight_decay=0.0, quantize_mask=quantize_mask)
    wide = jax.tree.map(lambda x: x.astype(F32), (grown(tree(0, BF16)), tree(1, BF16)))
    exact = np.asarray(fused(tx, wide[0], [wide[1]])[0]["w"])
    low = (exact.view(np.uint32) & 0xFFFF0000).view(np.float32)
    high = ((exact.view(np.uint32) & 0xFFFF0000) + 0x10000).view(np.float32)
    up, draws = np.zeros(exact.shape), 16
    for seed in range(draws):
        after = stochastic(jax.random.key(seed), tx=tx)[0]["w"]
        after = np.asarray(after).astype(np.float32)
        assert np.all((after == low) | (after == high))
        up += after == high
    expected = (exact.astype(np.float64) - low) / (high.astype(np.float64) - low)
    assert expected.std() > 0.1
    deviation = np.sqrt(np.sum(expected * (1 - expected)) / draws)
    assert abs(np.sum(up / draws - expected)) < 4 * deviation
    # Elements whose exact results are nearer to one neighbour take it more often.
    slope = np.sum((expected - expected.mean()) * up / draws) / np.sum(
        (expected - expected.mean()) ** 2
    )
    assert slope == pytest.approx(1, abs=0.05)


def test_states_and_float32_parameters_do_not_depend_on_the_key():
    nearest, state = stochastic(None)
    rounded, other = stochastic(jax.random.key(0))
    assert_same_bits(state, other)
    assert_same_bits(rounded["wide"], nearest["wide"])
    for path in (
        lambda t: t["w"],
        lambda t: t["nested"][0],
        lambda t: t["nested"][1]["b"],
    ):
        assert np.any(distance(path(rounded), path(nearest)))


def test_the_same_key_and_step_round_the_same_way():
    expected = stochastic(jax.random.key(3))
    assert_same_bits(stochastic(jax.random.key(3)), expected)
    params, grads = grown(tree(0, BF16))["w"], tree(1, BF16)["w"]
    state, key = WITHOUT_DECAY.init(params), jax.random.key(3)
    by_jit, _ = jitted(WITHOUT_DECAY)(grads, state, params, key=key)
    eager, _ = coat.fused_update(WITHOUT_DECAY, grads, state, params, key=key)
    # Exact results differ in their last bits.
    assert np.mean(distance(eager, by_jit) > 0) < 1e-2


def test_keys_steps_and_paths_have_random_bits_of_their_own():
    """Equal parameters and gradients, a step that lands between two neighbours."""
    params = {"a": jnp.ones(SHAPE, BF16), "b": jnp.ones(SHAPE, BF16)}
    state = WITHOUT_DECAY.init(params)

    def rounded(name: str, key: int, count: int) -> np.ndarray:
        at = (state[0]._replace(count=jnp.int32(count)), *state[1:])
        after, _ = fused(WITHOUT_DECAY, params, [params], at, key=jax.random.key(key))
        return np.asarray(after[name] < 1)

    draws = [
        rounded(*which)
        for which in (("a", 0, 0), ("b", 0, 0), ("a", 1, 0), ("a", 0, 1))
    ]
    for i, one in enumerate(draws):
        assert 0.1 < one.mean() < 0.9
        for other in draws[i + 1 :]:
            assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.05
        groups = one[:, :256].reshape(-1, 128).astype(float)
        assert abs(np.corrcoef(groups)[np.triu_indices(len(groups), 1)].mean()) < 0.02


def test_stochastic_rounding_follows_steps_that_nearest_loses():
    """Steps of a 64th of what bfloat16 resolves at 1."""
    param, grad = jnp.ones(SHAPE, BF16), jnp.ones(SHAPE, BF16)
    tx = coat.fp8_adamw(2.0**-14, weight_decay=0.0)
    lost, _ = fused(tx, param, [grad] * 32)
    assert np.all(np.asarray(lost) == 1)
    followed, _ = fused(tx, param, [grad] * 32, key=jax.random.key(0))
    mean = np.asarray(followed).astype(np.float64).mean()
    assert mean == pytest.approx(1 - 32 * 2.0**-14, abs=1e-4)


def test_not_finite_results_stay_what_they_are():
    grad = jnp.ones(SHAPE, BF16).at[0, 0].set(jnp.nan).at[1, 0].set(jnp.inf)
    after, _ = fused(ADAMW, jnp.ones(SHAPE, BF16), [grad], key=jax.random.key(0))
    lost = np.isnan(np.asarray(after).astype(np.float32))
    assert np.argwhere(lost).tolist() == [[0, 0], [1, 0]]
    assert after.dtype == ml_dtypes.bfloat16
