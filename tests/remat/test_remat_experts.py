"""Tests of experts that users write with `ragged_dot`: gated MLPs, and their sums."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers.gradients import fake
from helpers.marks import slow
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import coat_jax as coat
from coat_jax.fusion.experts import fuse_experts
from coat_jax.fusion.gathers import gathers

TOKENS, CHOICES, EXPERTS, HIDDEN, INNER = 24, 3, 4, 32, 32
ROWS = TOKENS * CHOICES
SIZES = {"one expert": (0, 0, ROWS, 0), "rows of none": (7, 0, 31, 8)}


def arguments(sizes="rows of none", dtype=jnp.float32):
    """Returns parameters, tokens, weights of choices, experts and sizes of groups."""
    rng = np.random.default_rng(1)

    def normal(*shape, scale=1.0):
        return jnp.asarray(scale * rng.standard_normal(shape), dtype)

    counts = *SIZES[sizes], ROWS - sum(SIZES[sizes])
    ids = jnp.asarray(rng.permutation(np.repeat(np.arange(EXPERTS + 1), counts)))
    params = {
        "gate_up": normal(EXPERTS, HIDDEN, 2 * INNER, scale=0.2),
        "down": normal(EXPERTS, INNER, HIDDEN, scale=0.2),
    }
    # Weights may be zero or negative.
    weights = normal(TOKENS, CHOICES).at[3, 1].set(0)
    return params, normal(TOKENS, HIDDEN), weights, ids, jnp.asarray(SIZES[sizes])


def layer(form, sums, params, x, weights, ids, sizes, dot=coat.fp8_ragged_dot):
    """Applies experts to tokens.

    Args:
      form: Computes the experts' MLPs of sorted rows.
      sums: Adds up the rows of each token; takes rows, their places and the weights.
      params: The experts' weights.
      x: The tokens.
      weights: The weight of each choice.
      ids: The expert of each choice.
      sizes: The number of rows of each expert.
      dot: The grouped matmul.
    """
    order = jnp.argsort(ids)
    y = form(x[order // CHOICES], params, sizes, dot)
    return sums(y, jnp.argsort(order), weights)


def names_of(fn, *args):
    program = jax.make_jaxpr(fn)(*args).jaxpr
    return [e.primitive.name for e in fuse_experts(gathers(program, (), ())).eqns]


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


MLPS = {
    "split": mlp,
    "sliced": functools.partial(mlp, halves=sliced),
    "gelu": functools.partial(mlp, act=jax.nn.gelu),
    "up first": up_first,
    "two weights": two_weights,
}


def plain(y, places, weights):
    y = y[places].reshape(TOKENS, CHOICES, -1)
    return jnp.sum(y * weights[..., None], axis=1)


def of_tokens(y, places, weights):
    return jnp.sum(weights[:, :, None] * y[places.reshape(TOKENS, CHOICES)], axis=1)


def in_bfloat16(y, places, weights):
    y = y[places].astype(jnp.bfloat16).reshape(TOKENS, CHOICES, -1)
    return jnp.sum(y * weights[..., None].astype(jnp.bfloat16), axis=1)


def spread(y, places, weights):
    y = y[places].reshape(TOKENS, CHOICES, -1)
    return jnp.sum(y * jnp.broadcast_to(weights[..., None], y.shape), axis=1)


def reversed_rows(y, places, weights):
    """Gathers rows by another permutation than the one that sorts tokens."""
    return plain(y, places[::-1], weights)


def cast_before(y, places, weights):
    return plain(y.astype(jnp.bfloat16), places, weights)


def of_rows(y, places, weights):
    y = y[places] * weights.reshape(-1)[:, None]
    return jnp.sum(y.reshape(TOKENS, CHOICES, -1), axis=1)


def contracted(y, places, weights):
    y = y[places].reshape(TOKENS, CHOICES, -1)
    return jnp.einsum("tkn,tk->tn", y, weights)


def weights_contracted(y, places, weights):
    y = y[places].reshape(TOKENS, CHOICES, -1)
    return jnp.einsum("tk,tkn->tn", weights, y)


SUMS = (
    plain, of_tokens, in_bfloat16, spread, reversed_rows, of_rows, contracted,
    weights_contracted, cast_before,
)  # fmt: skip


def weights_of_columns(y, places, weights):
    factor = jnp.resize(weights, HIDDEN)
    return jnp.sum(y[places].reshape(TOKENS, CHOICES, -1) * factor, axis=1)


def weights_of_elements(y, places, weights):
    y = y[places].reshape(TOKENS, CHOICES, -1)
    return jnp.sum(y * jnp.resize(weights, y.shape), axis=1)


def weights_of_choices(y, places, weights):
    return jnp.sum(y[places].reshape(TOKENS, CHOICES, -1) * weights[:1, :, None], 1)


def over_tokens(y, places, weights):
    return jnp.sum(y[places].reshape(TOKENS, CHOICES, -1) * weights[..., None], axis=0)


def over_columns(y, places, weights):
    return jnp.sum(y[places].reshape(TOKENS, CHOICES, -1) * weights[..., None], axis=2)


def of_half_rows(y, places, weights):
    halves = jnp.repeat(weights.reshape(-1), 2).reshape(TOKENS, -1, 1)
    return jnp.sum(y[places].reshape(TOKENS, 2 * CHOICES, -1) * halves, axis=1)


def of_repeated_rows(y, places, weights):
    return plain(y, places // 2 * 2, weights)


def read_twice(y, places, weights):
    return plain(y, places, weights), jnp.sum(y)


def read_products(y, places, weights):
    y = y[places].reshape(TOKENS, CHOICES, -1) * weights[..., None]
    return jnp.sum(y, axis=1), jnp.max(y)


def squared(y, places, weights):
    return plain(y * y, places, weights)


def squared_products(y, places, weights):
    y = y[places].reshape(TOKENS, CHOICES, -1)
    return jnp.sum(y * y, axis=1) * weights[:, :1]


def biased(y, places, weights):
    y = y[places].reshape(TOKENS, CHOICES, -1) + 0.5
    return jnp.sum(y * weights[..., None], axis=1)


def named(y, places, weights):
    return plain(checkpoint_name(y, "rows"), places, weights)


def without_weights(y, places, weights):
    del weights
    return jnp.sum(y[places].reshape(TOKENS, CHOICES, -1), axis=1)


def largest(y, places, weights):
    return jnp.max(y[places].reshape(TOKENS, CHOICES, -1) * weights[..., None], axis=1)


def in_half_precision(y, places, weights):
    return plain(y.astype(jnp.float16), places, weights)


def in_columns(y, places, weights):
    y = y[places].reshape((TOKENS, CHOICES, -1), order="F")
    return jnp.sum(y * weights[..., None], axis=1)


def contracted_over_tokens(y, places, weights):
    y = y[places].reshape(TOKENS, CHOICES, -1)
    return jnp.einsum("tkn,tk->kn", y, weights)


def contracted_over_columns(y, places, weights):
    y = y[places].reshape(TOKENS, CHOICES, -1)
    factor = jnp.resize(weights, (TOKENS, HIDDEN))
    return jnp.einsum("tkn,tn->tk", y, factor), jnp.sum(factor)


def weighted_before(y, places, weights):
    """Multiplies rows in another order than weights are in."""
    return jnp.sum((y * weights.reshape(-1, 1))[places].reshape(TOKENS, CHOICES, -1), 1)


def gathered_by_halves(y, places, weights):
    """Gathers halves of rows as if they were complete rows."""
    halves = y.reshape(2 * ROWS, -1)
    at = jnp.concatenate([places, places])
    rows = halves[jnp.argsort(at)].reshape(ROWS, -1)
    return jnp.sum((rows * weights.reshape(-1, 1)).reshape(TOKENS, CHOICES, -1), axis=1)


SUM_MISSES = (
    gathered_by_halves,
    contracted_over_tokens, contracted_over_columns, weighted_before,
    weights_of_columns, weights_of_elements, weights_of_choices, over_tokens,
    over_columns, of_half_rows, of_repeated_rows, read_twice, read_products, squared,
    squared_products, biased, named, without_weights, largest, in_half_precision,
    in_columns,
)  # fmt: skip


@pytest.mark.parametrize("form", MLPS)
def test_mlps_are_one_operation(form):
    run = functools.partial(layer, MLPS[form], without_weights)
    names = names_of(run, *arguments())
    assert names.count("fused_matmul") == 1
    assert "fp8_ragged_dot" not in names
    # The gather of rows is a part of it, and the gather of results stays.
    assert names.count("gather_rows") == 1


@pytest.mark.parametrize("sums", SUMS, ids=lambda fn: fn.__name__)
def test_sums_are_a_part_of_the_operation(sums):
    names = names_of(functools.partial(layer, mlp, sums), *arguments())
    assert names.count("fused_matmul") == 1
    assert not {"gather_rows", "fp8_ragged_dot"}.intersection(names)


@pytest.mark.parametrize("sums", SUM_MISSES, ids=lambda fn: fn.__name__)
def test_near_misses_of_sums_stay(sums):
    names = names_of(functools.partial(layer, mlp, sums), *arguments())
    assert names.count("fused_matmul") == 1
    # The operations after the matmuls are the user's.
    assert not {"reduce_sum", "reduce_max", "dot_general"}.isdisjoint(names)
    assert not {"gather_rows", "gather"}.isdisjoint(names)


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


def biased_product(rows, params, sizes, dot):
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


def named_gate(rows, params, sizes, dot):
    gate, up = split(dot(rows, params["gate_up"], sizes))
    a = checkpoint_name(jax.nn.silu(gate) * up, "a")
    return dot(a, params["down"], sizes)


MLP_MISSES = (
    twice, read_gate, same_half, other_sizes, other_rows, biased_product, clipped,
    interleaved, shifted, read_shifted, cut_twice, named_gate,
)  # fmt: skip


@pytest.mark.parametrize("form", MLP_MISSES, ids=lambda fn: fn.__name__)
def test_near_misses_of_mlps_stay(form):
    names = names_of(functools.partial(layer, form, without_weights), *arguments())
    assert "fused_matmul" not in names


def test_rows_that_others_read_are_not_gathered_again():
    def fn(params, x, ids, sizes):
        rows = x[jnp.argsort(ids) // CHOICES]
        return mlp(rows, params, sizes, coat.fp8_ragged_dot), jnp.sum(rows)

    params, x, _, ids, sizes = arguments()
    names = names_of(fn, params, x, ids, sizes)
    assert (names.count("gather_rows"), names.count("fused_matmul")) == (1, 1)


def test_a_matmul_is_in_one_operation():
    def fn(params, x, sizes):
        square = {"gate_up": params["gate_up"], "down": params["gate_up"]}
        y = mlp(x, square, sizes, coat.fp8_ragged_dot)
        gate, up = split(y)
        return coat.fp8_ragged_dot(jax.nn.silu(gate) * up, params["down"], sizes)

    params, x, *_, sizes = arguments()
    args = params, x, sizes
    names = names_of(fn, *args)
    assert (names.count("fused_matmul"), names.count("fp8_ragged_dot")) == (1, 1)
    jax.eval_shape(coat.fp8_remat(fn), *args)


@pytest.mark.parametrize(
    ("form", "inner"), [("gelu", 18), *(slow(form, 32) for form in MLPS)]
)
def test_gradients_are_as_near_as_of_single_matmuls(form, inner):
    """The last group of 16 columns of the gate may be short."""
    params, *further = arguments()
    halves = jnp.split(params["gate_up"], 2, axis=2)
    gate_up = jnp.concatenate([w[:, :, :inner] for w in halves], axis=2)
    args = {"gate_up": gate_up, "down": params["down"][:, :inner]}, *further

    def grads(wrap):
        run = wrap(functools.partial(layer, MLPS[form], without_weights))
        loss = lambda params, x: jnp.sum(jnp.sin(run(params, x, *args[2:])))  # noqa: E731
        return jax.tree.leaves(jax.jit(jax.grad(loss, (0, 1)))(*args[:2]))

    for a, b in zip(grads(coat.fp8_remat), grads(lambda fn: fn), strict=True):
        # Operands are rounded to 3 bits and gradients to 2, each matmul anew.
        assert 0 < np.linalg.norm(a - b) < 0.09 * np.linalg.norm(b)


def test_rows_of_no_group_are_not_read():
    params, x, *_, sizes = arguments()
    rows = jnp.concatenate([x] * CHOICES).at[sum(SIZES["rows of none"]) :].set(jnp.nan)

    def loss(params, rows):
        y = mlp(rows, params, sizes, coat.fp8_ragged_dot)
        return jnp.sum(jnp.sin(y))

    for results in jax.tree.leaves(
        jax.jit(jax.value_and_grad(coat.fp8_remat(loss), (0, 1)))(params, rows)
    ):
        assert np.isfinite(results).all()


def test_bf16_parameters_have_gradients_of_their_dtype():
    params, x, *further = arguments(dtype=jnp.bfloat16)
    run = coat.fp8_remat(functools.partial(layer, mlp, plain))

    def loss(params, x):
        return jnp.sum(run(params, x, *further).astype(jnp.float32))

    grads = jax.eval_shape(jax.grad(loss, (0, 1)), params, x)
    assert {g.dtype.name for g in jax.tree.leaves(grads)} == {"bfloat16"}


def by_numpy(params, x, weights, ids, sizes):
    """Computes the layer with operands rounded to E4M3, and sums in float64."""
    gate_up, down = (
        np.swapaxes(fake(np.swapaxes(np.asarray(w), 1, 2), w.shape[1]), 1, 2)
        for w in (params["gate_up"], params["down"])
    )
    order, ends = np.argsort(np.asarray(ids), kind="stable"), np.cumsum(sizes)
    tokens = fake(np.asarray(x), HIDDEN).astype(float)
    factors = np.asarray(weights, float).reshape(-1)
    total = np.zeros((TOKENS, HIDDEN))
    for row, choice in enumerate(order[: ends[-1]]):
        expert, token = int(np.searchsorted(ends, row, side="right")), choice // CHOICES
        gate, up = np.split((tokens[token] @ gate_up[expert]).astype(np.float32), 2)
        a = gate / (1 + np.exp(-gate)) * up
        scale = np.max(np.abs(a)) / np.float32(448)
        codes = (a / scale).astype(ml_dtypes.float8_e4m3fn).astype(float)
        total[token] += codes * scale * factors[choice] @ down[expert]
    return total


@pytest.mark.parametrize(
    ("sums", "sizes"), [slow(plain, "one expert"), (contracted, "rows of none")]
)
def test_values_are_numpys(sums, sizes):
    args = arguments(sizes)
    run = jax.jit(coat.fp8_remat(functools.partial(layer, mlp, sums)))
    expected = by_numpy(*args)
    # A code of the gate's output may be its neighbor, by the last bit of a sum.
    error = np.linalg.norm(run(*args) - expected)
    assert error <= 2e-3 * np.linalg.norm(expected)


def gradients_of(dot, wrap):
    """Returns a jitted function that computes gradients for a cotangent `dy`.

    Its first argument has the arrays to differentiate by: parameters, tokens and
    weights.
    """
    run = wrap(functools.partial(layer, mlp, plain, dot=dot))

    @jax.jit
    def gradients(arrays, further, dy):
        return jax.vjp(lambda *arrays: run(*arrays, *further), *arrays)[1](dy)

    return gradients


def test_gradients_are_near_exact_ones_and_zero_for_choices_of_no_group():
    params, x, weights, ids, sizes = arguments()
    # Small weights of one expert do not make its gradients vanish.
    weights = jnp.where((ids == 0).reshape(weights.shape), 1e-6 * weights, weights)
    arrays, further = (params, x, weights), (ids, sizes)
    dy = jnp.asarray(np.random.default_rng(2).standard_normal(x.shape), x.dtype)
    light = gradients_of(coat.fp8_ragged_dot, coat.fp8_remat)
    dot = functools.partial(lax.ragged_dot, precision="highest")
    expected = gradients_of(dot, lambda fn: fn)(arrays, further, dy)
    for a, b in zip(
        *map(jax.tree.leaves, (light(arrays, further, dy), expected)), strict=True
    ):
        for one, exact_one in zip(a, b, strict=True) if a.ndim == 3 else [(a, b)]:
            # Operands are rounded to 3 bits and gradients to 2, each matmul anew.
            error, norm = np.linalg.norm(one - exact_one), np.linalg.norm(exact_one)
            assert 0 < error < 0.13 * norm or norm == error == 0
    # NaN in the gradient of tokens without a group does not spoil the others, and
    # neither do choices without a group that have the weight NaN.
    of_none = (ids == EXPERTS).reshape(TOKENS, CHOICES)
    assert 0 < of_none.sum() < of_none.size
    dy = jnp.where(of_none.all(axis=1)[:, None], jnp.nan, dy)
    expected = light(arrays, further, dy)
    actual = light((params, x, jnp.where(of_none, jnp.nan, weights)), further, dy)
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.isfinite(b).all()
    np.testing.assert_array_equal(expected[-1][of_none], 0)
    assert np.any(expected[-1][~of_none])


def test_rows_of_experts_are_not_saved():
    args = arguments(dtype=jnp.bfloat16)
    run = coat.fp8_remat(functools.partial(layer, mlp, plain))
    report = coat.residual_report(run, *args)
    saved = sum(row.nbytes for row in report.rows if not row.is_argument)
    # Rows have gate and up in groups of 16, the largest scale of the gate, and three
    # indices, with 128 rows of padding. Codes of tokens and the list of tiles follow.
    rows = (ROWS + 128) * (2 * INNER * 18 // 16 + 4) + 12 * ROWS
    assert saved <= rows + TOKENS * HIDDEN + 4096
    # Weights are saved exactly, as bits.
    (of_weights,) = (
        line for line in str(report).splitlines() if "weights of choices" in line
    )
    assert f"uint16[{TOKENS},{CHOICES}]" in of_weights
    # Without the rule they are, in as many bytes as codes of rows take.
    unfused = coat.residual_report(
        coat.fp8_remat(functools.partial(layer, mlp, read_products)), *args
    )
    wide = sum(row.nbytes for row in unfused.rows if not row.is_argument)
    assert wide - saved >= ROWS * HIDDEN
    gated = coat.fp8_remat(functools.partial(layer, mlp, without_weights))
    saved = coat.residual_report(gated, *args).rows
    assert sum(row.nbytes for row in saved if not row.is_argument) <= (
        rows + TOKENS * HIDDEN + 4096
    )
