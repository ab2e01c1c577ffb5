"""Tests of the adapters for trainers: hooks, train states, views and rules of qwix."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import qwix
from flax import linen as nn
from flax import nnx
from flax.training import train_state

import coat_jax as coat
from coat_jax.integrations.adam import as_adam_state
from coat_jax.integrations.fused import TrainState, with_apply_updates_hook
from coat_jax.integrations.qwix import FP8Provider

# qwix 0.1.8 reads names that Flax has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
_TX = optax.chain(optax.clip_by_global_norm(1.0), coat.fp8_adamw(1e-2))


def _params(seed=0):
    keys = jax.random.split(jax.random.key(seed), 2)
    return {
        "w": jax.random.normal(keys[0], (64, 256), jnp.bfloat16),
        "b": jax.random.normal(keys[1], (64,), jnp.bfloat16),
    }


def _assert_equal(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


_KEY = jax.random.key(3)


@functools.cache
def _expected():
    """Returns parameters and state after a step of `fused_update`."""
    step = jax.jit(functools.partial(coat.fused_update, _TX))
    return step(_params(1), _TX.init(_params()), _params(), key=_KEY)


def test_the_hook_takes_the_step_of_fused_update():
    params, grads, state = _params(), _params(1), _TX.init(_params())
    tx = with_apply_updates_hook(_TX, key=_KEY)

    @jax.jit
    def step(grads, state, params):
        # EasyDeL passes keywords.
        updates, state = tx.update(updates=grads, state=state, params=params)
        return tx.apply_updates_hook(params, updates), state

    _assert_equal(step(grads, state, params), _expected())


def test_updates_of_the_hook_are_no_updates():
    params = _params()
    tx = with_apply_updates_hook(_TX)

    def step(params):
        updates, _ = tx.update(params, tx.init(params), params)
        with pytest.raises(ValueError, match="something after or around it reads"):
            optax.apply_updates(params, updates)

    jax.eval_shape(step, params)


def test_the_hook_needs_our_optimizer():
    params, tx = _params(), with_apply_updates_hook(optax.adamw(1e-3))
    with pytest.raises(ValueError, match="no fp8_adamw was reached"):
        jax.eval_shape(tx.update, params, tx.init(params), params)


def test_the_train_state_takes_the_step_of_fused_update():
    state = TrainState.create(apply_fn=None, params=_params(), tx=_TX, key=_KEY)
    after = jax.jit(lambda s, g: s.apply_gradients(grads=g))(state, _params(1))
    _assert_equal((after.params, after.opt_state), _expected())
    assert int(after.step) == 1


def test_the_train_state_overwrites_as_flax_does():
    name = train_state.OVERWRITE_WITH_GRADIENT
    params = {"params": _params(), name: {"history": jnp.zeros(4)}}
    grads = {"params": _params(1), name: {"history": jnp.ones(4)}}
    states = [
        cls.create(apply_fn=None, params=params, tx=coat.fp8_adamw(1e-2))
        for cls in (TrainState, train_state.TrainState)
    ]
    actual, expected = (
        jax.jit(lambda state, grads: state.apply_gradients(grads=grads))(state, grads)
        for state in states
    )
    _assert_equal(actual.params[name], expected.params[name])
    for a, b in zip(
        *(jax.tree.leaves(s.params) for s in (actual, expected)), strict=True
    ):
        np.testing.assert_allclose(*map(np.float32, (a, b)), rtol=2**-7, atol=1e-3)


def test_what_looks_for_adam_finds_it():
    params = _params()
    state = jax.eval_shape(_TX.init, params)
    view = as_adam_state(state)
    adam = view[1][0]
    assert isinstance(adam, optax.ScaleByAdamState)
    for moments in (adam.mu, adam.nu):
        assert jax.tree.map(jnp.shape, moments) == jax.tree.map(jnp.shape, params)
    pure = as_adam_state({"mu": {"w": {"codes": 1, "scale": 2, "exponent": 3}, "b": 4}})
    assert pure == {"mu": {"w": 1, "b": 4}}


_RULE = qwix.QuantizationRule(module_path=".*", weight_qtype="float8_e4m3fn")


class _Einsum(nnx.Module):
    """An einsum with its weight as the first or the second operand."""

    def __init__(self, subscripts, first, shape):
        self.subscripts, self.first = subscripts, first
        self.w = nnx.Param(jax.random.normal(jax.random.key(0), shape) / 8)

    def __call__(self, x):
        operands = (self.w[...], x) if self.first else (x, self.w[...])
        return jnp.einsum(self.subscripts, *operands)


def _matmuls(fn, *args):
    return str(jax.make_jaxpr(fn)(*args)).count("= fp8_dot[")


@pytest.mark.parametrize(
    ("subscripts", "first", "shape"),
    [
        ("btd,dnh->btnh", False, (64, 4, 8)),
        ("dnh,btd->bnth", True, (64, 4, 8)),
        ("nhd,btd->btnh", True, (4, 8, 64)),
        ("btd,bdn->btn", False, (2, 64, 8)),
        ("bdn,btd->btn", True, (2, 64, 8)),
    ],
)
def test_einsums_of_a_weight_are_in_fp8(subscripts, first, shape):
    x = jax.random.normal(jax.random.key(1), (2, 16, 64))
    plain = _Einsum(subscripts, first, shape)
    model = qwix.quantize_model(plain, FP8Provider([_RULE]), x)
    assert _matmuls(lambda x: model(x), x) == 1
    actual, expected = nnx.jit(lambda *models: [m(x) for m in models])(model, plain)
    assert actual.shape == expected.shape
    error = jnp.linalg.norm(actual - expected) / jnp.linalg.norm(expected)
    assert 1e-3 < error < 0.06


def test_rules_choose_modules_and_scores_stay():
    x = jax.random.normal(jax.random.key(1), (2, 16, 64))

    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(32, name="a")(x) + nn.Dense(32, name="b")(x)

    rule = qwix.QuantizationRule(module_path="a", weight_qtype="float8_e4m3fn")
    light = qwix.quantize_model(Two(), FP8Provider([rule]))
    params = light.init(jax.random.key(0), x)
    assert _matmuls(light.apply, params, x) == 1
    attention = nnx.MultiHeadAttention(4, 64, decode=False, rngs=nnx.Rngs(0))
    light = qwix.quantize_model(attention, FP8Provider([_RULE]), x)
    assert _matmuls(lambda x: light(x), x) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_qtype": "int8"}, "weight_qtype must be float8_e4m3fn"),
        ({"act_qtype": "int8"}, "act_qtype must be float8_e4m3fn"),
        ({"tile_size": 128}, "tile_size must not be set, got 128"),
        ({"op_names": ("ragged_dot",)}, "op_names must be some of"),
    ],
)
def test_rules_that_we_cannot_keep_are_refused(changes, message):
    options = {"weight_qtype": "float8_e4m3fn", "act_qtype": "float8_e4m3fn"} | changes
    with pytest.raises(ValueError, match=message):
        FP8Provider([qwix.QuantizationRule(**options)])
