"""Tests of `fp8_remat` around flash attention, which saves statistics."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.gradients import compiled, fake, value_and_vjp
from helpers.versions import needs_kernels
from jax.experimental import pallas as pl

import coat_jax as coat
from coat_jax.remat.policies import products_saveable
from pallas_kernels.dispatch import stand_ins

SHAPE = 2, 64, 2, 64
BESIDE_STATISTICS = "wide, a kernel reads it beside statistics"
saving = functools.partial(coat.fp8_remat, params_argnums=())
rerunning = functools.partial(saving, rerun_attention=True)


def scores(q, k):
    """Returns float32 scores [b, n, s, t]."""
    wide = (x.astype(jnp.float32) for x in (q, k))
    return jnp.einsum("bsnd,btnd->bnst", *wide) / SHAPE[-1] ** 0.5


def attention(q, k, v):
    """Computes attention in float32."""
    weights = jax.nn.softmax(scores(q, k), axis=-1)
    return jnp.einsum("bnst,btnd->bsnd", weights, v.astype(jnp.float32))


def kernel(function, results):
    """Returns a Pallas kernel that computes `function` of complete arrays."""

    def body(*refs):
        arguments, out = refs[: len(refs) - len(results)], refs[-len(results) :]
        for ref, x in zip(out, function(*(ref[...] for ref in arguments)), strict=True):
            ref[...] = x.astype(ref.dtype)

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results]
    return pl.pallas_call(body, out_shape=shapes, interpret=True)


def forward(q, k, v, *others):
    def results(q, k, v, *others):
        return attention(q, k, v), jax.nn.logsumexp(scores(q, k), axis=-1)

    batch, length, heads, _ = SHAPE
    statistics = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
    o, saved = kernel(results, (q, statistics))(q, k, v, *others)
    return o, (q, k, v, o, saved)


def backward(saved, do, *others):
    def gradients(q, k, v, o, statistics, do):
        q, k, v, o, do = (x.astype(jnp.float32) for x in (q, k, v, o, do))
        weights = jnp.exp(scores(q, k) - statistics[..., None])
        slopes = jnp.einsum("bsnd,btnd->bnst", do, v)
        means = jnp.einsum("bsnd,bsnd->bns", do, o)
        d = weights * (slopes - means[..., None]) / SHAPE[-1] ** 0.5
        return (
            jnp.einsum("bnst,btnd->bsnd", d, k),
            jnp.einsum("bnst,bsnd->btnd", d, q),
            jnp.einsum("bnst,bsnd->btnd", weights, do),
        )

    run = kernel(lambda *arrays: gradients(*arrays[:6]), saved[:3])
    return tuple(run(*saved, do, *others))


@jax.custom_vjp
def flash(q, k, v):
    """Computes attention with kernels that save what cuDNN's save."""
    return forward(q, k, v)[0]


flash.defvjp(forward, backward)


@pytest.fixture
def arrays(rng):
    """Returns queries, keys, values and a cotangent, with sharp probabilities."""
    normal = [jnp.asarray(rng.normal(size=SHAPE), jnp.bfloat16) for _ in range(4)]
    q, *remaining = normal
    return 3 * q, *remaining


def copied(x):
    """Returns `x` as the backward pass reads it from an FP8 copy in groups of 16."""
    return jnp.asarray(fake(x, 16))


def test_backward_is_exact_by_default(arrays):
    *inputs, do = arrays
    results = (value_and_vjp(fn, do, *inputs) for fn in (saving(flash), flash))
    for actual, expected in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))


def test_default_quantizes_what_the_kernel_does_not_read(arrays, rng):
    x, *_ = arrays
    w = jnp.asarray(rng.normal(size=(3, SHAPE[-1], SHAPE[-1])), jnp.bfloat16)

    def block(w, x):
        q, k, v = (x @ each for each in w)
        return jnp.sin(flash(q, k, v))

    rows = coat.residual_report(coat.fp8_remat(block), w, x).rows
    saved = sorted(row.kept for row in rows if row.shape == SHAPE)
    # The copy is of the matmuls' input. Backward of the sine reads the output.
    assert saved == ["E4M3, groups of 128", *[BESIDE_STATISTICS] * 4]


def test_another_fp8_remat_around_it_saves_and_computes_the_same(arrays, rng):
    x, _, _, do = arrays
    w = jnp.asarray(rng.normal(size=(3, SHAPE[-1], SHAPE[-1])), jnp.bfloat16)

    def block(w, x):
        return flash(*(x @ each for each in w))

    once, twice = coat.fp8_remat(block), coat.fp8_remat(coat.fp8_remat(block))
    rows = coat.residual_report(twice, w, x).rows
    kept = [row.kept for row in rows if row.shape == SHAPE]
    assert kept.count(BESIDE_STATISTICS) == 4
    results = (value_and_vjp(fn, do, w, x) for fn in (twice, once))
    for actual, expected in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))


@jax.custom_vjp
def masked_flash(q, k, v, bias):
    """Computes attention with kernels that read a bias, as cuDNN's read a mask."""
    return _masked_forward(q, k, v, bias)[0]


def _masked_forward(q, k, v, bias):
    o, saved = forward(q, k, v, bias)
    return o, (saved, bias)


def _masked_backward(saved, do):
    return *backward(saved[0], do, saved[1]), None


masked_flash.defvjp(_masked_forward, _masked_backward)


def test_a_mask_as_numbers_is_made_of_its_booleans_again(arrays):
    *inputs, _ = arrays
    mask = jnp.ones((SHAPE[0], 1, SHAPE[1], SHAPE[1]), bool)

    def block(q, k, v, mask):
        return masked_flash(q, k, v, jnp.where(mask, 0.0, -1e9).astype(jnp.bfloat16))

    rows = coat.residual_report(saving(block), *inputs, mask).rows
    masks = [row for row in rows if row.shape == mask.shape]
    assert [(row.dtype, row.is_argument) for row in masks] == [(jnp.bool_, True)]


def test_an_output_that_is_read_in_another_shape_is_saved_once(arrays, rng):
    *inputs, _ = arrays
    w = jnp.asarray(rng.normal(size=(SHAPE[2] * SHAPE[3], 32)), jnp.bfloat16)

    def block(w, *inputs):
        return flash(*inputs).reshape(-1, len(w)) @ w

    rows = coat.residual_report(coat.fp8_remat(block), w, *inputs).rows
    saved = [row.kept for row in rows if not row.is_argument]
    assert (
        saved.count(BESIDE_STATISTICS) == 1
    )  # Queries, keys and values are arguments.
    assert not any(row.shape == (SHAPE[0] * SHAPE[1], len(w)) for row in rows)


def amax_kernel(x):
    """Returns the amax as a kernel's float32 statistic."""
    statistics = jax.ShapeDtypeStruct((), jnp.float32)
    with jax.named_scope("statistic of all"):
        (amax,) = kernel(lambda x: (jnp.max(jnp.abs(x)),), (statistics,))(x)
    return amax


@jax.custom_vjp
def scaled(x):
    """Divides x by a kernel's amax; the backward pass does not read x."""
    return x / amax_kernel(x)


def scaled_forward(x):
    amax = amax_kernel(x)
    return x / amax, amax


def scaled_backward(amax, dy):
    (dx,) = kernel(lambda dy, amax: (dy / amax,), (dy,))(dy, amax)
    return (dx,)


scaled.defvjp(scaled_forward, scaled_backward)


def test_statistics_whose_operands_backward_does_not_read_change_nothing(arrays):
    x, *_ = arrays

    def function(w, x):
        y = jnp.sin(x)
        return scaled(y.astype(jnp.float32)), y @ w

    args = jnp.eye(SHAPE[-1], dtype=x.dtype), x
    for option in (False, True):
        light = coat.fp8_remat(function, rerun_attention=option)
        saved = [row.kept for row in coat.residual_report(light, *args).rows]
        assert any(each.startswith("E4M3") for each in saved)
        assert BESIDE_STATISTICS not in saved
    y, backward = jax.vjp(light, *args)
    forward, backward = (
        jax.jit(fn).lower(*xs).compile().as_text()
        for fn, xs in ((light, args), (backward, (y,)))
    )
    # The statistic is not computed again.
    assert "statistic of all" in forward
    assert "statistic of all" not in backward


def test_backward_is_that_of_attention_to_the_copies(arrays):
    *inputs, do = arrays
    out, grads = value_and_vjp(rerunning(flash), do, *inputs)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(jax.jit(flash)(*inputs)))
    decoded = [copied(x).astype(jnp.float32) for x in inputs]
    _, exact = value_and_vjp(attention, do.astype(jnp.float32), *decoded)
    for actual, expected in zip(grads, exact, strict=True):
        close = 2**-7 * np.abs(expected).max()  # Results are rounded to bfloat16.
        np.testing.assert_allclose(np.float32(actual), expected, rtol=0, atol=close)


def test_neither_output_nor_statistics_are_saved(arrays):
    *inputs, _ = arrays
    rows = coat.residual_report(rerunning(flash), *inputs).rows
    codes = [row.shape for row in rows if row.dtype == jnp.float8_e4m3fn]
    assert codes == [SHAPE] * 3
    assert not any(row.dtype == jnp.float32 for row in rows)


def test_what_follows_from_the_output_follows_from_the_copies(arrays, rng):
    *inputs, _ = arrays
    w = jnp.asarray(rng.normal(size=(SHAPE[2] * SHAPE[3], 32)), jnp.float32)

    def block(w, *inputs):
        return flash(*inputs).reshape(*SHAPE[:2], -1).astype(w.dtype) @ w

    light = coat.fp8_remat(block, rerun_attention=True)
    rows = coat.residual_report(light, w, *inputs).rows
    assert sum(row.dtype == jnp.float8_e4m3fn for row in rows) == 3
    actual = compiled(jax.grad(lambda w: jnp.sum(light(w, *inputs))), w)
    o = np.float64(attention(*map(copied, inputs))).reshape(-1, len(w))
    expected = np.broadcast_to(o.sum(0)[:, None], w.shape)
    close = 2**-7 * np.abs(o).sum(0).max()  # The output is rounded to bfloat16.
    np.testing.assert_allclose(actual, expected, rtol=0, atol=close)


@pytest.fixture
def block(arrays, rng):
    """Returns a function of x with attention after matmuls, and an x."""
    x = arrays[1].reshape(*SHAPE[:2], -1)
    w = jnp.asarray(rng.normal(size=(3, *2 * x.shape[-1:])) / 6, jnp.bfloat16)

    def function(x):
        q, k, v = ((x @ each).reshape(SHAPE) for each in w)
        return jnp.sin(flash(3 * jnp.tanh(q), k, v))

    return function, x


def gradient(function, x, do):
    return np.asarray(value_and_vjp(function, do, x)[1][0])


def test_a_policy_that_saves_attention_keeps_what_it_follows_from(block, arrays):
    function, x = block
    light = saving(function, policy=products_saveable)
    rows = coat.residual_report(light, x).rows
    # The results of the three matmuls, and of the kernel.
    assert [row.kept for row in rows].count(BESIDE_STATISTICS) == 4
    expected = gradient(function, x, arrays[-1])
    np.testing.assert_array_equal(gradient(light, x, arrays[-1]), expected)


def test_attention_runs_again_whether_a_policy_saves_it_or_not(block, arrays):
    function, x = block
    policies = products_saveable, jax.checkpoint_policies.dots_saveable
    again, expected = (
        gradient(rerunning(function, policy=policy), x, arrays[-1])
        for policy in policies
    )
    np.testing.assert_array_equal(again, expected)
    assert np.any(again != gradient(function, x, arrays[-1]))


def test_arguments_that_stay_wide_keep_the_kernels_results(arrays):
    *inputs, _ = arrays
    plain = coat.residual_report(rerunning(flash, where=lambda _: False), *inputs)
    assert any(row.dtype == jnp.float32 for row in plain.rows)  # The statistics.


REPEATS = {
    "repeat": lambda x: jnp.repeat(x, 2, axis=2),
    "tile": lambda x: jnp.tile(x, (1, 1, 2, 1)),
    "broadcast": lambda x: jnp.broadcast_to(x[:, :, None], (*x.shape[:2], 2, 1, 64)),
    "jitted": jax.jit(lambda x: jnp.repeat(x, 2, axis=2)),
    "cast": lambda x: jnp.repeat(x.astype(jnp.float32), 2, 2).astype(jnp.bfloat16),
}


@pytest.mark.parametrize("repeat", REPEATS.values(), ids=REPEATS)
def test_keys_that_heads_share_are_saved_once(repeat, arrays):
    def block(q, k, v):
        k, v = (repeat(jnp.tanh(x)).reshape(q.shape) for x in (k, v))
        return flash(q, k, v)

    q, k, v, do = arrays
    k, v = k[:, :, :1], v[:, :, :1]
    report = coat.residual_report(saving(block), q, k, v)
    saved = [row.shape for row in report.rows if row.dtype == jnp.bfloat16]
    assert sorted(saved) == [k.shape, k.shape, SHAPE, SHAPE]  # Queries are an argument.
    assert not any(row.dtype == jnp.float8_e4m3fn for row in report.rows)
    actual = value_and_vjp(saving(block), do, q, k, v)
    expected = value_and_vjp(block, do, q, k, v)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@needs_kernels
def test_cudnns_attention_saves_queries_keys_and_values_alone():
    x = jax.ShapeDtypeStruct((2, 1024, 8, 128), jnp.bfloat16)
    with stand_ins.for_hopper():
        rows = coat.residual_report(rerunning(stand_ins.attention), x, x, x).rows
    assert [row.dtype for row in rows].count(jnp.float8_e4m3fn) == 3
    assert all(row.dtype != jnp.float32 for row in rows)


def test_other_values_of_the_option_are_refused():
    with pytest.raises(ValueError, match="rerun_attention must be True or False, got"):
        rerunning(flash, rerun_attention="cudnn")
