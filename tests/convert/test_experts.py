"""Tests of `coat.fp8` of mixtures of experts that others wrote with `ragged_dot`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.gradients import saved, saved_bytes
from jax import lax

import coat_jax as coat

pytestmark = pytest.mark.internals

WIDTH, HIDDEN, EXPERTS, TOP = 128, 256, 4, 2


class Experts(nnx.Module):
    """A router and gated experts; `dot` multiplies the tokens of each expert."""

    def __init__(self, dot=lax.ragged_dot):
        rngs, self.dot = nnx.Rngs(0), dot
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.router = nnx.Linear(WIDTH, EXPERTS, use_bias=False, rngs=rngs)
        self.gate_up = nnx.Param(init(rngs.params(), (EXPERTS, WIDTH, 2 * HIDDEN)))
        self.down = nnx.Param(init(rngs.params(), (EXPERTS, HIDDEN, WIDTH)))

    def __call__(self, x):
        tokens = x.reshape(-1, WIDTH)
        weights, experts = lax.top_k(nnx.softmax(self.router(tokens)), TOP)
        order = jnp.argsort(experts.reshape(-1))
        sizes = jnp.bincount(experts.reshape(-1), length=EXPERTS)
        sorted_tokens = tokens[order // TOP]
        h = self.dot(sorted_tokens, self.gate_up[...], sizes)
        gate, up = jnp.split(h, 2, axis=-1)
        y = self.dot(nnx.silu(gate) * up, self.down[...], sizes)
        y = y * weights.reshape(-1)[order, None]
        return x + jnp.zeros_like(tokens).at[order // TOP].add(y).reshape(x.shape)


class Model(nnx.Module):
    def __init__(self, dot=lax.ragged_dot):
        self.layers = nnx.List([Experts(dot)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def tokens():
    return jax.random.normal(jax.random.key(0), (2, 48, WIDTH))


def test_ragged_dots_become_fp8_ragged_dots():
    x = tokens()
    run = nnx.jit(lambda model, x: model(x) - x)
    y, by_hand, exact = (
        np.asarray(run(model, x))
        for model in (
            coat.fp8(Model(), blocks="layers"),
            Model(coat.fp8_ragged_dot),
            Model(),
        )
    )
    np.testing.assert_allclose(y, by_hand, rtol=1e-4, atol=1e-5)
    assert 0 < np.linalg.norm(y - exact) < 0.1 * np.linalg.norm(exact)


def test_the_report_lists_experts():
    for dot, reason in (
        (lax.ragged_dot, ""),
        (coat.fp8_ragged_dot, "in FP8 already"),
    ):
        report = coat.fp8_report(coat.fp8(Model(dot), blocks="layers"), tokens())
        rows = {row.parameter: (row.rows, row.reason) for row in report.rows}
        assert rows["router/kernel"][1] == "4 outputs are fewer than 128"
        experts = rows.get("gate_up"), rows.get("down")
        assert experts == 2 * ((2 * 48 * TOP, reason),)


def test_gradients_are_those_of_experts_and_less_is_saved():
    x = tokens().astype(jnp.bfloat16)

    def parts(model):
        graph, params = nnx.split(model)
        params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        return lambda params, x: nnx.merge(graph, params)(x), params

    def gradients(model):
        fn, params = parts(model)

        @jax.jit
        def run(params, x):
            y, vjp = jax.vjp(fn, params, x)
            return vjp(jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype))

        return [np.asarray(v, np.float64) for v in jax.tree.leaves(run(params, x))]

    converted = coat.fp8(Model(), blocks="layers")
    for ours, theirs in zip(gradients(converted), gradients(Model()), strict=True):
        assert np.linalg.norm(ours - theirs) < 0.15 * np.linalg.norm(theirs)
    sizes = [saved_bytes(saved(*parts(model), x)) for model in (converted, Model())]
    assert 0 < sizes[0] < 0.7 * sizes[1]
