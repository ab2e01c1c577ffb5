"""Tests of `coat.fp8` on mixtures of experts that users write with `ragged_dot`."""

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


def test_results_and_gradients_are_those_of_experts():
    x = tokens()

    def passes(model):
        graph, params = nnx.split(model)

        @jax.jit
        def run(params, x):
            y, vjp = jax.vjp(lambda p, x: nnx.merge(graph, p)(x) - x, params, x)
            return y, vjp(jnp.cos(jnp.arange(y.size)).reshape(y.shape))

        return [np.asarray(v, np.float64) for v in jax.tree.leaves(run(params, x))]

    ours, theirs = map(passes, (coat.fp8(Model(), blocks="layers"), Model()))
    assert 0 < np.linalg.norm(ours[0] - theirs[0]) < 0.1 * np.linalg.norm(theirs[0])
    for actual, expected in zip(ours, theirs, strict=True):
        assert np.linalg.norm(actual - expected) < 0.15 * np.linalg.norm(expected)
    # A kernel computes the gate between them, and rounds another scale of its results.
    by_hand = np.asarray(nnx.jit(lambda m, x: m(x) - x)(Model(coat.fp8_ragged_dot), x))
    assert np.linalg.norm(ours[0] - by_hand) < 0.06 * np.linalg.norm(by_hand)


def test_less_is_saved():
    def size(model):
        graph, params = nnx.split(model)
        params, x = jax.tree.map(
            lambda p: jax.ShapeDtypeStruct(p.shape, jnp.bfloat16), (params, tokens())
        )
        fn = lambda params, x: nnx.merge(graph, params)(x)  # noqa: E731
        return saved_bytes(saved(fn, params, x))

    assert 0 < size(coat.fp8(Model(), blocks="layers")) < 0.7 * size(Model())


def test_the_report_lists_experts():
    for dot, reason in ((lax.ragged_dot, ""), (coat.fp8_ragged_dot, "in FP8 already")):
        report = coat.fp8_report(coat.fp8(Model(dot), blocks="layers"), tokens())
        rows = {row.parameter: (row.rows, row.reason) for row in report.rows}
        assert rows["router/kernel"][1] == "4 outputs are fewer than 128"
        experts = rows.get("gate_up"), rows.get("down")
        assert experts == 2 * ((2 * 48 * TOP, reason),)


def general(contracted, groups=(0,), batch=((), ()), ragged=None, offset=None):
    """Returns a `ragged_dot_general` that contracts these axes of its operands."""
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(contracted, batch),
        lhs_ragged_dimensions=[1 - contracted[0][0]] if ragged is None else ragged,
        rhs_group_dimensions=groups,
    )
    options = {"group_offset": offset}
    return lambda x, w, sizes: lax.ragged_dot_general(x, w, sizes, numbers, **options)


@pytest.mark.parametrize(
    ("rows", "axes", "dot"),
    [
        ((0, 1), (0, 2, 1), general(((1,), (2,)))),
        ((0, 1), (1, 2, 0), general(((1,), (0,)), groups=(2,))),
        ((1, 0), (1, 0, 2), general(((0,), (0,)), groups=(1,))),
    ],
)
def test_ragged_dots_may_have_their_axes_in_any_order(rows, axes, dot):
    x = jax.random.normal(jax.random.key(0), (48, WIDTH))
    w = jax.random.normal(jax.random.key(1), (EXPERTS, WIDTH, HIDDEN))
    sizes = jnp.array([20, 0, 18, 10], jnp.int32)

    def passes(dot, *arrays):
        y, vjp = jax.vjp(lambda x, w: dot(x, w, sizes), *arrays)
        return y, *vjp(jnp.cos(jnp.arange(y.size)).reshape(y.shape))

    fp8 = coat.fp8(lambda w, x, sizes: dot(x, w, sizes))
    y, dx, dw = passes(
        lambda x, w, s: fp8(w, x, s), x.transpose(rows), w.transpose(axes)
    )
    actual = y, dx.transpose(np.argsort(rows)), dw.transpose(np.argsort(axes))
    expected = passes(coat.fp8_ragged_dot, x, w)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize(
    ("dot", "shapes", "reason"),
    [
        (
            general(((0,), (0,)), groups=(), ragged=(0,)),
            ((48, 128), (48, 256)),
            "its groups are of the axis that it sums over",
        ),
        (
            general(((2,), (2,)), groups=(1,), batch=((0,), (0,)), ragged=(1,)),
            ((2, 48, 128), (2, EXPERTS, 128, 256)),
            "a ragged_dot_general with axes of a batch",
        ),
        (
            general(((1,), (1,)), offset=(0,)),
            ((48, 128), (EXPERTS, 128, 256)),
            "it has a group_offset",
        ),
    ],
)
def test_other_ragged_dots_are_listed(dot, shapes, reason):
    fp8 = coat.fp8(lambda p, x, sizes: dot(x @ p["first"], p["second"], sizes))
    x, second = map(jnp.ones, shapes)
    params = {"first": jnp.ones((x.shape[-1], 128)), "second": second}
    sizes = jnp.ones((*x.shape[:-2], EXPERTS), jnp.int32)
    report = coat.fp8_report(fp8, params, x, sizes)
    reasons = {row.parameter: row.reason for row in report.rows}
    assert reasons == {"first": "", "second": reason}


class Choosing(nnx.Module):
    """A model with two matmuls; `choose` gets the softmax of the second's result."""

    def __init__(self, choose, outputs=128):
        rngs, self.choose = nnx.Rngs(0), choose
        self.inner = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.router = nnx.Linear(WIDTH, outputs, use_bias=False, rngs=rngs)

    def __call__(self, x):
        scores = nnx.softmax(self.router(self.inner(x)))
        return self.choose(scores) + scores[..., :1]


@pytest.mark.parametrize(
    "choose",
    [
        lambda scores: lax.top_k(scores, 2)[0],
        lambda scores: jnp.argmax(jax.nn.relu(scores), axis=-1)[..., None],
        lambda scores: jnp.argsort(-scores)[..., :2],
        jax.jit(lambda scores: lax.top_k(jnp.log(scores), 1)[1]),
    ],
)
def test_routers_stay_as_they_are(choose):
    """The router's matmul stays as it is, and the matmul before it becomes FP8."""
    model = coat.fp8(Choosing(choose), blocks="")
    rows = {row.parameter: row.reason for row in coat.fp8_report(model, tokens()).rows}
    assert rows["inner/kernel"] == ""
    assert rows["router/kernel"] == "its results choose, as a router's do"


@pytest.mark.parametrize(
    ("choose", "outputs"),
    [
        (jnp.max, 128),
        # A sparse code is chosen among many numbers, by large matmuls.
        (lambda scores: lax.top_k(scores, 2)[0], 2048),
    ],
)
def test_matmuls_of_no_router_become_fp8(choose, outputs):
    model = coat.fp8(Choosing(choose, outputs), blocks="")
    rows = {row.parameter: row.reason for row in coat.fp8_report(model, tokens()).rows}
    assert set(rows.values()) == {""}


def test_a_router_can_be_asked_for():
    model = Choosing(lambda scores: lax.top_k(scores, 2)[0])
    model = coat.fp8(model, blocks="", matmuls="router/kernel")
    rows = {row.parameter: row.reason for row in coat.fp8_report(model, tokens()).rows}
    assert rows["router/kernel"] == ""
