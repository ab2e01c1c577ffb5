"""Tests FP8 Adam against the oracle, and small parameters' steps against optax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import oracle
from helpers.kernels import OPTIMIZED
from helpers.marks import slow
from helpers.optimizers import (
    SHAPE,
    assert_trees_equal,
    dequantized,
    either_scheme,
    gradients,
    is_quantized,
    run,
)

import coat_jax as coat

B1, B2, EPS = 0.9, 0.999, 1e-8


SMALL = {"w": gradients(1, (6, 40)), "b": gradients(2, (7,)), "s": np.float32(0.3)}


@pytest.mark.parametrize("nesterov", [False, True])
def test_small_parameters_are_updated_exactly_as_by_optax(nesterov):
    grads = [jax.tree.map(lambda p, i=i: p * (i - 1.5), SMALL) for i in range(4)]
    mine = coat.scale_by_fp8_adam(B1, 0.95, 1e-7, 1e-12, nesterov=nesterov)
    theirs = optax.scale_by_adam(B1, 0.95, 1e-7, 1e-12, nesterov=nesterov)
    params, updates, state = run(mine, SMALL, grads)
    actual = params, updates, state.inner_state
    assert_trees_equal(actual, run(theirs, SMALL, grads))


def test_fp8_adamw_is_optax_adamw_where_nothing_is_quantized():
    params = {"w": gradients(0), **SMALL}
    grads = [jax.tree.map(lambda p, i=i: jnp.sin(p * i), params) for i in (3, 5, 7)]
    arguments = {"learning_rate": optax.linear_schedule(1e-2, 1e-3, 3), "b2": 0.95}
    arguments |= {"eps": 1e-7, "eps_root": 1e-12, "weight_decay": 0.1}
    arguments |= {"mask": lambda p: jax.tree.map(lambda x: jnp.ndim(x) > 1, p)}
    mine = coat.fp8_adamw(**arguments, quantize_mask=False)
    after, updates, state = run(mine, params, grads)
    actual = after, updates, (state[0].inner_state, *state[1:])
    assert_trees_equal(actual, run(optax.adamw(**arguments), params, grads))


@either_scheme
def test_moments_are_stored_as_the_oracle_quantizes_them(normalize_mu):
    """The state holds NumPy's moments, quantized by the oracle between steps.

    NumPy's Adam in float32 starts every step from the stored state. Rounding is to
    nearest; stochastic rounding has its own tests.
    """
    options = {"normalize_mu": normalize_mu, "rounding": "nearest"}
    tx = coat.scale_by_fp8_adam(B1, B2, EPS, **options)
    state = tx.init(jnp.zeros(SHAPE))
    loose = 0
    for step in range(1, 6):
        g, (m, v) = gradients(step), read(state)
        m = np.float32(1 - B1) * g + np.float32(B1) * m
        v = np.float32(1 - B2) * (g * g) + np.float32(B2) * v
        updates, state = tx.update(jnp.asarray(g), state)
        assert state.count == step
        hat = (m / (1 - B1**step)) / (np.sqrt(v / (1 - B2**step)) + EPS)
        np.testing.assert_allclose(updates, hat, rtol=1e-4)
        if normalize_mu:
            ratio = m / np.sqrt(np.maximum(v, oracle.TINY))
            loose += assert_stored(state.mu, ratio, error=3 * oracle.EPS)
        else:
            loose += assert_stored(state.mu, m)
        loose += assert_stored(state.nu, v)
    assert loose < 1e-3 * 5 * 2 * m.size


def read(state) -> tuple[np.ndarray, np.ndarray]:
    """Returns both dequantized moments; a normalized mu is multiplied by sqrt(nu)."""
    m, v = np.asarray(state.mu.dequantize()), np.asarray(state.nu.dequantize())
    [mu] = [m for path, m in state.layout.moments if path[-1].name == "mu"]
    return (m * np.sqrt(v) if mu.over_root_of else m), v


def assert_stored(q: coat.QuantizedArray, moment: np.ndarray, error=0.0) -> int:
    """Checks every code of a moment; returns how many are at a rounding boundary.

    `error` is the relative error to which the moment itself is known.
    """
    loose, of = 0, {"E4M3": oracle.E4M3, "UE4M4": oracle.UE4M4}[q.format.name]
    codes = np.asarray(q.codes)
    values = codes.astype(np.float32)
    values = values if q.format.signed else oracle.ue4m4_values(codes)
    for index, where in oracle.groups(moment.shape, (128,)):
        group, scale = moment[where], np.asarray(q.scale)[index]
        expected = oracle.moment_scale(group, of)
        np.testing.assert_allclose(scale, expected, rtol=error + 2 * oracle.EPS)
        k = 16 * q.power
        if q.exponent is not None:
            k = int(np.asarray(q.exponent)[index])
            least, most = oracle.power_bounds(group, scale, of, oracle.OCTAVES)
            assert least <= k <= most
        low, high = oracle.expanded_bounds(group, scale, k, of, error)
        size = np.abs(values[where])
        assert np.all((np.abs(low) <= size) & (size <= np.abs(high)))
        if q.format.signed:
            np.testing.assert_array_equal(np.signbit(values[where]), np.signbit(group))
        loose += np.sum(np.abs(low) != np.abs(high))
    return loose


def test_the_normalized_first_moment_halves_the_error_of_updates():
    """Gradients are a constant signal per element, with noise of the same size."""
    signal, rng = gradients(0), np.random.default_rng(1)
    noise = np.abs(signal) * rng.standard_normal((20, *SHAPE)).astype(np.float32)

    def error(normalize_mu: bool) -> float:
        tx = coat.scale_by_fp8_adam(normalize_mu=normalize_mu)
        _, updates, _ = run(tx, jnp.zeros(SHAPE), list(signal + noise), jit=True)
        return float(np.sqrt(np.mean(np.square(updates - exact))))

    _, exact, _ = run(
        optax.scale_by_adam(), jnp.zeros(SHAPE), list(signal + noise), jit=True
    )
    assert error(True) < 0.5 * error(False)


@either_scheme
def test_state_is_a_named_tuple_of_parameter_shaped_moments(normalize_mu):
    params = {"w": jnp.zeros((64, 256)), "small": jnp.zeros((8191,))}
    params |= {"edge": jnp.zeros((8192,), jnp.bfloat16)}
    state = coat.scale_by_fp8_adam(normalize_mu=normalize_mu).init(params)
    assert isinstance(state, coat.QuantizedState)
    assert state._fields == ("inner_state", "rounding_step", "version", "layout")
    assert isinstance(state.inner_state, optax.ScaleByAdamState)
    assert jax.tree.leaves(state.layout) == []
    for number in (state.count, state.rounding_step, state.version):
        assert number.dtype == jnp.int32
    assert state.version == state.layout.version
    for moments in (state.mu, state.nu):
        assert moments["small"].dtype == jnp.float32
        assert moments["w"].codes.shape == (64, 256)
        assert moments["w"].codes.dtype == jnp.float8_e4m3fn
        assert moments["w"].scale.shape == (64, 2)
        assert moments["w"].scale.dtype == jnp.float32
        assert moments["edge"].shape == (8192,)
        assert moments["edge"].dtype == jnp.float32
        assert not np.any(dequantized(moments)["w"])
    assert state.nu["w"].exponent.shape == (64, 2)
    if normalize_mu:
        assert (state.mu["w"].exponent, state.mu["w"].power) == (None, 3)
    else:
        assert state.mu["w"].exponent.shape == (64, 2)


@either_scheme
@pytest.mark.parametrize("shape", [(64, 128), (32, 4, 256), (16384,)])
def test_both_moments_take_at_most_2_08_bytes_a_parameter(shape, normalize_mu):
    state = coat.scale_by_fp8_adam(normalize_mu=normalize_mu).init(jnp.zeros(shape))
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves((state.mu, state.nu)))
    assert stored == state.mu.nbytes + state.nu.nbytes
    assert stored / np.prod(shape) <= (2.071 if normalize_mu else 2.079)


def test_init_takes_abstract_parameters():
    tx = coat.fp8_adamw(1e-3)
    params = {"w": jnp.zeros(SHAPE, jnp.bfloat16), "b": jnp.zeros(())}
    abstract = jax.eval_shape(lambda: params)
    concrete = tx.init(params)
    described = jax.eval_shape(lambda: concrete)
    assert jax.eval_shape(tx.init, params) == described
    assert jax.eval_shape(tx.init, abstract) == described
    assert_trees_equal(tx.init(abstract), concrete)


def test_a_jitted_init_traces_the_zeros_of_one_shape_once():
    tx = coat.fp8_adamw(1e-3)

    def params(count):
        kinds = (SHAPE, jnp.bfloat16), (SHAPE, jnp.float32), ((4,), jnp.float32)
        return {
            f"{shape} {dtype.__name__} {i}": jnp.ones(shape, dtype)
            for shape, dtype in kinds
            for i in range(count)
        }

    def operations(count):
        return len(jax.make_jaxpr(tx.init)(params(count)).eqns)

    assert operations(10) == operations(2)
    state = jax.jit(tx.init)(params(3))
    assert_trees_equal(state, tx.init(params(3)))
    # Every array has its own memory, so that a step may take all of it.
    leaves = jax.tree.leaves(state)
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)


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


def test_updates_have_the_gradients_dtypes_and_moments_are_taken_in_float32():
    params = {"w": jnp.ones(SHAPE, jnp.bfloat16), "v": jnp.ones(SHAPE)}
    params["b"] = jnp.ones((8,), jnp.bfloat16)
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 1e-3, p.dtype), params)
    after, updates, state = run(coat.fp8_adamw(1e-2), params, [grads], jit=True)
    for name, param in params.items():
        assert updates[name].dtype == after[name].dtype == param.dtype
    assert state[0].nu["b"].dtype == jnp.float32
    assert state[0].nu["w"].dequantize().dtype == jnp.float32
    # A bfloat16 decay would lose the last digits of the second moment.
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


@functools.cache
def trained(loss, make, **options):
    """Returns the loss before and after training, and the state."""
    tx = make(optax.cosine_decay_schedule(3e-2, 400), weight_decay=0, **options)

    # Optimized compilation pays off over so many steps.
    @functools.partial(jax.jit, compiler_options=OPTIMIZED)
    def train(params):
        def step(carry, _):
            params, state = carry
            updates, state = tx.update(jax.grad(loss)(params), state, params)
            return (optax.apply_updates(params, updates), state), None

        carry = params, tx.init(params)
        after, state = jax.lax.scan(step, carry, length=400)[0]
        return loss(params), loss(after), state

    return train(jnp.zeros((64, 128)))


# Every pair of values of format, loss and scheme occurs.
@pytest.mark.parametrize(
    ("format", "loss", "normalize_mu"),
    [
        slow(coat.E4M3, least_squares, True),
        (coat.E4M3, rosenbrock, False),
        slow(coat.E5M2, least_squares, False),
        slow(coat.E5M2, rosenbrock, True),
        slow(coat.DE8, least_squares, True),
        slow(coat.DE8, rosenbrock, False),
    ],
)
def test_trains_as_well_as_optax(format, loss, normalize_mu):
    formats = {"mu_format": format, "nu_format": format}
    _, mine, state = trained(loss, coat.fp8_adamw, normalize_mu=normalize_mu, **formats)
    start, theirs, _ = trained(loss, optax.adamw)
    assert state[0].nu.format is format
    assert mine < 0.8 * start
    assert mine - theirs < 0.01 * (start - theirs)


@either_scheme
def test_the_second_moment_is_zero_only_where_optax_has_zero(normalize_mu):
    """Gradients of 26 octaves in one group do not underflow, nor do later steps."""
    g = np.zeros(SHAPE, np.float32)
    g[:, ::3] = np.exp2(np.random.default_rng(5).uniform(-30, -4, g[:, ::3].shape))
    grads = [jnp.asarray(g)] + [jnp.zeros(SHAPE)] * 5
    tx = coat.scale_by_fp8_adam(normalize_mu=normalize_mu)
    _, _, state = run(tx, jnp.zeros(SHAPE), grads, jit=True)
    _, _, theirs = run(optax.scale_by_adam(), jnp.zeros(SHAPE), grads, jit=True)
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


def test_moments_of_any_granularity_but_groups_are_refused():
    with pytest.raises(ValueError, match=r"must be coat.PerGroup\(g\), got PerTensor"):
        coat.scale_by_fp8_adam(granularity=coat.PerTensor())
