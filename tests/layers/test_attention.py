"""Tests which kernel computes attention, and what is saved for its backward pass."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.attention import oracle

import coat_jax as coat
from coat_jax.layers import attention
from coat_jax.layers.attention import Scores
from pallas_kernels.dispatch import stand_ins


@jax.custom_vjp
def flash(q, k, v, segment_ids):
    """Computes q * sum(k) + v instead of attention, with an empty residual."""
    return q * jnp.sum(k) + v


def _flash_fwd(q, k, v, segment_ids):
    empty = jnp.zeros((0, 3), jnp.bfloat16)
    return flash(q, k, v, segment_ids), (q, jnp.sum(k), k, empty)


def _flash_bwd(residuals, do):
    q, total, k, empty = residuals
    assert (empty.shape, empty.dtype) == ((0, 3), jnp.bfloat16)
    return do * total, jnp.full_like(k, jnp.sum(do * q)), do, None


flash.defvjp(_flash_fwd, _flash_bwd)


def _arrays():
    draw = np.random.default_rng(0).standard_normal
    return [jnp.asarray(draw((1, 4, 2, 8)), jnp.float32) for _ in range(4)]


@pytest.mark.parametrize("copies", [False, True])
def test_backward_gets_empty_residuals_that_are_not_saved(copies):
    q, k, v, do = _arrays()
    saved = (q + 1, k, v) if copies else ()

    def run(q, k, v):
        return attention._saving(flash, q, k, v, saved, None)

    _, vjp = jax.vjp(run, q, k, v)
    assert all(x.size for x in jax.tree.leaves(vjp))
    dq, dk, dv = map(np.asarray, vjp(do))
    q, k, do = (np.asarray(x, np.float64) for x in (saved[0] if copies else q, k, do))
    np.testing.assert_allclose(dq, do * k.sum(), rtol=1e-5)
    np.testing.assert_allclose(dk, np.full_like(k, (do * q).sum()), rtol=1e-5)
    np.testing.assert_array_equal(dv, do)


IDS = jnp.zeros((1, 256), jnp.int32)
LOCAL = jnp.bool_(True)


@pytest.mark.parametrize(
    ("scores", "segment_ids", "local", "head_dim", "kernel"),
    [
        (Scores(), None, None, 128, "cudnn"),
        (Scores(window=64), None, None, 128, "cudnn"),
        (Scores(window=256), None, LOCAL, 128, "cudnn"),
        (Scores(), IDS, None, 96, "cudnn"),
        (Scores(window=64), None, LOCAL, 128, "own"),
        (Scores(window=64), IDS, None, 128, "own"),
        (Scores(), IDS, None, 64, "own"),
        (Scores(softcap=50.0), None, None, 128, "own"),
        (Scores(), None, None, 256, "own"),
        (Scores(), None, None, 192, "cudnn"),
    ],
)
def test_the_kernel_that_skips_what_does_not_count_runs_on_hopper(
    scores, segment_ids, local, head_dim, kernel
):
    x = jax.ShapeDtypeStruct((1, 256, 2, head_dim), jnp.bfloat16)

    def run(q, k, v):
        options = {"scores": scores, "local": local}
        return attention.causal_attention(q, k, v, (), segment_ids, **options)

    with stand_ins.for_hopper():
        program = str(jax.make_jaxpr(run)(x, x, x))
    assert ("coat_kernel" in program) == (kernel == "own")
    assert ("dot_product_attention_fwd" in program) == (kernel == "cudnn")
    assert "dot_general" not in program


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(
    "masks",
    [
        {},
        {"window": 5},
        {"window": 50},
        {"causal": False},
        {"ids": True},
        {"ids": True, "window": 1},
    ],
)
def test_attention_and_its_gradients(softcap, masks):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(2, 24, heads, 8) for heads in (4, 2, 2, 4)]
    q, k, v, do = map(jax.random.normal, keys, shapes)
    documents = np.repeat([[0, 1, 4], [2, 3, 3]], 8, axis=1)
    ids = documents if "ids" in masks else None
    scores = {"scale": 0.5, "softcap": softcap}
    scores |= {name: value for name, value in masks.items() if name != "ids"}

    @jax.jit
    def passes(q, k, v, do):
        def run(q, k, v):
            segment_ids = None if ids is None else jnp.asarray(ids)
            return coat.attention(q, k, v, segment_ids=segment_ids, **scores)

        out, vjp = jax.vjp(run, q, k, v)
        return out, *vjp(do)

    out, _, *grads = oracle(q, k, v, do, ids=ids, **scores)
    for actual, expected in zip(passes(q, k, v, do), (out, *grads), strict=True):
        np.testing.assert_allclose(actual, expected, atol=2e-5)


def _heads(length):
    """Returns the abstract queries, keys and values of four heads and two."""
    shapes = [(2, length, heads, 8) for heads in (4, 2, 2)]
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 3])
def test_an_export_leaves_the_length_open(window, softcap):
    run = jax.jit(partial(coat.attention, window=window, softcap=softcap))
    (length,) = jax.export.symbolic_shape("s")
    exported = jax.export.export(run)(*_heads(length))
    for length in (2, 7):
        arrays = [jax.random.normal(jax.random.key(1), x.shape) for x in _heads(length)]
        actual = exported.call(*arrays)
        np.testing.assert_allclose(actual, run(*arrays), atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"softcap": 2.0}])
def test_attention_of_float16_runs_on_a_cpu(options):
    arrays = [jax.random.normal(jax.random.key(1), x.shape) for x in _heads(7)]

    def passes(arrays):
        out, vjp = jax.vjp(partial(coat.attention, **options), *arrays)
        return out, *vjp(out)

    half = jax.tree.map(lambda x: x.astype(jnp.float16), arrays)
    for actual, expected in zip(passes(half), passes(arrays), strict=True):
        assert actual.dtype == jnp.float16
        np.testing.assert_allclose(actual, expected, atol=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 4, "causal": False}, "a window needs causal=True, got window=4"),
        ({"window": 0}, "window must be positive, got 0"),
        ({"softcap": -1.0}, "softcap must be positive, got -1.0"),
        ({"softcap": "50"}, "softcap must be positive, got '50'"),
        ({"scale": jnp.float32(1)}, "scale must be a Python number, static under jit"),
        ({"causal": "no"}, "causal must be True or False, got 'no'"),
        ({"window": 2.5}, "window must be a whole number, got 2.5"),
        ({"segment_ids": jnp.zeros((1, 3), int)}, r"segment ids must be \(1, 4\)"),
        ({"segment_ids": jnp.zeros((1, 4))}, "segment ids must be integers, got float"),
    ],
)
def test_attention_refuses(options, message):
    q, *_ = _arrays()
    with pytest.raises(ValueError, match=message):
        coat.attention(q, q, q, **options)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_attention_refuses_other_arrays(softcap):
    q, *_ = _arrays()
    low, whole = q.astype(jnp.bfloat16), q.astype(int)
    with pytest.raises(ValueError, match="one floating dtype, got bfloat16, float32"):
        coat.attention(low, q, q, softcap=softcap)
    with pytest.raises(ValueError, match="one floating dtype, got int32, int32"):
        coat.attention(whole, whole, whole, softcap=softcap)
    with pytest.raises(ValueError, match=r"four axes, .* got \(4, 2, 8\)"):
        coat.attention(q[0], q[0], q[0], softcap=softcap)
    assert coat.attention(q[:, :0], q[:, :0], q[:, :0], softcap=softcap).size == 0


def test_attention_refuses_a_traced_window():
    q, *_ = _arrays()
    with pytest.raises(ValueError, match="window must be a whole number, got"):
        jax.jit(lambda w: coat.attention(q, q, q, window=w))(4)


def test_attention_refuses_other_keys():
    q, *_ = _arrays()
    with pytest.raises(ValueError, match="n a multiple of m, got"):
        coat.attention(q, q[:, :3], q[:, :3])
