"""Tests fp8_remat's options: residuals, groups, policies, messages and reports."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.gradients import (
    FP8,
    ROW,
    assert_close,
    compiled,
    cosine,
    fake,
    fp8_bytes,
    saved,
    saved_bytes,
    value_and_vjp,
)
from helpers.marks import slow, slow_except
from helpers.models import LinenNet, Mlp, normal, two_product_arguments, two_products
from hypothesis import given
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

import coat_jax as coat
from coat_jax import fp8_dot_general
from coat_jax.remat.api import fp8_remat
from coat_jax.remat.notes import Note
from coat_jax.remat.policies import products_saveable

NOTHING = jax.checkpoint_policies.nothing_saveable


def tagged(w, x):
    """Computes three matmuls with sines between; the sines' inputs are tagged."""
    for name in ("first", "second"):
        x = jnp.sin(checkpoint_name(x @ w, name))
    return x @ w


def tagged_arguments():
    return normal(1, 64, 64, scale=0.2), normal(2, 96, 64)


def codes(fn, *args) -> list[tuple[int, ...]]:
    return [r.shape for r in saved(fn, *args) if r.dtype in FP8]


# Choice of residuals.


def test_where_chooses_among_what_can_be_quantized():
    params, x = two_product_arguments()
    residuals = []

    def where(residual):
        residuals.append(residual)
        return residual.shape == (96, 128) and "dot_general" not in residual.asked_by

    light = fp8_remat(two_products, where=where)
    # Only cos(h) is quantized; x and sin(h), which matmuls read, stay float32.
    assert codes(light, params, x) == [(96, 128)]
    expected = fp8_bytes((96, 128)) + 96 * 128 * 4
    assert saved_bytes(saved(light, params, x)) == expected
    assert {r.shape for r in residuals} == {(96, 64), (96, 128)}
    assert {r.dtype.name for r in residuals} == {"float32"}
    assert {r.nbytes for r in residuals} == {96 * 64 * 4, 96 * 128 * 4}
    assert [r.is_argument for r in residuals] == [
        r.shape == (96, 64) for r in residuals
    ]


@pytest.mark.parametrize("outer", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_where_knows_the_names_of_checkpoint_name(outer):
    """The policy saves the tagged arrays themselves and no others."""
    w, x = tagged_arguments()
    names = jax.checkpoint_policies.save_only_these_names("first", "second")
    actual = {}

    def where(residual):
        actual[residual.name] = residual.is_argument
        return residual.name == "second"

    light = fp8_remat(outer(tagged), policy=names, where=where)
    assert codes(light, w, x) == [(96, 64)]
    assert actual == {None: True, "first": False, "second": False}


def test_where_that_is_never_true_leaves_autodiff():
    params, x = two_product_arguments()
    light = fp8_remat(two_products, where=lambda residual: False)
    assert codes(light, params, x) == []
    actual, expected = (
        compiled(jax.grad(lambda p, fn=fn: jnp.sum(jnp.sin(fn(p, x)))), params)
        for fn in (light, two_products)
    )
    assert_close(actual, expected, 1e-6)


@pytest.mark.parametrize("group", [8, 256])
def test_group_is_the_size_of_groups(group):
    def fn(w, x):
        return jnp.sin(x) @ w + jnp.sum(jnp.sin(3 * x))

    w, x = normal(1, 320, 16), normal(2, 64, 320)
    light = fp8_remat(fn, group=group)
    # 320 columns are no multiple of eight times 128, 64 or 32, nor of 256.
    predicted = 3 * fp8_bytes(x.shape, group)
    assert saved_bytes(saved(light, w, x)) == predicted
    dy = normal(3, 64, 16)
    _, (dw, _) = value_and_vjp(light, dy, w, x)
    expected = fake(jnp.sin(x), group).astype(np.float64).T @ np.asarray(dy, np.float64)
    assert_close(dw, expected, 1e-6)


@pytest.mark.parametrize(
    ("columns", "group"), [(64, ROW), (128, ROW), (1024, 128), (768, 32), (1000, 16)]
)
def test_products_read_larger_groups_if_eight_devices_can_share_them(columns, group):
    w, x = normal(1, columns, 16), normal(2, 64, columns)
    light = fp8_remat(lambda w, x: x @ w)
    assert saved_bytes(saved(light, w, x)) == fp8_bytes(x.shape, group)


# Recomputation.


@pytest.mark.parametrize("outer", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_policy_saves_in_fp8_what_it_would_save_wide(outer):
    w, x = tagged_arguments()
    names = jax.checkpoint_policies.save_only_these_names("first")
    plain = jax.checkpoint(tagged, policy=names)
    light = outer(fp8_remat(tagged, policy=names))
    wide = [r for r in saved(plain, w, x, params=1) if r.argument is None]
    # x is also saved, but it is an argument.
    assert [r.shape for r in wide] == [(96, 64)]
    assert codes(light, w, x) == [(96, 64)] * 2
    selected = fp8_bytes(x.shape, ROW) + fp8_bytes((96, 64))
    assert saved_bytes(saved(light, w, x)) == selected

    dy = normal(3, 96, 64)
    actual = compiled(lambda w, x: jax.vjp(light, w, x)[1](dy), w, x)
    # The expected gradient computes values after `first` from its FP8 copy, and values
    # before it from x's copy.
    w64, dy64 = np.asarray(w, np.float64), np.asarray(dy, np.float64)
    first = fake(np.asarray(x @ w), 16).astype(np.float64)
    h = np.sin(first)
    second = h @ w64
    dsecond = (dy64 @ w64.T) * np.cos(second)
    dfirst = (dsecond @ w64.T) * np.cos(first)
    dw = np.sin(second).T @ dy64 + h.T @ dsecond
    dw += fake(np.asarray(x), ROW).astype(np.float64).T @ dfirst
    assert_close(actual, (dw, dfirst @ w64.T), 1e-5)


@pytest.mark.parametrize(
    "policy", [NOTHING, jax.checkpoint_policies.dots_saveable], ids=["nothing", "dots"]
)
def test_policies_of_modules(policy):
    x = normal(1, 64, 64)
    plain = Mlp(64, rngs=nnx.Rngs(0))
    light = fp8_remat(plain, policy=policy)
    np.testing.assert_array_equal(light(x), plain(x))

    def count(module):
        graph, params = nnx.split(module)
        return saved_bytes(saved(lambda p, x: nnx.merge(graph, p)(x), params, x))

    assert count(light) < 0.75 * count(fp8_remat(plain)) < 0.075 * count(plain)
    net = fp8_remat(LinenNet, policy=policy)(64)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = net.init(keys, x)
    assert jax.tree.structure(variables) == jax.tree.structure(
        LinenNet(64).init(keys, x)
    )


def doubled(x):
    """Doubles x by a kernel that declares nothing about what it computes."""

    def kernel(x_ref, y_ref):
        y_ref[...] = 2 * x_ref[...]

    return pl.pallas_call(kernel, out_shape=x, interpret=True)(x)


@jax.custom_vjp
def kernel(x):
    return doubled(x)


kernel.defvjp(lambda x: (doubled(x), None), lambda _, dy: (doubled(dy),))


def test_products_saveable_knows_convolutions_and_kernels():
    """Batched matmuls, random masks and the operations between are recomputed."""

    def fn(params, x, key):
        h = jax.lax.conv(x, params["conv"], (1, 1), "SAME")  # Shape 2, 16, 32, 24.
        h = jnp.tanh(h) * jax.random.bernoulli(key, 0.9, h.shape)
        h = kernel(jnp.sin(h).reshape(2, 48, 256))
        scores = jnp.einsum("bsd,btd->bst", h, h)  # Shape 2, 48, 48.
        return jnp.tanh(jax.nn.softmax(scores) @ h) @ params["out"]

    params = {
        "conv": normal(1, 16, 8, 3, 3, scale=0.1),
        "out": normal(2, 256, 8, scale=0.1),
    }
    x, key = normal(3, 2, 8, 32, 24), jax.random.key(0)
    light = fp8_remat(fn, policy=products_saveable)
    residuals = saved(light, params, x, key)
    shapes = [r.shape for r in residuals if r.dtype in FP8]
    assert sorted(shapes) == [(2, 8, 32, 24), (2, 16, 32, 24), (2, 48, 256)]
    remaining = [r for r in residuals if r.argument is None and r.shape not in shapes]
    assert all(r.dtype == jnp.uint16 for r in remaining)
    actual, expected = (
        compiled(jax.grad(lambda p, f=f: jnp.sum(jnp.sin(f(p, x, key)))), params)
        for f in (light, fn)
    )
    assert 0.998 < cosine(actual, expected) < 1 - 1e-6


@pytest.mark.parametrize("product", [slow("dot"), "ragged_dot"])
def test_products_saveable_saves_what_experts_multiply(product):
    def fn(params, x):
        up, down = params
        if product == "dot":
            h = jnp.einsum("etd,edf->etf", x.reshape(4, 16, 320), up)
            return jnp.einsum("etf,efd->etd", jnp.tanh(jnp.sin(h)), down)
        sizes = jnp.full(4, 16, jnp.int32)
        h = jax.lax.ragged_dot(x, up, sizes)
        return jax.lax.ragged_dot(jnp.tanh(jnp.sin(h)), down, sizes)

    params = normal(1, 4, 320, 384, scale=0.1), normal(2, 4, 384, 320, scale=0.1)
    x = normal(3, 64, 320)
    light = fp8_remat(fn, policy=products_saveable)
    sizes = [r.nbytes for r in saved(light, params, x) if r.dtype in FP8]
    assert sorted(sizes) == [64 * 320, 64 * 384]
    actual, expected = (
        compiled(jax.grad(lambda p, f=f: jnp.sum(jnp.sin(f(p, x)))), params)
        for f in (light, fn)
    )
    assert 0.998 < cosine(actual, expected) < 1 - 1e-6


# Errors.


def test_params_argnums_name_arguments():
    arguments = two_product_arguments()
    for argnum in (5, -3):
        with pytest.raises(ValueError, match=f"there are 2, got {argnum}"):
            fp8_remat(two_products, params_argnums=argnum)(*arguments)


# Reports.


def test_the_report_says_how_and_why():
    def fn(w, x, index):
        h = jnp.tanh(x @ w)
        shift = jnp.max(x, axis=-1, keepdims=True)
        weight = jax.nn.softmax(h + shift)
        thin = jnp.sin(h[:, :2])
        return jnp.where(h > 0, weight * h, shift + thin[:, 1:])[index] @ w

    w, x = normal(1, 64, 64), normal(2, 4096, 64)
    index = jnp.arange(4096)
    light = fp8_remat(fn, where=lambda r: "tanh" not in r.asked_by)
    report = coat.residual_report(jax.jit(light), w, x, index)
    notes = {row.kept for row in report.rows}
    assert "E4M3, groups of 16" in notes
    assert "scales of groups of 16" in notes
    assert "E4M3, groups of 128" in notes
    assert "wide, no floating numbers" in notes
    assert "wide, rows of less than 16 bytes" in notes
    assert "wide, statistics of longer rows" in notes
    for row in report.rows:
        is_fp8 = row.dtype in FP8
        assert row.kept.startswith("E4M3") == is_fp8
        assert row.is_argument or row.kept
    text = str(report)
    assert all(note in text for note in notes)
    assert "test_remat_options.py" in text


def test_the_report_names_complex_numbers():
    light = fp8_remat(lambda w, x: jnp.fft.irfft(jnp.fft.rfft(x) * w))
    report = coat.residual_report(light, normal(1, 65), normal(2, 64, 128))
    kept = {row.kept for row in report.rows if row.dtype == jnp.complex64}
    assert kept == {"wide, complex numbers"}


def test_the_report_sees_into_scans_and_nested_wrappers():
    params, x = two_product_arguments()
    stacked = jax.tree.map(lambda a: jnp.stack([a, a]), params)

    def layers(fn):
        def run(params, x):
            def body(x, p):
                return x + fn(p, x)[:, :1], None

            return jax.lax.scan(body, x, params)[0]

        return run

    def notes(fn, params):
        rows = coat.residual_report(fn, params, x).rows
        return sorted(row.kept for row in rows if row.dtype in FP8)

    of_one_layer = notes(fp8_remat(two_products), params)
    assert of_one_layer == ["E4M3, groups of 128"] * 2 + ["E4M3, groups of 16"]
    assert notes(layers(fp8_remat(two_products)), stacked) == of_one_layer
    assert notes(fp8_remat(fp8_remat(two_products)), params) == of_one_layer
    assert notes(fp8_remat(layers(fp8_remat(two_products))), stacked) == of_one_layer
    assert notes(two_products, params) == []


def test_residuals_of_a_plain_function_have_names():
    w, x = tagged_arguments()
    names = jax.checkpoint_policies.save_only_these_names("first")
    rows = coat.residual_report(jax.checkpoint(tagged, policy=names), w, x).rows
    assert [row.name for row in rows] == ["first", None, None]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jnp.log(jax.nn.softmax(x) + 1e-9),
        slow(lambda x: jnp.log(x**2 + 1e-6)),
        slow(lambda x: jnp.sin(x) / (x**4 + 1e-3)),
        lambda x: jnp.exp(x) / (jnp.exp(x) + 1),
    ],
    ids=["entropy", "log", "ratio", "exponentials"],
)
def test_what_is_small_beside_its_group_has_finite_gradients(fn):
    """Divisors stay unquantized, since FP8 would round small ones to zero."""
    w, x = normal(0, 64, 64), normal(1, 64, 64)

    def loss(w, x):
        return jnp.mean(fn(x @ w))

    saved = [row.kept for row in coat.residual_report(fp8_remat(loss), w, x).rows]
    assert any("backward divides by it" in how for how in saved)

    def gradients(w, x):
        policies = None, jax.checkpoint_policies.dots_saveable
        return [jax.grad(fp8_remat(loss, policy=p))(w, x) for p in policies]

    assert np.isfinite(compiled(gradients, w, x)).all()


POLICIES = {
    "dots": jax.checkpoint_policies.dots_saveable,
    "products": products_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
}


def in_scan(fn):
    """Returns a function that computes `fn` in a loop of one step."""
    return lambda *args: jax.lax.scan(
        lambda _, x: (None, fn(*args)), None, None, length=1
    )[1][0]


PLACES = {
    "fp8_remat": lambda fn, policy: fp8_remat(fn, policy=policy),
    "checkpoint": lambda fn, policy: fp8_remat(jax.checkpoint(fn, policy=policy)),
    "loop": lambda fn, policy: fp8_remat(in_scan(jax.checkpoint(fn, policy=policy))),
}


@pytest.mark.internals
@pytest.mark.parametrize(
    ("name", "place"),
    slow_except(
        zip(POLICIES, PLACES, strict=True), itertools.product(POLICIES, PLACES)
    ),
)
def test_saved_codes_keep_their_scales(name, place):
    """An amax of 3.624 becomes 3.637 in the copy, which would double the scale."""

    def operand(seed, *shape):
        x = normal(seed, *shape)
        return 3.624 * x / jnp.max(jnp.abs(x))

    def fn(w, a, b):
        y = fp8_dot_general(1.0 * a, 1.0 * b, (((1,), (0,)), ((), ())))
        return jnp.sin(y / 8) @ w

    w, dy = normal(1, 64, 96), normal(2, 64, 96)
    a, b = operand(3, 64, 128), operand(4, 128, 64)
    light = PLACES[place](fn, POLICIES[name])
    actual = jax.jit(lambda w, a, b: jax.vjp(light, w, a, b)[1](dy))(w, a, b)
    w, a, b, dy = (np.asarray(x, np.float64) for x in (w, a, b, dy))
    y = a @ b / 8
    dproduct = dy @ w.T * np.cos(y) / 8
    expected = np.sin(y).T @ dy, dproduct @ b.T, a.T @ dproduct
    for gradient, exact in zip(actual, expected, strict=True):
        assert np.linalg.norm(gradient - exact) <= 0.12 * np.linalg.norm(exact)


_TEXT = st.text(st.characters(exclude_characters=";", codec="ascii"))


@given(_TEXT.filter(lambda kept: " for " not in f"{kept} "), _TEXT, _TEXT, _TEXT)
def test_a_note_is_read_back_from_any_name_stack(kept, reader, before, after):
    note = Note(kept, reader)
    before = before.replace("FP8", "")
    assert Note.within(f"{before}/{note}/{after}") == note


def test_the_innermost_note_counts():
    inner, outer = Note("E4M3, groups of 16", "dot in f (a.py:3)"), Note("wide", "g")
    assert Note.within(f"jvp({outer})/{inner}/sin") == inner
    assert Note.within("jvp(f)/sin") is None


def test_the_scope_reaches_the_program():
    note = Note("E4M3", "a; b")

    def fn(x):
        with note.scope():
            return jnp.sin(x)

    (eqn,) = jax.make_jaxpr(fn)(1.0).eqns
    assert Note.within(str(eqn.source_info.name_stack)) == Note("E4M3", "a, b")
