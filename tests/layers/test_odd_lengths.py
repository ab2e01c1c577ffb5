"""Tests cuDNN's attention of odd numbers of positions, which its kernels do not take.

A JAX function with the same residuals runs instead of cuDNN, except on a GPU.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import flash
from helpers.marks import slow

import coat_jax as coat
from coat_jax.layers import attention, flash_attention
from pallas_kernels.dispatch import devices

B, N, M, D = 2, 4, 2, 8


@pytest.fixture
def lengths(monkeypatch):
    """Returns a list of the numbers of queries and keys of each call of cuDNN."""
    lengths = []

    def in_jax(scores, q, k, v, mask):
        lengths.append((q.shape[1], k.shape[1]))
        return flash.attention(scores, q, k, v, mask)

    monkeypatch.setattr(flash_attention, "_in_jax", in_jax)
    return lengths


def arrays(queries, keys, dtype=jnp.float32, head_dim=D):
    """Returns queries, keys, values and a gradient."""
    draw = np.random.default_rng(queries).standard_normal
    shapes = [(B, queries, N, head_dim), (B, keys, M, head_dim)] * 2
    q, k, do, v = (jnp.asarray(draw(shape), dtype) for shape in shapes)
    return q, k, v, do


def mask_of(queries, keys):
    shown = np.random.default_rng(1).random((B, 1, queries, keys)) < 0.5
    return jnp.asarray(shown | (np.arange(keys) < 1))


def passes(compute, q, k, v, do):
    y, vjp = jax.vjp(compute, q, k, v)
    return y, *vjp(do)


def expected(q, k, v, do, mask=None, causal=False, window=None):
    distance = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])
    shown = (distance >= 0) | (not causal)
    if window:
        shown &= distance < window
    mask = shown[None, None] if mask is None else mask & shown
    mask = jnp.broadcast_to(mask, (*mask.shape[:2], *shown.shape))
    run = partial(jax.nn.dot_product_attention, mask=mask, scale=0.3)
    return passes(run, *(x.astype(jnp.float32) for x in (q, k, v, do)))


def assert_close(actual, reference, rtol=1e-5):
    for x, y in zip(actual, reference, strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        assert x.shape == y.shape
        assert np.linalg.norm(x - y) <= rtol * np.linalg.norm(y)


BARE = {"mask": None, "causal": False}
FORMS = {
    "everywhere": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 6},
    "mask": {"mask": True},
    "causal mask": {"causal": True, "mask": True},
}
SIZES = [(7, 7), (5, 9), (9, 5), (8, 5), (5, 8)]  # The numbers of queries and keys.


def options_of(form, sizes):
    return form | ({"mask": mask_of(*sizes)} if "mask" in form else {})


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("sizes", [*SIZES[:2], *map(slow, SIZES[2:])])
def test_nothing_reads_positions_that_are_appended(sizes, form, lengths):
    options = options_of(form, sizes)
    run = partial(flash_attention.flash_attention, scale=0.3, **BARE | options)
    assert_close(passes(run, *arrays(*sizes)), expected(*arrays(*sizes), **options))
    assert {*lengths} == {tuple(n + n % 2 for n in sizes)}


def test_what_is_saved_has_no_more_positions(lengths):
    q, k, v, _ = arrays(7, 7)
    run = partial(flash_attention.flash_attention, scale=0.3, **BARE)
    saved = jax.tree.leaves(jax.vjp(run, q, k, v)[1])
    statistics = (B, M, N // M, 7)
    shapes = [q.shape, k.shape, v.shape, q.shape, statistics]
    assert sorted(x.shape for x in saved) == sorted(shapes)


def test_mapped_attention(lengths):
    q, k, v, do = (x[:, None] for x in arrays(7, 7))
    run = partial(flash_attention.flash_attention, scale=0.3, **BARE)
    actual = jax.vmap(partial(passes, run))(q, k, v, do)
    assert_close([x[:, 0] for x in actual], expected(*arrays(7, 7)))


@pytest.mark.parametrize("window", [None, 3])
def test_layers_read_copies_in_the_backward_pass(window, lengths, monkeypatch):
    monkeypatch.setattr(attention, "has_flash_attention", lambda q: True)
    q, k, v, do = arrays(7, 7)
    copies = tuple(x + 0.1 for x in (q, k, v))

    def run(q, k, v):
        scores = attention.Scores(scale=0.3, window=window)
        return attention.causal_attention(q, k, v, copies, scores=scores)

    form = {"causal": True, "window": window}
    assert_close(passes(run, q, k, v, do)[:1], expected(q, k, v, do, **form)[:1])
    saved = jax.tree.leaves(jax.vjp(run, q, k, v)[1])
    assert not any(x is y for x in saved for y in (q, k, v))
    assert all(any(x is copy for x in saved) for copy in copies)
    assert lengths


def test_lengths_that_exports_leave_open_run_in_xla(lengths, monkeypatch):
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    (length,) = jax.export.symbolic_shape("s")
    x = jax.ShapeDtypeStruct((1, length, N, D), jnp.bfloat16)
    exported = jax.export.export(jax.jit(coat.attention), platforms=["cuda"])(x, x, x)
    assert exported.out_avals[0].shape == x.shape
    assert not lengths


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("sizes", [(197, 197), (65, 198), (198, 65)])
def test_cudnn_computes_odd_lengths(sizes, form):
    if "window" in form and sizes[0] > sizes[1]:
        pytest.skip("the last queries see no key")
    operands = arrays(*sizes, jnp.bfloat16, head_dim=64)
    options = options_of(form, sizes)
    run = partial(flash_attention.flash_attention, scale=0.3, **BARE | options)
    compiled = jax.jit(partial(passes, run)).lower(*operands).compile()
    assert "__cudnn$fmha" in compiled.as_text()
    assert_close(compiled(*operands), expected(*operands, **options), rtol=0.01)


@pytest.mark.gpu
def test_an_image_of_197_patches_runs_in_cudnn():
    def attend(q, k, v):
        p = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) * 0.3, axis=-1)
        return jnp.einsum("bhts,bshd->bthd", p, v)

    size = 197
    q, k, v, do = (
        arrays(n, n, jnp.bfloat16, head_dim=64)[0][:, :size]
        for n in range(size, size + 4)
    )
    run = coat.fp8_remat(attend, params_argnums=())
    compiled = jax.jit(partial(passes, run)).lower(q, k, v, do).compile()
    assert "__cudnn$fmha" in compiled.as_text()
    wide = [x.astype(jnp.float32) for x in (q, k, v, do)]
    assert_close(compiled(q, k, v, do), passes(attend, *wide), rtol=0.02)
