"""Tests of softmax attention that a program writes out, and of near misses.

The rewritten programs run JAX's attention in place of cuDNN's, and are compared with
the programs as they were written.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.marks import slow_except
from helpers.versions import needs_kernels
from helpers.written_attention import (
    BF16,
    CAUSAL,
    GROUPED,
    HITS,
    MASKED,
    MISSES,
    B,
    D,
    K,
    N,
    T,
    added_bias_of_jax,
    added_minimum,
    added_minimum_in_groups,
    added_number,
    arguments,
    causal,
    in_float32,
    in_groups,
    keys_first,
    mapped,
    mixed,
    of_jax,
    of_jax_causal,
    of_linen,
    of_linen_causal,
    of_rotated_halves,
    scores,
    softmax,
    tril,
    two_masks,
    unmasked,
    usual,
)
from jax.extend import core

import coat_jax as coat
from coat_jax.fusion import attention as rewriting
from coat_jax.fusion import flash
from coat_jax.fusion.unseen import mean_of_values
from pallas_kernels.dispatch import stand_ins

pytestmark = pytest.mark.internals


@pytest.fixture
def calls(monkeypatch):
    """Returns a list with the mask's shape and `causal` of each attention call."""
    calls = []

    def flash_attention(q, k, v, *, mask, scale, causal):
        calls.append((mask is not None and mask.shape, causal))
        options = {"scale": scale, "is_causal": causal, "implementation": "xla"}
        # cuDNN's kernel adds masks to scores.
        bias = None if mask is None else jnp.where(mask, 0, -2e12).astype(q.dtype)
        return jax.nn.dot_product_attention(q, k, v, bias=bias, **options)

    monkeypatch.setattr(rewriting, "_has_kernel", lambda: True)
    monkeypatch.setattr(flash, "flash_attention", flash_attention)
    is_narrow = lambda q: q.dtype in (BF16, jnp.float16)  # noqa: E731
    monkeypatch.setattr(rewriting, "has_flash_attention", is_narrow)
    return calls


def rewritten(function, arrays):
    """Returns the rewritten function, or None if nothing is rewritten."""
    closed = jax.make_jaxpr(function)(*arrays)
    program = rewriting.attention(closed.jaxpr, (), ())
    if program is closed.jaxpr:
        return None
    return core.jaxpr_as_fun(core.ClosedJaxpr(program, closed.consts))


def with_gradients(function, arrays):
    *heads, mask = arrays
    y, vjp = jax.vjp(lambda q, k, v: function(q, k, v, mask), *heads)
    return y, *vjp(jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype))


def assert_same(function, arrays):
    new = rewritten(function, arrays)
    assert new is not None
    expected = with_gradients(function, arrays)
    actual = with_gradients(lambda *arrays: new(*arrays)[0], arrays)
    for y, reference in zip(actual, expected, strict=True):
        y, reference = (np.asarray(x, np.float64) for x in (y, reference))
        # BF16 rounds scores and probabilities, in either program or in both.
        assert np.linalg.norm(y - reference) <= 0.015 * np.linalg.norm(reference)


@pytest.mark.parametrize(("form", "call"), HITS.items())
def test_any_way_to_write_attention_is_found(form, call, calls):
    assert rewritten(form, arguments()) is not None
    assert calls == [call]


@pytest.mark.parametrize(("form", "call"), GROUPED.items())
def test_heads_that_share_keys_are_found(form, call, calls):
    assert rewritten(form, arguments(heads=K)) is not None
    assert calls == [call]


COMPUTED = [*((form, N) for form in HITS), *((form, K) for form in GROUPED)]
FAST = [(form, N) for form in (in_float32, keys_first, mapped, unmasked)]


@pytest.mark.parametrize(("form", "heads"), slow_except(FAST, COMPUTED))
def test_attention_that_is_found_is_computed(form, heads, calls):
    assert_same(form, arguments(heads))


@pytest.mark.parametrize("function", MISSES)
def test_what_is_not_attention_stays(function, calls):
    assert rewritten(function, arguments()) is None
    assert not calls


def test_float32_numbers_may_be_too_large_for_float16(calls):
    def function(q, k, v, mask):
        return usual(q.astype(jnp.float32) * 1e5, k.astype(jnp.float32) / 1e5, v, mask)

    *heads, mask = arguments()
    heads = [x.astype(jnp.float16) for x in heads]
    assert rewritten(function, (*heads, mask)) is None
    assert rewritten(usual, (*heads, mask)) is not None


def test_two_attentions_of_equal_scores_are_left_alone(calls):
    def function(q, k, v, mask):
        return usual(q, k, v, mask) + usual(q, k, v[::-1], mask)

    # Equal operations are merged, and both would read the probabilities.
    assert rewritten(function, arguments()) is None


def test_several_attentions_are_found_in_one_program(calls):
    def function(q, k, v, mask):
        return causal(usual(q, k, v, mask), k, v, mask)

    assert_same(function, arguments())
    assert calls == [MASKED, CAUSAL]


@pytest.mark.parametrize(
    "form",
    [
        usual,
        two_masks,
        of_linen,
        of_jax,
        in_groups,
        added_number,
        added_minimum,
        added_minimum_in_groups,
        added_bias_of_jax,
    ],
)
def test_queries_that_see_no_key_take_the_mean_of_all(form, calls):
    q, k, v, mask = arguments(heads=K if form in GROUPED else N)
    mask = mask.at[:, T // 2].set(False)
    assert_same(form, (q, k, v, mask))
    # The other queries have no part in these gradients.
    assert_same(lambda *arrays: form(*arrays)[:, T // 2], (q, k, v, mask))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_derivatives_of_a_query_that_sees_no_key(dtype):
    """Values have a large mean, and products of keys and values overflow float16."""
    rng = np.random.default_rng(0)
    scale, draw = 0.3, lambda n: rng.normal(size=(2, 64, n, D))
    q, k, v, do = draw(4), 300 + 50 * draw(2), 400 + draw(2), draw(4)
    arrays = [jnp.asarray(x, dtype) for x in (q, k, v, do)]
    with jax.numpy_dtype_promotion("strict"):
        y, vjp = jax.vjp(lambda *arrays: mean_of_values(*arrays, scale), *arrays[:3])
        actual = y, *vjp(arrays[3])
    q, k, v, do = (np.asarray(x, np.float64) for x in arrays)
    q, do = (x.reshape(2, 64, 2, 2, D) for x in (q, do))
    centred = v - v.mean(1, keepdims=True)
    dk = np.einsum("bsmgi,bsmgj,btmj->btmi", q, do, centred) * scale / 64
    dq = np.einsum("btmi,btmj,bsmgj->bsmgi", k, centred, do) * scale / 64
    dv = np.broadcast_to(do.sum((1, 3))[:, None] / 64, v.shape)
    mean = np.broadcast_to(v.mean(1)[:, None, :, None], q.shape)
    for x, reference in zip(actual, (mean, dq, dk, dv), strict=True):
        error = np.asarray(x, np.float64).reshape(reference.shape) - reference
        assert np.linalg.norm(error) < 0.005 * np.linalg.norm(reference)


def test_an_attention_of_attention_is_found_once(calls):
    def function(q, k, v, mask):
        return mixed(softmax(mixed(softmax(scores(q, k)), k).transpose(0, 2, 1, 3)), v)

    q, k, v, mask = (x[:, :N] for x in arguments())
    assert_same(function, (q[..., :N], k[..., :N], v[..., :N], mask))


@pytest.mark.parametrize("shape", [(0, T, N, D), (B, 0, N, D), (B, T, 0, D)])
def test_arrays_without_elements_stay(shape, calls):
    x = jnp.zeros(shape, BF16)
    assert rewritten(unmasked, (x, x, x, jnp.zeros((), bool))) is None


def test_nothing_is_rewritten_without_a_gpu():
    assert rewritten(causal, arguments()) is None


@needs_kernels
def test_residuals_have_no_scores():
    size = 1024

    def attend(x):
        q, k, v = (x.reshape(1, size, N, 64) * number for number in (1, 2, 3))
        s = jnp.where(tril(size), scores(q, k) * 0.125, -1e9)
        return mixed(softmax(s), v)

    x = jax.ShapeDtypeStruct((1, size, N * 64), BF16)
    for wrapped in (coat.fp8_remat(attend, params_argnums=()), coat.fp8(attend)):
        with stand_ins.for_hopper():
            report = coat.residual_report(wrapped, x)
        assert max(row.nbytes for row in report.rows) < N * size * size


def hiding_a_query(mask):
    return mask.at[:, 7].set(False)


def in_a_window(mask):
    shown = tril(mask.shape[-1]) & ~tril(mask.shape[-1], -32)
    return jnp.broadcast_to(shown, mask.shape)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("form", "head_dim", "change"),
    [
        (usual, 64, None),
        (usual, 64, in_a_window),
        (usual, 64, hiding_a_query),
        (of_jax, 256, None),
        (of_rotated_halves, 64, None),
        (of_linen_causal, 64, None),
        (of_jax_causal, 64, None),
        (of_jax_causal, 192, None),
        (of_jax_causal, 256, None),
    ],
)
def test_cudnn_computes_the_same(form, head_dim, change):
    rng = np.random.default_rng(0)
    length = 256
    q, k, v = (
        jnp.asarray(rng.normal(size=(2, length, N, head_dim)), BF16) for _ in range(3)
    )
    mask = jnp.asarray(rng.random((2, length, length)) > 0.3) | tril(length)
    if change:
        mask = change(mask)
    light = coat.fp8_remat(form, params_argnums=())
    compiled = jax.jit(with_gradients, static_argnums=0).lower(light, (q, k, v, mask))
    assert "__cudnn$fmha" in compiled.compile().as_text()
    actual = jax.jit(with_gradients, static_argnums=0)(light, (q, k, v, mask))
    expected = jax.jit(with_gradients, static_argnums=0)(form, (q, k, v, mask))
    for y, reference in zip(actual, expected, strict=True):
        y, reference = (np.asarray(x, np.float64) for x in (y, reference))
        assert np.linalg.norm(y - reference) < 0.02 * np.linalg.norm(reference)
