"""Tests of gated MLPs of experts that users write with `ragged_dot`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.marks import slow
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import coat_jax as coat
from coat_jax.fusion.experts import fuse_experts
from coat_jax.fusion.gathers import gathers

TOKENS, CHOICES, EXPERTS, HIDDEN, INNER = 24, 2, 4, 32, 32
ROWS = TOKENS * CHOICES
SIZES = {"uneven": (20, 3, 0, 25), "rows of none": (7, 0, 11, 8)}


def arguments(sizes="uneven", dtype=jnp.float32):
    rng = np.random.default_rng(0)

    def normal(*shape, scale=1.0):
        return jnp.asarray(scale * rng.standard_normal(shape), dtype)

    ids = np.repeat(np.arange(EXPERTS + 1), (*SIZES[sizes], ROWS - sum(SIZES[sizes])))
    params = {
        "gate_up": normal(EXPERTS, HIDDEN, 2 * INNER, scale=0.2),
        "down": normal(EXPERTS, INNER, HIDDEN, scale=0.2),
    }
    ids, sizes = jnp.asarray(rng.permutation(ids)), jnp.asarray(SIZES[sizes])
    return params, normal(TOKENS, HIDDEN), ids, sizes


def split(y):
    return jnp.split(y, 2, axis=-1)


def sliced(y):
    return y[:, : y.shape[1] // 2], y[:, y.shape[1] // 2 :]


def mlp(rows, params, sizes, dot, *, halves=split, act=jax.nn.silu):
    gate, up = halves(dot(rows, params["gate_up"], sizes))
    return dot(act(gate) * up, params["down"], sizes)


def up_first(rows, params, sizes, dot):
    up, gate = jnp.split(dot(rows, params["gate_up"], sizes), 2, axis=-1)
    return dot(jax.nn.silu(gate) * up, params["down"], sizes)


def two_weights(rows, params, sizes, dot):
    gate, up = (dot(rows, w, sizes) for w in jnp.split(params["gate_up"], 2, axis=2))
    return dot(jax.nn.silu(gate) * up, params["down"], sizes)


FORMS = {
    "split": mlp,
    "sliced": functools.partial(mlp, halves=sliced),
    "gelu": functools.partial(mlp, act=jax.nn.gelu),
    "up first": up_first,
    "two weights": two_weights,
}


def layer(form, params, x, ids, sizes, dot):
    """Copies tokens to rows, applies experts, and adds up the rows of each token."""
    order = jnp.argsort(ids)
    y = form(x[order // CHOICES], params, sizes, dot)
    return jnp.sum(y[jnp.argsort(order)].reshape(TOKENS, CHOICES, -1), axis=1)


def names_of(fn, *args):
    program = jax.make_jaxpr(fn)(*args).jaxpr
    return [e.primitive.name for e in fuse_experts(gathers(program, (), ())).eqns]


@pytest.mark.parametrize("form", FORMS)
def test_forms_are_one_operation(form):
    args = arguments()
    run = functools.partial(layer, FORMS[form], dot=coat.fp8_ragged_dot)
    names = names_of(run, *args)
    assert names.count("fused_matmul") == 1
    assert "fp8_ragged_dot" not in names
    # The gather of rows is a part of it, and the gather of results stays.
    assert names.count("gather_rows") == 1


def test_rows_that_others_read_are_not_gathered_again():
    def fn(params, x, ids, sizes):
        rows = x[jnp.argsort(ids) // CHOICES]
        return mlp(rows, params, sizes, coat.fp8_ragged_dot), jnp.sum(rows)

    names = names_of(fn, *arguments())
    assert (names.count("gather_rows"), names.count("fused_matmul")) == (1, 1)


def twice(rows, params, sizes, dot):
    gate, up = split(dot(rows, params["gate_up"], sizes))
    a = jax.nn.silu(gate) * up
    return dot(a, params["down"], sizes) + jnp.sum(a)


def read_gate(rows, params, sizes, dot):
    gate, up = split(dot(rows, params["gate_up"], sizes))
    return dot(jax.nn.silu(gate) * up, params["down"], sizes) + jnp.sum(gate)


def same_half(rows, params, sizes, dot):
    gate, _ = split(dot(rows, params["gate_up"], sizes))
    return dot(jax.nn.silu(gate) * gate, params["down"], sizes)


def other_sizes(rows, params, sizes, dot):
    gate, up = split(dot(rows, params["gate_up"], sizes))
    return dot(jax.nn.silu(gate) * up, params["down"], sizes[::-1])


def other_rows(rows, params, sizes, dot):
    weights = jnp.split(params["gate_up"], 2, axis=2)
    gate, up = (dot(x, w, sizes) for x, w in zip((rows, -rows), weights, strict=True))
    return dot(jax.nn.silu(gate) * up, params["down"], sizes)


def biased(rows, params, sizes, dot):
    gate, up = split(dot(rows, params["gate_up"], sizes) + 0.5)
    return dot(jax.nn.silu(gate) * up, params["down"], sizes)


def clipped(rows, params, sizes, dot):
    gate, up = split(dot(rows, params["gate_up"], sizes))
    return dot(jax.nn.silu(jnp.minimum(gate, 2)) * up, params["down"], sizes)


def interleaved(rows, params, sizes, dot):
    y = dot(rows, params["gate_up"], sizes)
    return dot(jax.nn.silu(y[:, ::2]) * y[:, 1::2], params["down"], sizes)


def shifted(rows, params, sizes, dot):
    y = dot(rows, params["gate_up"], sizes)
    gate, up = y[:, 3 : INNER + 3], y[:, INNER:]
    return dot(jax.nn.silu(gate) * up, params["down"], sizes)


def read_shifted(rows, params, sizes, dot):
    y = dot(rows, params["gate_up"], sizes)
    other, gate, up = y[:, 3 : INNER + 3], y[:, :INNER], y[:, INNER:]
    return dot(jax.nn.silu(gate) * up, params["down"], sizes) + other


def cut_twice(rows, params, sizes, dot):
    y = dot(rows, params["gate_up"], sizes)
    (gate, other), up = split(y), y[:, INNER:]
    return dot(jax.nn.silu(gate) * up, params["down"], sizes) + other


def named(rows, params, sizes, dot):
    gate, up = split(dot(rows, params["gate_up"], sizes))
    a = checkpoint_name(jax.nn.silu(gate) * up, "a")
    return dot(a, params["down"], sizes)


MISSES = (
    twice, read_gate, same_half, other_sizes, other_rows, biased, clipped, interleaved,
    shifted, read_shifted, cut_twice, named,
)  # fmt: skip


@pytest.mark.parametrize("form", MISSES, ids=lambda fn: fn.__name__)
def test_near_misses_stay(form):
    args = arguments()
    run = functools.partial(layer, form, dot=coat.fp8_ragged_dot)
    assert "fused_matmul" not in names_of(run, *args)


def test_a_matmul_is_in_one_operation():
    def fn(params, x, ids, sizes):
        del ids
        square = {"gate_up": params["gate_up"], "down": params["gate_up"]}
        y = mlp(x, square, sizes, coat.fp8_ragged_dot)
        gate, up = split(y)
        return coat.fp8_ragged_dot(jax.nn.silu(gate) * up, params["down"], sizes)

    args = arguments()
    names = names_of(fn, *args)
    assert (names.count("fused_matmul"), names.count("fp8_ragged_dot")) == (1, 1)
    jax.eval_shape(coat.fp8_remat(fn), *args)


@pytest.mark.parametrize(
    ("form", "inner"), [("gelu", 18), *(slow(form, 32) for form in FORMS)]
)
def test_gradients_are_as_near_as_of_single_matmuls(form, inner):
    """The last group of 16 columns of the gate may be short."""
    params, *further = arguments("rows of none")
    halves = jnp.split(params["gate_up"], 2, axis=2)
    gate_up = jnp.concatenate([w[:, :, :inner] for w in halves], axis=2)
    args = {"gate_up": gate_up, "down": params["down"][:, :inner]}, *further

    def grads(dot, wrap):
        run = wrap(functools.partial(layer, FORMS[form], dot=dot))
        loss = lambda params, x: jnp.sum(jnp.sin(run(params, x, *args[2:])))  # noqa: E731
        return jax.tree.leaves(jax.jit(jax.grad(loss, (0, 1)))(*args[:2]))

    exact = functools.partial(lax.ragged_dot, precision="highest")
    fused = grads(coat.fp8_ragged_dot, coat.fp8_remat)
    for alone in (coat.fp8_ragged_dot, exact):
        expected = grads(alone, lambda fn: fn)
        for a, b in zip(fused, expected, strict=True):
            error = np.linalg.norm(a - b) / np.linalg.norm(b)
            # Operands are rounded to 3 bits and gradients to 2, each matmul anew.
            assert 0 < error < (0.2 if alone is exact else 0.09)


def test_rows_of_no_group_are_not_read():
    params, x, _, sizes = arguments("rows of none")
    rows = jnp.concatenate([x, x]).at[sum(SIZES["rows of none"]) :].set(jnp.nan)

    def loss(params, rows):
        y = mlp(rows, params, sizes, coat.fp8_ragged_dot)
        return jnp.sum(jnp.sin(y))

    for results in jax.tree.leaves(
        jax.jit(jax.value_and_grad(coat.fp8_remat(loss), (0, 1)))(params, rows)
    ):
        assert np.isfinite(results).all()


def test_less_is_saved():
    args = arguments(dtype=jnp.bfloat16)
    run = functools.partial(layer, mlp, dot=coat.fp8_ragged_dot)

    def saved(wrap):
        report = coat.residual_report(wrap(run), *args)
        return sum(row.nbytes for row in report.rows if not row.is_argument)

    # Rows have gate and up in groups of 16, the largest scale of the gate, and three
    # indices, with 128 rows of padding. Codes of tokens and the list of tiles follow.
    rows = (ROWS + 128) * (2 * INNER * 18 // 16 + 4) + 12 * ROWS
    assert saved(coat.fp8_remat) <= rows + TOKENS * HIDDEN + 4096


def test_bf16_parameters_have_gradients_of_their_dtype():
    args = arguments(dtype=jnp.bfloat16)

    def loss(params, x):
        run = functools.partial(layer, mlp, dot=coat.fp8_ragged_dot)
        return jnp.sum(coat.fp8_remat(run)(params, x, *args[2:]).astype(jnp.float32))

    grads = jax.eval_shape(jax.grad(loss, (0, 1)), *args[:2])
    assert {g.dtype.name for g in jax.tree.leaves(grads)} == {"bfloat16"}
