"""Tests cuDNN's attention with sequences or heads sharded over a mesh.

A JAX function with the same residuals runs instead of cuDNN.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import flash
from helpers.written_attention import BF16, added_number, causal, usual
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import coat_jax as coat
from coat_jax.fusion import attention as rewriting
from coat_jax.layers import flash_attention
from pallas_kernels.dispatch import placement

pytestmark = pytest.mark.distributed

B, S, N, M, D = 4, 16, 8, 4, 8
# Ways to split queries, keys and values, and the part of queries that a device has.
SPLITS = {
    P("a"): (2, S, N, D),
    P(("b", "a")): (1, S, N, D),
    P("a", None, "b"): (2, S, 4, D),
    P(None, None, ("a", "b")): (B, S, 2, D),
    P(None, "a"): (B, S, N, D),  # Positions are gathered.
    P(): (B, S, N, D),
}
MASKS = {"none": None, "all": (1, 1), "sequences": (B, 1), "heads": (1, N)}


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    """Returns a list to which each call of attention adds the shape of its queries."""
    shapes = []

    def attention(scores, q, k, v, mask):
        shapes.append(q.shape)
        return flash.attention(scores, q, k, v, mask)

    monkeypatch.setattr(flash_attention, "_in_jax", attention)
    placement._part.cache_clear()  # Parts of equal calls are traced once.
    return shapes


def arrays(key_heads=M):
    rng = np.random.default_rng(0)
    sizes = [(B, S, heads, D) for heads in (N, key_heads, key_heads, N)]
    return [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in sizes]


def mask_of(shape):
    if shape is None:
        return None
    rng = np.random.default_rng(1)
    shown = rng.random((*shape, S, S)) < 0.5
    return jnp.asarray(shown | np.eye(S, dtype=bool))


def passes(compute, q, k, v, do, mask):
    y, vjp = jax.vjp(lambda q, k, v: compute(q, k, v, mask), q, k, v)
    return y, *vjp(do)


def ours(q, k, v, mask):
    options = {"mask": mask, "scale": 0.3, "causal": mask is None}
    return flash_attention.flash_attention(q, k, v, **options)


def jaxs(q, k, v, mask):
    options = {"mask": mask, "scale": 0.3, "is_causal": mask is None}
    return jax.nn.dot_product_attention(q, k, v, **options)


def assert_close(actual, expected, atol=1e-5):
    for x, y in zip(actual, expected, strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(x, y, atol=atol)


def on_mesh(*splits, kind=AxisType.Auto):
    """Returns a mesh of four devices, and `arrays()` sharded over it."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind,) * 2)
    shardings = [NamedSharding(mesh, split) for split in splits]
    return mesh, list(map(jax.device_put, arrays(), shardings))


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(("split", "part"), SPLITS.items(), ids=str)
def test_devices_compute_their_sequences_and_heads(split, part, mask, parts):
    expected = passes(jaxs, *arrays(), mask_of(mask))
    _, placed = on_mesh(*[split] * 4)
    actual = jax.jit(functools.partial(passes, ours))(*placed, mask_of(mask))
    assert_close(actual, expected)
    assert part in parts


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_devices_have_some_query_heads_of_one_key_head(kind, mask, parts):
    q, k, v, do = arrays(key_heads=1)
    expected = passes(jaxs, q, k, v, do, mask_of(mask))
    mesh, _ = on_mesh(kind=kind)
    splits = [P("a", None, "b"), P("a"), P("a"), P("a", None, "b")]
    with jax.set_mesh(mesh):
        shardings = [NamedSharding(mesh, split) for split in splits]
        placed = map(jax.device_put, (q, k, v, do), shardings)
        actual = jax.jit(functools.partial(passes, ours))(*placed, mask_of(mask))
    assert_close(actual, expected)
    assert (2, S, N // 2, D) in parts


def test_arrays_may_be_split_differently():
    expected = passes(jaxs, *arrays(), None)
    _, placed = on_mesh(P("a"), P(None, "a"), P(None, None, "b"), P())
    assert_close(jax.jit(functools.partial(passes, ours))(*placed, None), expected)


def test_types_need_not_tell_the_mesh():
    """The type of a host array has no mesh, even if `jax.jit` has `in_shardings`."""
    mesh, _ = on_mesh()
    run = jax.jit(
        functools.partial(passes, lambda q, k, v, _: ours(q, k, v, None)),
        in_shardings=(NamedSharding(mesh, P("a", None, "b")),) * 4 + (None,),
    )
    expected = passes(jaxs, *arrays(), None)
    arguments = *map(np.asarray, arrays()), None
    assert_close(run(*arguments), expected)
    assert "all-gather" not in run.lower(*arguments).compile().as_text()


@pytest.mark.parametrize("mask", ["none", "all", "sequences"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_odd_lengths(kind, mask, parts):
    q, k, v, do = (x[:, 1:] for x in arrays())
    mask = mask_of(MASKS[mask])
    mask = mask if mask is None else mask[..., :-1, :-1]
    expected = passes(jaxs, q, k, v, do, mask)
    mesh, _ = on_mesh(kind=kind)
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P("a", None, "b"))
        placed = [jax.device_put(x, sharding) for x in (q, k, v, do)]
        actual = jax.jit(functools.partial(passes, ours))(*placed, mask)
    assert_close(actual, expected)
    assert (2, S, 4, D) in parts


def test_a_program_of_one_of_several_devices():
    assert jax.device_count() > 1
    expected = passes(jaxs, *arrays(), None)
    assert_close(jax.jit(functools.partial(passes, ours))(*arrays(), None), expected)


def test_under_vmap(parts):
    def mapped(compute):
        return jax.vmap(functools.partial(passes, compute), (0,) * 4 + (None,))

    expected = mapped(jaxs)(*(x[:, None] for x in arrays()), None)
    _, placed = on_mesh(*[P("a", None, "b")] * 4)
    run = jax.jit(lambda *arrays: mapped(ours)(*(x[:, None] for x in arrays), None))
    assert_close(run(*placed), expected)
    assert (1, S, 4, D) in parts


@pytest.fixture
def rewritten(monkeypatch):
    """Makes `fp8_remat` rewrite attention in BF16 as on a GPU."""
    monkeypatch.setattr(rewriting, "_has_kernel", lambda: True)
    monkeypatch.setattr(rewriting, "has_flash_attention", lambda q: q.dtype == BF16)


def grouped(q, k, v):
    b, s, n, d = q.shape
    q = q.reshape(b, s, k.shape[2], -1, d)
    p = jax.nn.softmax(jnp.einsum("bsmgd,btmd->bmgst", q, k) * 0.3, axis=-1)
    return jnp.einsum("bmgst,btmd->bsmgd", p, v).reshape(b, s, n, d)


def merged(q, k, v):
    b, s, _ = q.shape
    return grouped(*(x.reshape(b, s, 2, -1) for x in (q, k, v))).reshape(b, s, -1)


@pytest.mark.usefixtures("rewritten")
@pytest.mark.parametrize(
    ("fn", "shapes", "splits"),
    [
        # Four devices split eight heads that share two.
        (grouped, [(2, 8, 8, 4), (2, 8, 2, 4)], [P(None, None, "a"), P()]),
        # They split each of two heads.
        (merged, [(4, 8, 32), (4, 8, 32)], [P(None, None, "a")] * 2),
        # They split three sequences, with their positions.
        (
            lambda *x: grouped(*(y.reshape(2, 8, 4, 4) for y in x)).reshape(16, 4, 4),
            [(16, 4, 4), (16, 4, 4)],
            [P("a")] * 2,
        ),
    ],
    ids=["shared heads", "parts of heads", "parts of sequences"],
)
def test_parts_that_devices_do_not_divide_are_whole(fn, shapes, splits, parts):
    """XLA shards the arrays over a part of the mesh axis before attention."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal(s), BF16) for s in (*shapes, shapes[1]))
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))
    splits = [NamedSharding(mesh, split) for split in (*splits, splits[1])]
    run = coat.fp8_remat(fn, params_argnums=())
    gradients = jax.jit(lambda *x: jax.vjp(run, *x)[1](jnp.ones_like(x[0])))
    actual = gradients(*map(jax.device_put, (q, k, v), splits))
    assert parts
    expected = jax.vjp(fn, q, k, v)[1](jnp.ones_like(q))
    assert_close(actual, expected, atol=0.05)


@pytest.mark.usefixtures("rewritten")
@pytest.mark.parametrize(
    ("sizes", "heads", "is_found"),
    [
        ((2, 2), (4, 4), True),
        ((2, 2), (3, 3), False),
        ((4, 1), (3, 3), True),
        ((1, 2), (1, 1), True),
        ((2, 2), (4, 1), True),  # Query heads of one key head.
        ((2, 2), (3, 1), False),
        ((2, 2), (12, 3), False),
    ],
)
def test_heads_that_several_axes_do_not_divide_stay(sizes, heads, is_found, parts):
    mesh = jax.make_mesh(sizes, ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, P("a"))
    q, k = (jax.ShapeDtypeStruct((4, 8, n, 4), BF16, sharding=sharding) for n in heads)
    jax.jit(coat.fp8_remat(grouped, params_argnums=())).lower(q, k, k).compile()
    assert bool(parts) == is_found


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("form", [usual, causal, added_number])
@pytest.mark.usefixtures("rewritten")
def test_attention_that_a_program_writes_out_is_found(form, kind, parts):
    mesh, _ = on_mesh(kind=kind)
    # Queries, keys and values have eight heads each.
    heads = [
        jnp.concatenate([x, x], 2).astype(BF16) if x.shape[2] == M else x.astype(BF16)
        for x in arrays()
    ]
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P("a", None, "b"))
        placed = [jax.device_put(x, sharding) for x in heads]
        run = coat.fp8_remat(form)
        mask = jnp.broadcast_to(mask_of((1, 1))[0], (B, S, S))
        mask = mask.at[:, 3].set(False)  # This query sees no key.
        actual = jax.jit(functools.partial(passes, run))(*placed, mask)
    expected = passes(form, *heads, mask)
    # BF16 rounds scores and probabilities in the program as written.
    assert_close(actual, expected, atol=0.05)
    assert (2, S, 4, D) in parts
