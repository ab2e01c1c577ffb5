"""Tests delayed scaling against just-in-time scaling and against the exact amax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from helpers import segments as plain
from helpers.gradients import compiled
from helpers.marks import slow_except
from helpers.models import normal, parameters

import coat_jax as coat
import pallas_kernels as kernels
from coat_jax.fp8.matmul import matmul_codes
from coat_jax.layers import parts
from coat_jax.layers.decoder import DecoderLayer
from coat_jax.models import llama
from coat_jax.quantization.delayed import LENGTH, delayed_scale, new_history, recorded

TOKENS = (2, 24)
HIDDEN, INNER, HEAD_DIM = 64, 96, 16
BF16 = jnp.bfloat16
NORM = parts.Norm(kind="rms", eps=1e-5)
HEADS = parts.Heads(num_kv_heads=2, head_dim=HEAD_DIM, theta=100.0)


def weights(**shapes):
    params = {
        name: normal(i, *shape, dtype=BF16, scale=0.1)
        for i, (name, shape) in enumerate(shapes.items())
    }
    return {"norm": jnp.ones(HIDDEN, BF16), **params}


def segments():
    """Returns each segment by name, with its parameters, arguments and cotangents."""
    x, dy = normal(7, *TOKENS, HIDDEN, dtype=BF16), normal(8, *TOKENS, HIDDEN)
    dy = (1e-3 * dy).astype(BF16)
    o = normal(9, *TOKENS, INNER // HEAD_DIM, HEAD_DIM, dtype=BF16)
    dheads = [
        1e-3 * normal(i, *TOKENS, n, HEAD_DIM, dtype=BF16)
        for i, n in ((10, 4), (11, 2), (12, 2))
    ]
    return {
        "attention_in": (
            functools.partial(plain.attention_in, norm=NORM, heads=HEADS),
            weights(qkv=(8 * HEAD_DIM, HIDDEN)),
            (x,),
            (*dheads, (), dy),
        ),
        "attention_out": (
            plain.attention_out,
            {"out": normal(1, HIDDEN, INNER, dtype=BF16, scale=0.1)},
            (o, x),
            dy,
        ),
        "gated_mlp": (
            functools.partial(plain.gated_mlp, norm=NORM, gate="silu"),
            weights(gate_up=(2, INNER, HIDDEN), down=(HIDDEN, INNER)),
            (x,),
            dy,
        ),
    }


HISTORIES = {
    "attention_in": ("qkv_grad",),
    "attention_out": ("out_grad",),
    "gated_mlp": ("gate_up_grad", "down_grad"),
}
SEGMENTS = slow_except(["attention_in", "gated_mlp"], HISTORIES)


def positional(fn):
    """Returns a partial function with its bound keywords passed by position."""
    if not isinstance(fn, functools.partial):
        return fn
    return lambda params, *args: fn.func(params, *args, *fn.keywords.values())


def run(segment, amax=None, change=lambda params, args, dy: (params, args, dy)):
    """Returns the value, and the gradients of parameters and arguments.

    `amax` are the histories of delayed scaling; `change` alters the inputs.
    """
    _, params, args, dy = segments()[segment]
    params, args, dy = change(params, args, dy)
    if amax is not None:
        params = params | {"amax": amax}
    return passes(segment)(dy, params, *args)


@functools.cache
def passes(segment):
    fn, *_ = segments()[segment]

    @jax.jit
    def both(dy, *args):
        y, vjp = jax.vjp(positional(fn), *args)
        return y, vjp(dy)

    return both


@functools.cache
def maxima(segment):
    """Returns the amaxes that one step records, with histories of ones."""
    amax = {name: new_history(1.0) for name in HISTORIES[segment]}
    _, (grads, *_) = run(segment, amax)
    return {name: float(history[0]) for name, history in grads["amax"].items()}


@pytest.mark.parametrize("segment", SEGMENTS)
def test_maxima_of_what_was_quantized_are_recorded(segment):
    *_, dy = segments()[segment]
    actual = maxima(segment)

    def largest(*arrays):
        return max(np.abs(np.asarray(x, np.float32)).max() for x in arrays)

    if segment == "attention_in":  # RoPE keeps the length of a pair of halves.
        lengths = [
            np.hypot(*np.split(np.asarray(x, np.float32), 2, axis=-1)) for x in dy[:2]
        ]
        assert largest(dy[2]) <= actual["qkv_grad"] <= largest(*lengths, dy[2])
    elif segment == "attention_out":
        assert actual["out_grad"] == largest(dy)
    else:
        assert actual["down_grad"] == largest(dy)
        _, (grads, _) = run(segment)
        # The gradient of the weight is the sum over 48 tokens of these gradients times
        # the normed input.
        assert 0 < actual["gate_up_grad"] < largest(grads["gate_up"]) * 10


def test_maxima_in_float16_do_not_overflow():
    codes = jnp.full((2, 16), 448, jnp.float8_e4m3fn)
    scales = jnp.full(2, 0.25, jnp.float32), jnp.float32(0.25)
    y, maxima = matmul_codes(codes, codes, *scales, dtype=jnp.float16, keep_maxima=True)
    assert y.dtype == jnp.float16
    assert maxima.max() == 448**2  # 16 products, and scales of 1 / 4.


@pytest.mark.parametrize("segment", SEGMENTS)
def test_with_the_maxima_of_this_step_it_is_scaling_just_in_time(segment):
    amax = {k: new_history(v) for k, v in maxima(segment).items()}
    y, (params, *args) = run(segment, amax)
    just_in_time, (expected_params, *expected_args) = run(segment)
    np.testing.assert_array_equal(
        jax.tree.leaves(y)[0], jax.tree.leaves(just_in_time)[0]
    )
    del params["amax"]
    actual = jax.tree.leaves((params, args))
    expected = jax.tree.leaves((expected_params, expected_args))
    for a, b in zip(actual, expected, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        # Two just-in-time scales come from bounds, so only the smallest codes differ.
        np.testing.assert_allclose(a, b, atol=1e-3 * np.abs(b).max())


@pytest.mark.parametrize("segment", SEGMENTS)
def test_what_outgrows_its_history_saturates_and_settles(segment):
    small = {k: new_history(v / 64) for k, v in maxima(segment).items()}
    _, (grads, *remaining) = run(segment, small)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((grads, remaining)))
    again = grads
    # Gradients computed from saturated gradients are too small themselves.
    for _ in range(2):
        _, (again, *_) = run(segment, again["amax"])
    _, (expected, *_) = run(segment)
    for name in set(expected) - {"norm"}:
        clipped, settled, right = (
            np.asarray(g[name], np.float64) for g in (grads, again, expected)
        )
        distance = np.linalg.norm(settled - right)
        assert distance < 0.02 * np.linalg.norm(right)
        assert distance < 0.1 * np.linalg.norm(clipped - right)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("segment", SEGMENTS)
def test_what_is_not_finite_is_not_hidden_and_not_remembered(segment, bad):
    def change(params, args, dy):
        leaves, treedef = jax.tree.flatten(dy)
        leaves[0] = leaves[0].at[(0,) * leaves[0].ndim].set(bad)
        return params, args, treedef.unflatten(leaves)

    amax = {k: new_history(v) for k, v in maxima(segment).items()}
    _, (grads, *_) = run(segment, amax, change)
    wide = {k: v for k, v in grads.items() if k not in ("amax", "norm")}
    assert all(np.isnan(x).any() for x in jax.tree.leaves(wide))
    for name, history in grads["amax"].items():
        assert np.isfinite(history).all(), name
        assert history[0] == np.float32(maxima(segment)[name])


def test_histories():
    history = new_history(3.0)
    assert (history.shape, float(history.max())) == ((LENGTH,), 3.0)
    history = recorded(history, jnp.float32(0.5))
    np.testing.assert_array_equal(history, [0.5] + [0] * (LENGTH - 1))
    for largest in (0.0, np.inf, np.nan):
        longer = recorded(history, jnp.float32(largest))
        np.testing.assert_array_equal(longer[:2], [0.5, 0.5])
    np.testing.assert_array_equal(recorded(history, None), history)
    for step in range(LENGTH):
        assert float(history.max()) == 0.5
        history = recorded(history, jnp.float32(0.25))
        del step
    assert float(history.max()) == 0.25
    # The largest code of E5M2 is 57,344.
    assert delayed_scale(history, coat.E5M2) == 2.0**-17
    bound = kernels.Bound((jnp.float32([0.0625, 0.125]),), 2.0)
    assert kernels.tensor_scales(bound, dtype=coat.E5M2.dtype) == (2.0**-17,)


def small_llama(**how):
    config = llama.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        **how,
    )
    return nnx.merge(*parameters(lambda: llama.Llama(config, rngs=nnx.Rngs(0))))


def test_histories_go_on_where_weights_were_quantized_before():
    model = small_llama(scaling="delayed")
    nnx.jit(llama.Llama.quantize_weights)(model)
    graph, params, remaining = nnx.split(model, nnx.Param, ...)
    histories, codes = nnx.split_state(remaining, coat.OverwriteWithGradient, ...)

    def loss(histories):
        model = nnx.merge(graph, params, histories, codes)
        return llama.cross_entropy(model, *jnp.zeros((2, 1, 8), jnp.int32))

    after = compiled(jax.grad(loss), histories)["layers"]["amax"]
    before = histories["layers"]["amax"]
    for name in before:
        assert not np.array_equal(after[name][...], before[name][...])


def test_in_linen_it_is_the_collection_that_train_states_overwrite():
    layer = nnx.bridge.to_linen(DecoderLayer, 32, 64, 2, 1, 16, scaling="delayed")
    x = normal(1, 2, 8, 32, dtype=BF16)
    variables = compiled(layer.init, jax.random.key(0), x)
    state = TrainState.create(
        apply_fn=layer.apply, params=dict(variables), tx=optax.sgd(0.0)
    )
    gradient = jax.grad(lambda p: layer.apply(p, x).astype(jnp.float32).sum())
    grads = compiled(gradient, state.params)
    params = state.apply_gradients(grads=grads).params
    history = params["_overwrite_with_gradient"]["amax"]["down_grad"]
    np.testing.assert_array_equal(history[:2], [1.0, 0.0])
    np.testing.assert_array_equal(params["params"]["down"], variables["params"]["down"])


def test_scaling_is_checked():
    sizes = (32, 64, 2, 1, 16)
    with pytest.raises(ValueError, match=r"scaling must be one of .* got 'later'"):
        DecoderLayer(*sizes, scaling="later", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"needs the FP8 flow, not 'te'"):
        DecoderLayer(*sizes, recipe="te", scaling="delayed", rngs=nnx.Rngs(0))
