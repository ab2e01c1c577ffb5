"""Tests of public functions under JAX's switches, in several transformations.

The table is function x switch. Under strict dtype promotion neither optax nor
`jax.nn.dot_product_attention` works, so neither does what contains them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import coat_jax as coat
from coat_jax.layers.decoder import DecoderLayer

SWITCHES = {
    "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "no rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "x64": lambda: jax.enable_x64(True),
    "debug_nans": lambda: jax.debug_nans(True),
    "disable_jit": jax.disable_jit,
    "matmul precision": lambda: jax.default_matmul_precision("highest"),
    "leak checks": jax.checking_leaks,
    "rbg keys": lambda: jax.default_prng_impl("rbg"),
}
X = np.random.default_rng(0).normal(size=(2, 128, 64)).astype(np.float32)
PARAMS = {"w": np.ones((64, 256), np.float32), "b": np.ones(8, np.float32)}


def _numbers():
    return jnp.asarray(X, jnp.bfloat16)


def _adamw():
    tx = optax.chain(optax.clip_by_global_norm(1.0), coat.fp8_adamw(1e-3))
    return jax.jit(tx.update)(PARAMS, tx.init(PARAMS), PARAMS)[0]


def _fused():
    tx = coat.fp8_adamw(1e-3)
    params = jax.tree.map(lambda p: jnp.asarray(p, jnp.bfloat16), PARAMS)
    key = jax.random.key(0)
    return coat.fused_update(tx, params, tx.init(params), params, key=key)[0]


def _lion():
    tx = coat.with_quantized_state(optax.lion(1e-3))
    return tx.update(PARAMS, tx.init(PARAMS), PARAMS)[0]


def _gradient(fn):
    w = jnp.ones((64, 64), jnp.bfloat16)
    return jax.grad(lambda w: fn(w).astype(jnp.float32).sum())(w)


def _remat(**options):
    light = coat.fp8_remat(lambda w, x: jnp.tanh(x @ w), **options)
    return _gradient(lambda w: light(w, _numbers()))


def _remat_in(transform):
    light = coat.fp8_remat(lambda w, x: jnp.tanh(x @ w))
    if transform == "vmap":
        return _gradient(lambda w: jax.vmap(light, (None, 0))(w, _numbers()))
    if transform == "scan":

        def loss(w):
            step = lambda x, _: (light(w, x), None)  # noqa: E731
            return jax.lax.scan(step, _numbers(), None, length=2)[0]

        return _gradient(loss)
    return _gradient(jax.checkpoint(lambda w: light(w, _numbers())))


def _dot_general():
    numbers = (((2,), (0,)), ((), ()))
    return _gradient(lambda w: coat.fp8_dot_general(_numbers(), w, numbers))


def _layer(recipe, scaling="just_in_time"):
    layer = DecoderLayer(
        64, 128, 4, 2, 16, recipe=recipe, scaling=scaling, rngs=nnx.Rngs(0)
    )
    return nnx.grad(lambda m: m(_numbers()).astype(jnp.float32).sum())(layer)


def _quantize():
    return coat.dequantize(coat.quantize(_numbers(), expand=True))


def _reports():
    state = coat.fp8_adamw(1e-3).init(PARAMS)
    found = coat.residual_report(lambda w, x: jnp.tanh(x @ w), X[0, :64].T, X)
    return len(coat.moment_report(state).rows()), found.nbytes


def _checkpoints():
    tx = coat.fp8_adamw(1e-3)
    state = tx.init(PARAMS)
    return coat.from_optax_state(coat.to_optax_state(state), state)


FUNCTIONS = {
    "fp8_adamw": _adamw,
    "fused_update": _fused,
    "with_quantized_state": _lion,
    "fp8_remat": _remat,
    "fp8_remat, key": lambda: _remat(key=jax.random.key(0)),
    "fp8_remat, policy": lambda: _remat(policy=jax.checkpoint_policies.dots_saveable),
    **{
        f"fp8_remat in {name}": functools.partial(_remat_in, name)
        for name in ("vmap", "scan", "checkpoint")
    },
    "fp8_dot_general": _dot_general,
    **{recipe: functools.partial(_layer, recipe) for recipe in ("bf16", "te", "coat")},
    "coat_max": lambda: _layer("coat_max"),
    "coat, delayed": lambda: _layer("coat", "delayed"),
    "quantize": _quantize,
    "reports": _reports,
    "checkpoints": _checkpoints,
}
# Programs of optax or of JAX's attention in them do not work under this switch either.
_NOT_STRICT = {"fp8_adamw", "fused_update"}
_NOT_STRICT |= {"bf16", "te", "coat", "coat_max", "coat, delayed"}


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_public_functions_work_under_jaxs_switches(function, switch):
    if switch == "strict promotion" and function in _NOT_STRICT:
        with SWITCHES[switch](), pytest.raises(ValueError, match="promotion path"):
            FUNCTIONS[function]()
        return
    with SWITCHES[switch]():
        found = jax.block_until_ready(FUNCTIONS[function]())
    for leaf in jax.tree.leaves(found):
        assert np.isfinite(np.asarray(leaf, np.float32)).all()
