"""Tests that `fp8_remat` merges FP8 matmuls that read the same activations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers import oracle
from helpers.dots import assert_follows_autodiff, linear, tensor
from helpers.gradients import (
    assert_close,
    compiled,
    fake,
    saved,
    saved_bytes,
    value_and_vjp,
)
from helpers.marks import slow
from helpers.models import normal
from jax.extend import core

import coat_jax as coat
from coat_jax import fp8_dot_general, fp8_remat
from coat_jax.programs.graph import deduplicated, inlined
from pallas_kernels.versions import bodies_in_params

K, TOKENS = 64, 96


def three(weights, x):
    """Multiplies arrays of equal values, each computed from x, by the weights."""
    return [linear(x * 2.0, w.astype(jnp.bfloat16)) for w in weights]


def weights_and_tokens():
    weights = [normal(i, K, n, scale=0.1) for i, n in enumerate((48, 32, 32))]
    return weights, normal(9, TOKENS, K, dtype=jnp.bfloat16)


@pytest.mark.internals
def test_matmuls_and_gradients_follow_their_formulas():
    weights, x = weights_and_tokens()
    dys = [
        normal(20 + i, TOKENS, w.shape[1], dtype=x.dtype) for i, w in enumerate(weights)
    ]
    ys, (dws, dx) = value_and_vjp(fp8_remat(three), dys, weights, x)
    doubled = np.asarray(x, np.float32) * 2
    rows = fake(doubled, K).astype(np.float64)  # A scale for each token.
    quantized = [tensor(w.astype(jnp.bfloat16)) for w in weights]
    gradients = [tensor(dy, oracle.E5M2) for dy in dys]
    assert_close(ys, [rows @ w for w in quantized], 2**-8)
    # The sum is in bfloat16, as without merging.
    total = sum(dy @ w.T for dy, w in zip(gradients, quantized, strict=True))
    assert_close(dx, 2 * total, 2**-7)
    # Backward reads the copy of x, which is in groups of 16.
    again = tensor(2 * np.asarray(fake(x, 16), np.float32))
    assert_close(dws, [again.T @ dy for dy in gradients], 2**-7)


def test_one_copy_is_saved_for_all_matmuls():
    weights, x = weights_and_tokens()
    groups = TOKENS * K + 2 * TOKENS * K // 16
    actual = saved(fp8_remat(three), weights, x, params=3)
    # The scale of x in backward, and an empty array with the dtype of x.
    assert saved_bytes(actual) == groups + 4
    unmerged = saved(three, weights, x, params=3)
    assert saved_bytes(unmerged) > 3 * TOKENS * K


@pytest.mark.internals
@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda fn: fn])
def test_calls_in_jitted_functions_are_merged(wrap):
    def fn(weights, x):
        jitted = jax.jit(lambda w, x: linear(x, w))
        return wrap(lambda weights, x: [jitted(w, x) for w in weights])(weights, x)

    weights, x = weights_and_tokens()
    jaxpr = str(jax.make_jaxpr(fp8_remat(fn))(weights, x))
    assert ("= fp8_dot[" in jaxpr) == (wrap is jax.checkpoint)


def test_equal_calls_of_a_stateful_operation_stay_two():
    def noise():
        return jax.lax.rng_uniform(jnp.float32(0), jnp.float32(1), (TOKENS, K))

    def plain(w, x):
        return linear(x + noise(), w) - linear(x + noise(), w)

    def jitted(w, x):
        again = jax.jit(noise)
        return linear(x + again(), w) - linear(x + again(), w)

    w, x = normal(1, K, K), jnp.ones((TOKENS, K))
    for fn in (plain, jitted):
        assert (jax.jit(fp8_remat(fn))(w, x) != 0).any()


def test_noise_of_a_stateful_operation_is_not_drawn_again():
    """The gradient of the noise's factor is the noise of the forward pass."""

    def fn(scale, x):
        noise = jax.lax.rng_uniform(jnp.float32(1), jnp.float32(2), x.shape)
        return noise * scale, noise

    @jax.jit
    def run(scale, x):
        y, pullback, noise = jax.vjp(lambda s: fp8_remat(fn)(s, x), scale, has_aux=True)
        return noise, pullback(jnp.ones_like(y))

    noise, (dscale,) = run(jnp.ones((TOKENS, K)), jnp.ones((TOKENS, K)))
    assert_close(dscale, noise, 2**-4)


@pytest.mark.internals
def test_operations_without_operands_before_a_matmul():
    """A jitted function such as `jnp.tril` makes an iota, which has no operands."""

    def fn(w, x):
        return linear(jnp.tril(x), w)

    w, x = normal(1, TOKENS, K), normal(2, TOKENS, TOKENS)
    assert_close(compiled(fp8_remat(fn), w, x), jnp.tril(x) @ w, 0.1)


@pytest.mark.internals
def test_a_gradient_within_the_function():
    """The function takes a step of gradient descent, as energy models do."""

    def fn(w, x):
        return x - jax.grad(lambda x: jnp.sum(jnp.sin(linear(x, w))))(x)

    w, x = normal(1, K, K, scale=0.1), normal(2, TOKENS, K)
    expected = x - jnp.cos(x @ w) @ w.T
    assert_close(compiled(fp8_remat(fn), w, x), expected, 0.1)


def test_weights_that_follow_from_the_first_matmul_stay_apart():
    def fn(w, x):
        first = linear(x, w)
        return first, linear(x, first[:K] + w)

    w, x = normal(1, K, K), normal(2, TOKENS, K)
    # One of the two has other scales of x.
    assert_follows_autodiff(fn, fn(w, x), w, x, tolerance=0.1)


def test_weights_from_parameters_are_computed_before_the_first_matmul():
    def fn(params, x):
        first = linear(x, params["a"])
        return first + linear(x, jnp.tanh(params["b"]) @ params["c"])

    params = {name: normal(i, K, K) for i, name in enumerate("abc")}
    x, dy = normal(5, TOKENS, K), normal(6, TOKENS, K)
    assert_follows_autodiff(fn, dy, params, x, tolerance=0.1)


@pytest.mark.parametrize("axis", [0, slow(1)])
def test_calls_within_vmap(axis):
    """The mapped axis has the same size as the rows of a batch."""

    def fn(w, x):
        return jax.vmap(linear, (axis, 0), axis)(x, w)

    w, x = normal(1, K, K, 32), normal(2, K, K, K)
    expected = jax.vmap(jnp.matmul, (axis, 0), axis)(x, w)
    dy = normal(3, *expected.shape)
    merged, plain = (value_and_vjp(f, dy, w, x) for f in (fp8_remat(fn), fn))
    assert_close(merged[0], expected, 0.1)
    assert_close(merged, plain, 0.1)


@pytest.mark.internals
def test_batch_dimensions():
    """Each expert, which is an entry of the batch axis, has its own scales."""

    def fn(weights, x):
        dims = (((2,), (1,)), ((0,), (0,)))
        return [fp8_dot_general(x, w, dims) for w in weights]

    weights = [normal(i, 3, K, 32) for i in range(2)]
    x = normal(5, 3, TOKENS, K) * jnp.array([1.0, 100.0, 1e-3])[:, None, None]
    dys = [normal(7 + i, 3, TOKENS, 32) for i in range(2)]
    merged = value_and_vjp(fp8_remat(fn), dys, weights, x)
    for expert in (0, 2):
        one = [w[expert] for w in weights], x[expert]
        dy = [dy[expert] for dy in dys]
        alone = value_and_vjp(
            fp8_remat(lambda weights, x: [linear(x, w) for w in weights]), dy, *one
        )
        of_expert = jax.tree.map(lambda a, e=expert: a[e], merged)
        assert_close(of_expert, alone, 1e-5)
    actual = saved(fp8_remat(fn), weights, x, params=2)
    assert saved_bytes(actual) < 1.2 * x.size


def test_flax_modules():
    class Attention(nn.Module):
        @nn.compact
        def __call__(self, x):
            heads = [
                nn.DenseGeneral((4, 16), dot_general=fp8_dot_general, name=name)(x)
                for name in "qkv"
            ]
            return nn.dot_product_attention(*heads).reshape(x.shape)

    module, x = Attention(), normal(1, 4, 64, 64)
    params = module.init(jax.random.key(0), x)
    actual = saved(fp8_remat(module).apply, params, x, params=6)
    tokens = [r for r in actual if r.shape == (256, 64)]
    # x once, in one form, though three matmuls read it.
    assert sum(r.dtype.itemsize == 1 for r in tokens) == 1
    assert not any(r.dtype.itemsize > 1 and r.argument is None for r in tokens)


def test_nothing_is_quantized_or_multiplied_twice():
    weights, x = weights_and_tokens()

    def run(weights, x):
        y, vjp = jax.vjp(fp8_remat(three), weights, x)
        return vjp(y)

    eqns = [*all_eqns(jax.make_jaxpr(run)(weights, x).jaxpr)]
    assert sum(eqn.primitive.name == "dot_general" for eqn in eqns) == 9
    casts = [
        eqn.params["new_dtype"]
        for eqn in eqns
        if eqn.primitive.name == "convert_element_type"
    ]
    # x for the matmuls, as a copy and for gradients; weights forward and backward.
    assert casts.count(jnp.float8_e4m3fn) == 3 + 2 * 3
    assert casts.count(jnp.float8_e5m2) == 3


def all_eqns(jaxpr):
    for eqn in jaxpr.eqns:
        bodies = [*bodies_in_params(eqn.params)]
        for body in bodies:
            yield from all_eqns(body)
        if not bodies:
            yield eqn


def test_equal_operations_are_computed_once():
    def fn(x):
        return jnp.sin(x) + jnp.sin(x), jnp.sin(x) * 2, jnp.sin(2 * x)

    program = jax.make_jaxpr(fn)(1.0)
    short = core.ClosedJaxpr(deduplicated(program.jaxpr), [])
    names = [eqn.primitive.name for eqn in short.eqns]
    assert names.count("sin") == 2
    assert core.jaxpr_as_fun(short)(0.5) == core.jaxpr_as_fun(program)(0.5)


@pytest.mark.internals
def test_effects_are_not_merged(capsys):
    def fn(x):
        for _ in range(2):
            jax.debug.print("x is {}", x)
        return x

    program = jax.make_jaxpr(fn)(1.0)
    core.jaxpr_as_fun(core.ClosedJaxpr(deduplicated(program.jaxpr), []))(3.0)
    jax.effects_barrier()
    assert capsys.readouterr().out.count("x is 3.0") == 2


@pytest.mark.internals
def test_inlined_calls_may_pass_arguments_on_and_repeat_results():
    inner = jax.jit(lambda x, y: (y, x + y, 2.0))

    @jax.jit
    def outer(x, y):
        first, total, constant = inner(x, y)
        return total, total, first, constant

    program = jax.make_jaxpr(lambda x: [outer(x, 3 * x), inner(x, x)])(1.0)
    flat = inlined(program.jaxpr, lambda eqn: eqn.primitive.name == "jit")
    assert [eqn.primitive.name for eqn in flat.eqns] == ["mul", "add", "add"]
    flat = core.ClosedJaxpr(flat, program.consts)
    assert core.jaxpr_as_fun(flat)(5.0) == core.jaxpr_as_fun(program)(5.0)
    assert coat.fp8_remat(outer)(1.0, 2.0) == outer(1.0, 2.0)
