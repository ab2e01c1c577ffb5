"""Tests that `fp8_ragged_dot` is `jax.lax.ragged_dot` of quantized numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import oracle
from helpers.dots import tensor
from helpers.gradients import fake
from helpers.marks import slow
from jax import lax

import coat_jax as coat
from pallas_kernels import explain

SIZES = {
    "random": [20, 7, 0, 29, 8],
    "all rows": [10, 16, 32, 0, 6],
    "single rows": [1, 1, 1, 1, 1],
    "one": [0, 0, 64, 0, 0],
    "none": [0, 0, 0, 0, 0],
}
M, K, N = 64, 48, 40


def arrays(dtype=np.float32, seed=0):
    """Returns random tokens, weights of several magnitudes, and gradients."""
    rng = np.random.default_rng(seed)
    shapes = (M, K), (5, K, N), (M, N)
    x, w, dy = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    w *= np.exp2(rng.uniform(-4, 4, (5, 1, 1))).astype(np.float32)
    return [np.array(jnp.asarray(v, dtype).astype(jnp.float32)) for v in (x, w, dy)]


@functools.partial(jax.jit, static_argnames=("dot", "preferred"))
def results(x, w, sizes, dy, dot=coat.fp8_ragged_dot, preferred=None):
    """Returns the result of a matmul, and the gradients of x and w."""

    def product(x, w):
        return dot(x, w, sizes, preferred_element_type=preferred)

    y, vjp = jax.vjp(product, x, w)
    return y, *vjp(dy.astype(y.dtype))


def in_float64(x, w, sizes, dy):
    """Computes the result of `jax.lax.ragged_dot` and both gradients in float64."""
    x, w, dy = (np.asarray(v, np.float64) for v in (x, w, dy))
    y, dx, dw = np.zeros((len(x), w.shape[-1])), np.zeros(x.shape), np.zeros(w.shape)
    for e, end in enumerate(np.cumsum(sizes)):
        of_expert = slice(end - sizes[e], end)
        y[of_expert], dx[of_expert] = x[of_expert] @ w[e], dy[of_expert] @ w[e].T
        dw[e] = x[of_expert].T @ dy[of_expert]
    return y, dx, dw


def expected(x, w, sizes, dy):
    """Computes the result and both gradients in float64, from quantized numbers."""
    used = max(sum(sizes), 1)
    x_rows = fake(x, K).astype(np.float64)
    columns = fake(np.swapaxes(w, 1, 2), K).astype(np.float64)
    # In backward weights have a scale per expert, and the rest a scale per tensor.
    x_tensor, gradient = tensor(x[:used]), tensor(dy[:used], oracle.E5M2)
    experts = [tensor(expert) for expert in w]
    y, dx, dw = np.zeros((M, N)), np.zeros((M, K)), np.zeros(w.shape)
    end = 0
    for e, size in enumerate(sizes):
        start, end = end, end + size
        y[start:end] = x_rows[start:end] @ columns[e].T
        dx[start:end] = gradient[start:end] @ experts[e].T
        dw[e] = x_tensor[start:end].T @ gradient[start:end]
    return y, dx, dw


@pytest.mark.parametrize("kind", SIZES)
def test_results_are_those_of_quantized_numbers(kind):
    sizes = SIZES[kind]
    x, w, dy = arrays()
    exact = expected(x, w, sizes, dy)
    for array in (x, dy):  # Rows of no group are not read.
        array[sum(sizes) :] = np.nan
    for found, right in zip(results(x, w, jnp.asarray(sizes), dy), exact, strict=True):
        assert (found.shape, found.dtype) == (right.shape, jnp.float32)
        unit = np.abs(right).max() or 1.0
        np.testing.assert_allclose(found, right, rtol=0, atol=1e-6 * unit)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, slow(jnp.float16)])
def test_dtypes_are_those_of_ragged_dot(dtype):
    x, w, dy = (jnp.asarray(v, dtype) for v in arrays(dtype))
    sizes = jnp.asarray(SIZES["random"])
    for preferred in (None, jnp.float32):
        run = functools.partial(results, preferred=preferred)
        expected_types = jax.eval_shape(
            functools.partial(run, dot=lax.ragged_dot), x, w, sizes, dy
        )
        assert jax.eval_shape(run, x, w, sizes, dy) == expected_types
    exact = in_float64(x, w, SIZES["random"], dy)
    for ours, right in zip(run(x, w, sizes, dy), exact, strict=True):
        error = np.asarray(ours, np.float64) - right
        assert np.linalg.norm(error) < 0.1 * np.linalg.norm(right)


def test_experts_with_other_magnitudes_keep_their_digits():
    """A scale for all experts would round small ones to zero in the backward pass."""
    x, w, dy = arrays()
    w *= np.exp2(np.float32([-30, 0, 30, 10, -10]))[:, None, None]
    sizes = SIZES["random"]
    _, dx, _ = results(x, w, jnp.asarray(sizes), dy)
    _, exact, _ = in_float64(x, w, sizes, dy)
    for e, end in enumerate(np.cumsum(sizes)):
        of_expert = slice(end - sizes[e], end)
        error = np.linalg.norm(dx[of_expert] - exact[of_expert])
        assert error <= 0.1 * np.linalg.norm(exact[of_expert])


def test_tokens_are_saved_in_fp8():
    x, w, _ = (jnp.asarray(v, jnp.bfloat16) for v in arrays())
    sizes = jnp.asarray(SIZES["random"])

    def residuals(x, w):
        return jax.vjp(lambda x, w: coat.fp8_ragged_dot(x, w, sizes), x, w)[1]

    saved = jax.tree.leaves(jax.eval_shape(residuals, x, w))
    floats = [v for v in saved if jnp.issubdtype(v.dtype, jnp.floating)]
    by_dtype = {v.dtype: v.shape for v in floats if v.size > 100}
    padded = (M + 127 * 5) // 128 * 128
    assert by_dtype == {
        jnp.dtype("bfloat16"): w.shape,
        jnp.dtype("float8_e4m3fn"): (K, padded),
    }


def test_few_rows_are_left_to_jax():
    x, w, _ = arrays()
    sizes = jnp.asarray([3, 0, 0, 5, 1])
    found, right = (
        dot(x[:15], w, sizes) for dot in (coat.fp8_ragged_dot, lax.ragged_dot)
    )
    np.testing.assert_array_equal(found, right)


def test_vmap_and_scan_and_checkpoint():
    x, w, dy = arrays()
    sizes = jnp.asarray([SIZES["random"], SIZES["all rows"]])
    both = [jnp.stack([v, v[::-1]]) for v in (x, dy)]

    def gradients(x, sizes, dy):
        dot = jax.checkpoint(coat.fp8_ragged_dot)
        y, vjp = jax.vjp(lambda x, w: dot(x, w, sizes), x, jnp.asarray(w))
        return y, *vjp(dy)

    arguments = both[0], sizes, both[1]
    one_by_one = [jax.jit(gradients)(*(v[i] for v in arguments)) for i in range(2)]
    stacked = jax.tree.map(lambda *v: jnp.stack(v), *one_by_one)
    mapped = jax.jit(jax.vmap(gradients))(*arguments)
    _, scanned = jax.jit(
        lambda v: lax.scan(lambda _, v: (None, gradients(*v)), None, v)
    )(arguments)
    for found in (mapped, scanned):
        for a, b in zip(found, stacked, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)


def test_no_rank_is_promoted():
    x, w, sizes = jnp.ones((32, 16)), jnp.ones((2, 16, 8)), jnp.array([10, 20])
    with jax.numpy_rank_promotion("raise"):
        jax.eval_shape(jax.grad(lambda w: coat.fp8_ragged_dot(x, w, sizes).sum()), w)


def test_what_does_not_go_together_is_named():
    x, w, _ = arrays()
    with pytest.raises(ValueError, match="lhs must be floating, got dtype int32"):
        coat.fp8_ragged_dot(jnp.ones((16, 4), int), w, jnp.ones(5, int))
    with pytest.raises(TypeError):
        coat.fp8_ragged_dot(x, w[:, :7], jnp.ones(5, int))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["random", "zipf"])
def test_kernels_agree_with_float64_on_a_gpu(kind):
    rng = np.random.default_rng()
    m, e, k, n = 4096, 8, 1024, 1536
    shares = np.ones(e) if kind == "random" else 1 / np.arange(1, e + 1)
    sizes = rng.multinomial(m - 300, shares / shares.sum())
    x, w, dy = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
        for shape in ((m, k), (e, k, n), (m, n))
    )
    run = coat.fp8_ragged_dot
    choices = explain(run, x, w, jnp.asarray(sizes)).choices
    in_jnp = {c.operation for c in choices if c.implementation != "mosaic"}
    assert in_jnp == {"tensor_scales"}  # XLA is as fast with one array.
    wide = [np.asarray(v.astype(jnp.float32), np.float64) for v in (x, w, dy)]
    found = results(x, w, jnp.asarray(sizes), dy)
    exact = in_float64(*wide[:2], sizes, wide[2])
    for ours, right in zip(found, exact, strict=True):
        error = np.asarray(ours.astype(jnp.float32), np.float64) - right
        # The rounding of both operands to E4M3, or of one to E5M2.
        assert np.linalg.norm(error) < 0.08 * np.linalg.norm(right)
