"""FP8 Adam: exact where it falls back, the oracle's where not, and an optax citizen."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest

import coat_jax as coat

B1, B2, EPS = 0.9, 0.999, 1e-8
SHAPE = (32, 160)  # Above 4,096 elements, with a short last group.


def gradients(seed: int, shape=SHAPE) -> np.ndarray:
    rng = np.random.default_rng(seed)
    size = np.exp2(rng.uniform(-12, 0, shape))
    return (rng.standard_normal(shape) * size).astype(np.float32)


def run(tx, params, grads: list, jit: bool = False):
    """Parameters, updates of the last step and state after all gradients."""
    state = tx.init(params)
    update = jax.jit(tx.update) if jit else tx.update
    for g in grads:
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)
    return params, updates, state


def assert_trees_equal(actual, expected):
    """The same leaves bit for bit; the containers may have other names."""
    actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
    for a, b in zip(actual, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(a, b)


def is_quantized(leaf) -> bool:
    return isinstance(leaf, coat.QuantizedArray)


def dequantized(tree):
    return jax.tree.map(
        lambda m: m.dequantize() if is_quantized(m) else m, tree, is_leaf=is_quantized
    )


SMALL = {"w": gradients(1, (6, 40)), "b": gradients(2, (7,)), "s": np.float32(0.3)}


@pytest.mark.parametrize("nesterov", [False, True])
def test_small_parameters_are_updated_exactly_as_by_optax(nesterov):
    grads = [jax.tree.map(lambda p, i=i: p * (i - 1.5), SMALL) for i in range(4)]
    mine = coat.scale_by_fp8_adam(B1, 0.95, 1e-7, 1e-12, nesterov=nesterov)
    theirs = optax.scale_by_adam(B1, 0.95, 1e-7, 1e-12, nesterov=nesterov)
    assert_trees_equal(run(mine, SMALL, grads), run(theirs, SMALL, grads))


def test_fp8_adamw_is_optax_adamw_where_nothing_is_quantized():
    params = {"w": gradients(0), **SMALL}
    grads = [jax.tree.map(lambda p, i=i: jnp.sin(p * i), params) for i in (3, 5, 7)]
    arguments = {"learning_rate": optax.linear_schedule(1e-2, 1e-3, 3), "b2": 0.95}
    arguments |= {"eps": 1e-7, "eps_root": 1e-12, "weight_decay": 0.1}
    arguments |= {"mask": lambda p: jax.tree.map(lambda x: jnp.ndim(x) > 1, p)}
    mine = coat.fp8_adamw(**arguments, quantize_mask=False)
    assert_trees_equal(
        run(mine, params, grads), run(optax.adamw(**arguments), params, grads)
    )


def test_moments_are_stored_as_the_oracle_quantizes_them():
    """NumPy's Adam in float32, with the oracle between steps, from the stored state."""
    tx = coat.scale_by_fp8_adam(B1, B2, EPS)
    state = tx.init(jnp.zeros(SHAPE))
    loose = 0
    for step in range(1, 6):
        g = gradients(step)
        m = np.float32(1 - B1) * g + np.float32(B1) * np.asarray(state.mu.dequantize())
        v = np.float32(1 - B2) * (g * g) + np.float32(B2) * np.asarray(
            state.nu.dequantize()
        )
        updates, state = tx.update(jnp.asarray(g), state)
        assert state.count == step
        hat = (m / (1 - B1**step)) / (np.sqrt(v / (1 - B2**step)) + EPS)
        np.testing.assert_allclose(updates, hat, rtol=1e-4)
        loose += assert_stored(state.mu, m) + assert_stored(state.nu, v)
    assert loose < 1e-3 * 5 * 2 * m.size


def assert_stored(q: coat.QuantizedArray, moment: np.ndarray) -> int:
    """Checks every code of a moment; returns how many lay at a rounding boundary."""
    loose = 0
    for index, where in oracle.groups(moment.shape, (128,)):
        group, k = moment[where], int(np.asarray(q.exponent)[index])
        scale = oracle.scale_of(group, oracle.E4M3, (128,))
        assert np.asarray(q.scale)[index] == scale
        least, most = oracle.power_bounds(group, scale, oracle.E4M3)
        assert least <= k <= most
        low, high = oracle.expanded_bounds(group, scale, k, oracle.E4M3)
        size = np.abs(np.asarray(q.codes)[where].astype(np.float32))
        assert np.all((np.abs(low) <= size) & (size <= np.abs(high)))
        signs = np.signbit(np.asarray(q.codes)[where].astype(np.float32))
        np.testing.assert_array_equal(signs, np.signbit(group))
        loose += np.sum(np.abs(low) != np.abs(high))
    return loose


def test_a_free_running_oracle_stays_beside_the_optimizer():
    """Adam with the oracle's quantization, in float64, never shown the state."""
    tx = coat.scale_by_fp8_adam(B1, B2, EPS)
    state = tx.init(jnp.zeros(SHAPE))
    m = v = np.zeros(SHAPE)
    for step in range(1, 7):
        g = gradients(step)
        updates, state = tx.update(jnp.asarray(g), state)
        m, v = (1 - B1) * g + B1 * m, (1 - B2) * g.astype(np.float64) ** 2 + B2 * v
        hat = (m / (1 - B1**step)) / (np.sqrt(v / (1 - B2**step)) + EPS)
        m, v = oracle_round_trip(m), oracle_round_trip(v)
    for stored, expected in ((state.mu, m), (state.nu, v), (updates, hat)):
        actual = dequantized(stored)
        close = np.isclose(actual, expected, rtol=1e-3, atol=0)
        assert np.mean(close) > 0.99


def oracle_round_trip(moment: np.ndarray) -> np.ndarray:
    moment = moment.astype(np.float32)
    scales, powers, values = {}, {}, np.zeros_like(moment)
    for index, where in oracle.groups(moment.shape, (128,)):
        scales[index] = oracle.scale_of(moment[where], oracle.E4M3, (128,))
        powers[index], _ = oracle.power_bounds(
            moment[where], scales[index], oracle.E4M3
        )
        low, high = oracle.expanded_bounds(
            moment[where], scales[index], powers[index], oracle.E4M3
        )
        values[where] = np.where(np.abs(moment[where]) > 0, high, low)
    return oracle.dequantize(values, scales, (128,), powers, oracle.E4M3)


def test_state_is_a_named_tuple_of_parameter_shaped_moments():
    params = {"w": jnp.zeros((64, 256)), "small": jnp.zeros((4095,))}
    params |= {"edge": jnp.zeros((4096,), jnp.bfloat16)}
    state = coat.scale_by_fp8_adam().init(params)
    assert isinstance(state, coat.ScaleByFP8AdamState)
    assert state._fields == ("count", "mu", "nu")
    assert state.count.dtype == jnp.int32
    for moments in (state.mu, state.nu):
        assert moments["small"].dtype == jnp.float32
        assert moments["w"].codes.shape == (64, 256)
        assert moments["w"].codes.dtype == jnp.float8_e4m3fn
        assert moments["w"].scale.shape == moments["w"].exponent.shape == (64, 2)
        assert moments["edge"].shape == (4096,)
        assert moments["edge"].dtype == jnp.float32
        assert not np.any(dequantized(moments)["w"])


@pytest.mark.parametrize("shape", [(64, 128), (32, 4, 256), (16384,)])
def test_both_moments_take_at_most_2_05_bytes_a_parameter(shape):
    state = coat.scale_by_fp8_adam().init(jnp.zeros(shape))
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves((state.mu, state.nu)))
    assert stored == state.mu.nbytes + state.nu.nbytes
    assert stored / np.prod(shape) <= 2.05


def test_init_takes_abstract_parameters():
    tx = coat.fp8_adamw(1e-3)
    params = {"w": jnp.zeros(SHAPE, jnp.bfloat16), "b": jnp.zeros(())}
    abstract = jax.eval_shape(lambda: params)
    concrete = tx.init(params)
    described = jax.eval_shape(lambda: concrete)
    assert jax.eval_shape(tx.init, params) == described
    assert jax.eval_shape(tx.init, abstract) == described
    assert_trees_equal(tx.init(abstract), concrete)


def test_chain_with_clipping_scales_the_gradients_first():
    params, grads = jnp.ones(SHAPE), [jnp.asarray(gradients(i)) for i in range(3)]
    clipped, _ = optax.clip_by_global_norm(0.1).update(grads[0], optax.EmptyState())
    tx = optax.chain(optax.clip_by_global_norm(0.1), coat.scale_by_fp8_adam())
    alone = coat.scale_by_fp8_adam()
    _, together, state = run(tx, params, grads[:1])
    _, expected, expected_state = run(alone, params, [clipped])
    assert_trees_equal((together, state[1]), (expected, expected_state))


def test_masked_and_partition_leave_the_rest_alone():
    params = {"w": jnp.ones(SHAPE), "frozen": jnp.ones(SHAPE)}
    grads = jax.tree.map(lambda p: jnp.asarray(gradients(3)), params)
    labels = {"w": "fp8", "frozen": "none"}
    _, expected, _ = run(coat.scale_by_fp8_adam(), params["w"], [grads["w"]])

    masked = optax.masked(coat.scale_by_fp8_adam(), {"w": True, "frozen": False})
    _, updates, _ = run(masked, params, [grads])
    assert_trees_equal(updates, {"w": expected, "frozen": grads["frozen"]})

    parts = {"fp8": coat.scale_by_fp8_adam(), "none": optax.set_to_zero()}
    _, updates, state = run(optax.partition(parts, labels), params, [grads], jit=True)
    np.testing.assert_allclose(updates["w"], expected, rtol=1e-5)
    assert not np.any(updates["frozen"])
    assert len(jax.tree.leaves(state, is_leaf=is_quantized)) == 3


def test_injected_hyperparameters_are_read_back_and_used():
    schedule = optax.linear_schedule(1e-2, 0.0, 4)
    injected = optax.inject_hyperparams(coat.fp8_adamw)(schedule, weight_decay=0.1)
    params, grads = jnp.ones(SHAPE), [jnp.asarray(gradients(i)) for i in range(3)]
    after, _, state = run(injected, params, grads, jit=True)
    assert state.hyperparams["learning_rate"] == pytest.approx(5e-3)
    assert state.hyperparams["b1"] == pytest.approx(0.9)
    # One step, since b1 as an array rounds 1 - b1 otherwise than as a constant does.
    plain = coat.fp8_adamw(schedule, weight_decay=0.1)
    first, _, _ = run(injected, params, grads[:1], jit=True)
    expected, _, _ = run(plain, params, grads[:1], jit=True)
    np.testing.assert_allclose(first, expected, rtol=1e-5)
    assert not np.allclose(first, after, rtol=1e-3)

    state.hyperparams["b1"] = jnp.float32(0.5)
    _, changed = injected.update(grads[0], state, params)
    assert changed.hyperparams["b1"] == 0.5


def test_multi_steps_averages_gradients():
    params, grads = jnp.ones(SHAPE), [jnp.asarray(gradients(i)) for i in range(4)]
    tx = optax.MultiSteps(coat.fp8_adamw(1e-2), every_k_schedule=2)
    after, _, state = run(tx, params, grads, jit=True)
    means = [(grads[0] + grads[1]) / 2, (grads[2] + grads[3]) / 2]
    expected, _, inner = run(coat.fp8_adamw(1e-2), params, means, jit=True)
    assert state.gradient_step == 2
    np.testing.assert_allclose(after, expected, rtol=1e-5)
    np.testing.assert_array_equal(
        state.inner_opt_state[0].mu.exponent.shape, inner[0].mu.exponent.shape
    )


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_non_finite_step_is_skipped_and_the_run_recovers_exactly(poison):
    good = [jnp.asarray(gradients(i)) for i in range(4)]
    bad = good[1].at[3, 7].set(poison)
    tx = optax.apply_if_finite(coat.fp8_adamw(1e-2), max_consecutive_errors=3)
    params = jnp.ones(SHAPE)
    after, _, state = run(tx, params, [*good[:2], bad, *good[2:]], jit=True)
    expected, _, clean = run(tx, params, good, jit=True)
    assert state.total_notfinite == 1
    assert_trees_equal((after, state.inner_state), (expected, clean.inner_state))


def test_weight_decay_mask():
    params = {"w": jnp.ones(SHAPE), "b": jnp.ones((8,))}
    zero = jax.tree.map(jnp.zeros_like, params)
    decays = {"w": True, "b": False}
    tx = coat.fp8_adamw(0.1, weight_decay=0.5, mask=decays)
    _, updates, _ = run(tx, params, [zero])
    np.testing.assert_allclose(updates["w"], -0.05, rtol=1e-6)
    assert not np.any(updates["b"])


@pytest.mark.parametrize(
    "mask",
    [
        {"block": False, "head": True},
        lambda params: {"block": {"a": False, "b": False}, "head": True},
    ],
)
def test_quantize_mask_takes_prefixes_and_functions(mask):
    params = {"block": {"a": jnp.ones(SHAPE), "b": jnp.ones(SHAPE)}}
    params["head"] = jnp.ones(SHAPE)
    mu = coat.scale_by_fp8_adam(quantize_mask=mask).init(params).mu
    assert is_quantized(mu["head"])
    assert not is_quantized(mu["block"]["a"])
    assert not is_quantized(mu["block"]["b"])


@pytest.mark.parametrize(
    "params", [{}, (), {"w": None, "b": np.float32(1)}, np.float32(2), 0.5]
)
def test_trees_without_leaves_with_none_and_scalars(params):
    grads = jax.tree.map(jnp.ones_like, params)
    tx = coat.fp8_adamw(1e-1)
    updates, state = tx.update(grads, tx.init(params), params)
    expected = optax.adamw(1e-1)
    theirs, _ = expected.update(grads, expected.init(params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert_trees_equal(updates, theirs)
    assert state[0].count == 1


def test_updates_have_the_gradients_dtypes_and_moments_are_taken_in_float32():
    params = {"w": jnp.ones(SHAPE, jnp.bfloat16), "v": jnp.ones(SHAPE)}
    params["b"] = jnp.ones((8,), jnp.bfloat16)
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 1e-3, p.dtype), params)
    after, updates, state = run(coat.fp8_adamw(1e-2), params, [grads], jit=True)
    for name, param in params.items():
        assert updates[name].dtype == after[name].dtype == param.dtype
    assert state[0].nu["b"].dtype == jnp.float32
    assert state[0].nu["w"].dequantize().dtype == jnp.float32
    # In bfloat16 this decay would leave the second moment without its last digits.
    np.testing.assert_allclose(
        state[0].nu["b"], 1e-3 * np.square(np.float32(grads["b"][0])), rtol=1e-5
    )


def badly_scaled() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(4)
    a = rng.standard_normal((96, 64)) * np.exp2(rng.uniform(-3, 2, 64))
    return a.astype(np.float32), rng.standard_normal((96, 128)).astype(np.float32)


FACTOR, TARGET = badly_scaled()


def least_squares(w):
    return jnp.mean(jnp.square(FACTOR @ w - TARGET))


def rosenbrock(w):
    x, y = w[:32], w[32:]
    return jnp.mean(jnp.square(1 - x) + 10 * jnp.square(y - x * x))


@pytest.mark.parametrize("loss", [least_squares, rosenbrock])
@pytest.mark.parametrize("format", [coat.E4M3, coat.E5M2, coat.DE8], ids=repr)
def test_trains_as_well_as_optax(loss, format):
    def train(tx):
        @jax.jit
        def steps(params):
            def step(carry, _):
                params, state = carry
                updates, state = tx.update(jax.grad(loss)(params), state, params)
                return (optax.apply_updates(params, updates), state), None

            return jax.lax.scan(step, (params, tx.init(params)), length=400)[0]

        params, state = steps(jnp.zeros((64, 128)))
        return loss(params), state

    schedule = optax.cosine_decay_schedule(3e-2, 400)
    mine, state = train(
        coat.fp8_adamw(schedule, weight_decay=0, mu_format=format, nu_format=format)
    )
    theirs, _ = train(optax.adamw(schedule, weight_decay=0))
    start = loss(jnp.zeros((64, 128)))
    assert state[0].nu.format is format
    assert mine < 0.8 * start
    assert mine - theirs < 0.01 * (start - theirs)


def test_the_second_moment_is_zero_only_where_optax_has_zero():
    """Gradients of 26 octaves in one group, then many steps without gradients."""
    g = np.zeros(SHAPE, np.float32)
    g[:, ::3] = np.exp2(np.random.default_rng(5).uniform(-30, -4, g[:, ::3].shape))
    grads = [jnp.asarray(g)] + [jnp.zeros(SHAPE)] * 5
    _, _, state = run(coat.scale_by_fp8_adam(), jnp.zeros(SHAPE), grads)
    _, _, theirs = run(optax.scale_by_adam(), jnp.zeros(SHAPE), grads)
    np.testing.assert_array_equal(state.nu.dequantize() == 0, theirs.nu == 0)
    np.testing.assert_array_equal(state.mu.dequantize() == 0, theirs.mu == 0)


def test_the_state_is_donated():
    tx = coat.fp8_adamw(1e-2)
    params = jnp.ones((64, 128))
    state = tx.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    lowered = step.lower(params, state, params)
    donated = sum(leaf.nbytes for leaf in jax.tree.leaves((params, state)))
    assert lowered.compile().memory_analysis().alias_size_in_bytes == donated
    codes = state[0].mu.codes
    after, _ = step(params, state, jnp.ones((64, 128)))
    assert codes.is_deleted()
    np.testing.assert_allclose(after, 0.99, rtol=1e-3)


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


def test_state_survives_pickling():
    _, _, state = run(
        coat.fp8_adamw(1e-3), jnp.ones(SHAPE), [jnp.asarray(gradients(0))]
    )
    assert_trees_equal(pickle.loads(pickle.dumps(state)), state)


def test_moments_of_any_granularity_but_groups_are_refused():
    with pytest.raises(ValueError, match=r"must be coat.PerGroup\(g\), got PerTensor"):
        coat.scale_by_fp8_adam(granularity=coat.PerTensor())
