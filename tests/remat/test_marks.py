"""Tests of marks on the arrays that kernels compute: constraints, names and barriers.

Trainers that shard or name activations mark the outputs of norms and gates. The marks
change no value, so bytes and kernels are the same as without them.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers.dots import linear, rms
from helpers.gradients import FP8, saved, saved_bytes, value_and_vjp
from helpers.marks import slow_except
from helpers.models import normal
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_kernels as pk
from coat_jax import fp8_remat

K, F, TOKENS = 128, 256, (4, 32)
BF16 = jnp.bfloat16


def constrained(x, name):
    """Constrains an array on a mesh of one device, as trainers do on any mesh."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data")))


MARKS = {
    "name": checkpoint_name,
    "constraint": constrained,
    "barrier": lambda x, name: jax.lax.optimization_barrier(x),
    "both": lambda x, name: constrained(checkpoint_name(x, name), name),
}


def unmarked(x, name):
    return x


def flax_rms(x, scale):
    """Applies Flax's norm, which broadcasts zeros with the sharding of x."""
    return nn.RMSNorm(dtype=BF16).apply({"params": {"scale": scale}}, x)


def gated(dot, mark, p, x):
    x = mark(x, "x")
    h = mark(flax_rms(x, p["norm"]), "h")
    gate, up = mark(dot(h, p["a"]), "gate"), mark(dot(h, p["b"]), "up")
    return x + mark(dot(mark(jax.nn.silu(gate) * up, "product"), p["c"]), "out")


def activated(dot, mark, p, x):
    h = mark(rms(x, p["norm"]), "h")
    inner = mark(jax.nn.gelu(mark(dot(h, p["a"]) + p["bias"], "inner")), "activation")
    return mark(x + mark(dot(inner, p["c"]), "out"), "stream")


BLOCKS = {"gated": gated, "activated": activated}


def given():
    p = {
        "a": normal(1, K, F, scale=0.1, dtype=BF16),
        "b": normal(2, K, F, scale=0.1, dtype=BF16),
        "c": normal(3, F, K, scale=0.1, dtype=BF16),
        "norm": 1 + normal(4, K, scale=0.1),
        "bias": normal(5, F, dtype=BF16),
    }
    return p, normal(6, *TOKENS, K, dtype=BF16), normal(7, *TOKENS, K, dtype=BF16)


def kernels(fn, *args):
    """Returns the operations of both passes, each with the types of its arrays."""

    def run(*args):
        y, pullback = jax.vjp(fn, *args)
        return pullback(y)

    return sorted((c.operation, *c.arrays) for c in pk.explain(run, *args).choices)


@functools.cache
def light(name, mark=None):
    """Returns a block with FP8 residuals, its kernels and the bytes that it saves."""
    fn = fp8_remat(functools.partial(BLOCKS[name], linear, MARKS.get(mark, unmarked)))
    p, x, _ = given()
    return fn, kernels(fn, p, x), saved_bytes(saved(fn, p, x))


@pytest.mark.internals
@pytest.mark.parametrize(
    ("name", "mark"),
    slow_except(
        [("gated", "both"), ("gated", "barrier"), ("activated", "both")],
        [(name, mark) for name in BLOCKS for mark in MARKS],
    ),
)
def test_marks_cost_nothing(name, mark):
    (marked, *costs), (plain, *expected) = light(name, mark), light(name)
    assert costs == expected
    assert {"norm", "gated"} <= {op for op, *_ in costs[0]}
    if (mark, name) == ("both", "gated"):
        p, x, dy = given()
        assert_same_results(marked, plain, dy, p, x)


def assert_same_results(marked, plain, dy, *args):
    results = (value_and_vjp(fn, dy, *args) for fn in (marked, plain))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.internals
@pytest.mark.parametrize("name", BLOCKS)
def test_marks_cost_nothing_around_matmuls_of_bf16(name):
    p, x, _ = given()
    forms = (
        functools.partial(BLOCKS[name], jnp.matmul, mark)
        for mark in (unmarked, *MARKS.values())
    )
    assert len({saved_bytes(saved(fp8_remat(fn), p, x)) for fn in forms}) == 1


def of_tanh(mark, p, x):
    """Multiplies tanh(h), which the mark wraps, by a weight.

    The backward pass reads tanh(h) and 1 - tanh(h)**2, which both follow from h.
    """
    return jnp.matmul(mark(jnp.tanh(jnp.matmul(x, p["a"])), "h"), p["c"])


def in_loop(mark, p, x):
    """Runs two layers in a loop that saves h twice, as it is and marked."""

    def body(x, _):
        h = jnp.matmul(x, p["a"])
        return jnp.matmul(jax.nn.silu(mark(h, "h")) * h, p["c"]), None

    return jax.lax.scan(body, x, None, length=2)[0]


@pytest.mark.internals
@pytest.mark.parametrize("fn", [of_tanh, in_loop])
def test_marks_of_arrays_that_follow_from_one_copy_cost_nothing(fn):
    p, x, dy = given()
    plain, *marked = (
        fp8_remat(functools.partial(fn, mark)) for mark in (unmarked, *MARKS.values())
    )
    assert len({saved_bytes(saved(f, p, x)) for f in (plain, *marked)}) == 1
    if fn is in_loop:
        assert_same_results(marked[-1], plain, dy, p, x)


def test_barriers_of_several_arrays_end_a_match_and_cost_no_memory():
    def block(dot, p, x):
        h, w = jax.lax.optimization_barrier((rms(x, p["norm"]), p["a"]))
        return dot(jax.nn.gelu(dot(h, w)), p["c"])

    def plain(dot, p, x):
        return dot(jax.nn.gelu(dot(rms(x, p["norm"]), p["a"])), p["c"])

    p, x, _ = given()
    light = fp8_remat(functools.partial(block, linear))
    assert "norm" not in {op for op, *_ in kernels(light, p, x)}
    bf16 = (
        saved_bytes(saved(fp8_remat(functools.partial(fn, jnp.matmul)), p, x))
        for fn in (block, plain)
    )
    assert len({*bf16}) == 1


@pytest.mark.internals
@pytest.mark.parametrize("name", BLOCKS)
def test_constraints_stay_in_the_program(name):
    p, x, dy = given()
    marked = fp8_remat(functools.partial(BLOCKS[name], linear, constrained))

    def gradients(p, x):
        return jax.vjp(marked, p, x)[1](dy)

    def constraints(fn):
        return jax.jit(fn).lower(p, x).as_text().count("sdy.sharding_constraint")

    assert 4 <= constraints(marked) < constraints(gradients)


def test_names_select_codes_for_an_outer_policy():
    """A policy saves codes of a norm's output, and of the two inputs of a gate."""
    p, x, _ = given()
    light = fp8_remat(functools.partial(gated, linear, checkpoint_name))
    policy = jax.checkpoint_policies.save_only_these_names
    codes = []
    for names in ((), ("h",), ("h", "product")):
        rows = saved(jax.checkpoint(light, policy=policy(*names)), p, x)
        codes.append(sum(math.prod(r.shape) for r in rows if r.dtype in FP8))
    tokens = TOKENS[0] * TOKENS[1]
    assert codes == [0, tokens * K, tokens * (K + 2 * F)]


@pytest.mark.internals
def test_marks_of_statistics_end_a_match():
    def block(p, x):
        wide = x.astype(jnp.float32)
        mean = constrained(jnp.mean(jnp.square(wide), -1, keepdims=True), "")
        h = (wide * jax.lax.rsqrt(mean + 1e-6) * p["norm"]).astype(x.dtype)
        return linear(h, p["a"])

    p, x, _ = given()
    assert "norm" not in {op for op, *_ in kernels(fp8_remat(block), p, x)}
