"""Tests of attention as one opaque operation, in the form of TransformerEngine's.

TransformerEngine's fused attention is a primitive that lowers to a custom call. The
forward pass returns the output, the float32 statistics of the softmax and the state of
a random generator. A `custom_vjp` passes them to the primitive of the backward pass.
The stand-ins have the same operands and results, and are lowered to jnp.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.marks import slow
from jax.extend import core
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

import coat_jax as coat

_SHAPE = batch, length, heads, size = 2, 64, 4, 32
_WIDTH = heads * size


def _scores(q, k):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
    mask = jnp.tri(q.shape[1], dtype=bool)
    return jnp.where(mask, scores / math.sqrt(q.shape[-1]), -jnp.inf)


def _forward(q, k, v, seed):
    scores = _scores(q, k)
    statistics = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - statistics).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v), statistics, seed + 1


def _backward(q, k, v, o, statistics, seed, do):
    del seed
    weights = jnp.exp(_scores(q, k) - statistics)
    do = do.astype(jnp.float32)
    dv = jnp.einsum("bhqk,bqhd->bkhd", weights, do)
    delta = jnp.einsum("bqhd,bqhd->bhq", do, o.astype(jnp.float32))[..., None]
    ds = weights * (jnp.einsum("bqhd,bkhd->bhqk", do, v) - delta) / math.sqrt(size)
    dq = jnp.einsum("bhqk,bkhd->bqhd", ds, k)
    dk = jnp.einsum("bhqk,bqhd->bkhd", ds, q)
    return tuple(
        g.astype(x.dtype) for g, x in zip((dq, dk, dv), (q, k, v), strict=True)
    )


def _opaque(name, definition):
    """Returns a primitive that computes `definition` and hides it from programs."""
    primitive = core.Primitive(name)
    primitive.multiple_results = True

    def types(*operands):
        out = jax.eval_shape(definition, *operands)
        return [jax.core.ShapedArray(x.shape, x.dtype) for x in out]

    primitive.def_abstract_eval(types)
    primitive.def_impl(lambda *operands: list(jax.jit(definition)(*operands)))
    mlir.register_lowering(primitive, mlir.lower_fun(definition, multiple_results=True))
    return primitive


_forward_p = _opaque("te_fused_attn_forward_stand_in", _forward)
_backward_p = _opaque("te_fused_attn_backward_stand_in", _backward)


@jax.custom_vjp
def attention(q, k, v, seed):
    return _forward_p.bind(q, k, v, seed)[0]


def _save(q, k, v, seed):
    o, statistics, state = _forward_p.bind(q, k, v, seed)
    return o, (q, k, v, o, statistics, state)


attention.defvjp(_save, lambda saved, do: (*_backward_p.bind(*saved, do), None))


def layer(params, x, seed, attend=attention):
    q, k, v = ((x @ params[name]).reshape(*x.shape[:2], heads, size) for name in "qkv")
    o = attend(q, k, v, seed).reshape(x.shape)
    return x + jnp.sin(o @ params["o"])


@pytest.fixture
def arguments():
    keys = jax.random.split(jax.random.key(0), 5)
    params = {
        name: jax.random.normal(key, (_WIDTH, _WIDTH), jnp.bfloat16) / 12
        for name, key in zip("qkvo", keys, strict=False)
    }
    x = jax.random.normal(keys[4], (batch, length, _WIDTH), jnp.bfloat16)
    return params, x, jnp.zeros(2, jnp.uint32)


def test_attention_is_one_kernel_with_exact_operands(arguments):
    light = coat.fp8_remat(layer)
    rows = coat.residual_report(light, *arguments).rows
    kept = {row.shape: row.kept for row in rows if not row.is_argument}
    assert kept[batch, heads, length, 1].startswith("wide")
    assert kept[_SHAPE] == "wide, a kernel reads it beside statistics"
    program = str(jax.make_jaxpr(jax.grad(_loss(light)))(*arguments))
    assert program.count(_forward_p.name) == 1


def _loss(fn):
    return lambda *args: jnp.sum(jnp.sin(fn(*args).astype(jnp.float32)))


@functools.cache
def _gradient(fn):
    return jax.jit(jax.grad(_loss(fn)))


@pytest.mark.parametrize("rerun", [False, slow(True)], ids=["saved", "rerun"])
def test_gradients_are_near_those_of_plain_attention(arguments, rerun):
    def plain(params, x, seed):
        del seed
        q, k, v = (
            (x @ params[name]).reshape(*x.shape[:2], heads, size) for name in "qkv"
        )
        o = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        return x + jnp.sin(o @ params["o"])

    light = coat.fp8_remat(layer, rerun_attention=rerun)
    actual, expected = _gradient(light)(*arguments), _gradient(plain)(*arguments)
    for name in "qkvo":
        a, b = (np.asarray(g[name], np.float64).ravel() for g in (actual, expected))
        assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.998


def test_rerun_attention_saves_codes_alone(arguments):
    light = coat.fp8_remat(layer, rerun_attention=True)
    rows = coat.residual_report(light, *arguments).rows
    wide = [r for r in rows if not r.is_argument and r.dtype == jnp.bfloat16]
    assert not [r for r in wide if math.prod(r.shape) == math.prod(_SHAPE)]
    program = str(jax.make_jaxpr(jax.grad(_loss(light)))(*arguments))
    assert program.count(_forward_p.name) == 2


@jax.custom_vjp
def prepared(q, k, v, seed):
    """Computes attention and changes its statistics before backward kernels read them.

    As in FlashAttention's backward pass, two kernels compute the gradients.
    """
    return _forward_p.bind(q, k, v, seed)[0]


def _prepared_fwd(q, k, v, seed):
    o, (*operands, statistics, state) = _save(q, k, v, seed)
    return o, (*operands, statistics[..., 0], state)


def _prepared_bwd(saved, do):
    *operands, o, statistics, seed = saved
    logs = jnp.where(statistics == -jnp.inf, jnp.inf, statistics * 2.0)
    arrays = *operands, o, logs[..., None] / 2.0, seed, do
    (dq, *_), (_, dk, dv) = _backward_p.bind(*arrays), _backward_p.bind(*arrays)
    return dq, dk, dv, None


prepared.defvjp(_prepared_fwd, _prepared_bwd)


def _scanned(layer, params, x, seed):
    def body(x, params):
        return layer(params, x, seed), None

    return jax.lax.scan(body, x, params)[0]


def _in_cond(layer, params, x, seed):
    first = jax.tree.map(lambda p: p[0], params)
    return jax.lax.cond(seed[0] == 0, layer, lambda *args: args[1], first, x, seed)


def _sharded(layer, params, x, seed):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = (P(), P("data"), P())
    options = {"in_specs": specs, "out_specs": P("data"), "check_vma": False}
    on_mesh = jax.shard_map(layer, mesh=mesh, **options)
    return on_mesh(jax.tree.map(lambda p: p[0], params), x, seed)


def _saving(change, restore, loop=False):
    """Returns attention that saves `change(statistics)`.

    The kernel of the backward pass reads what `restore` makes of the saved array. With
    `loop` the kernel runs in a loop of unknown length.
    """

    @jax.custom_vjp
    def attend(q, k, v, seed):
        return _forward_p.bind(q, k, v, seed)[0]

    def fwd(q, k, v, seed):
        o, (*operands, statistics, state) = _save(q, k, v, seed)
        return o, (*operands, change(statistics), state)

    def bwd(saved, do):
        *operands, statistics, seed = saved

        def gradients(step):
            return step[0] + 1, *_backward_p.bind(
                *operands, restore(statistics), seed, do
            )

        start = jnp.uint32(0), *map(jnp.zeros_like, operands[:3])
        if not loop:
            return *gradients(start)[1:], None
        results = jax.lax.while_loop(lambda s: s[0] < seed[0], gradients, start)
        return *results[1:], None

    attend.defvjp(fwd, bwd)
    return attend


def _nested(layer, params, x, seed):
    params = {name: p.reshape(2, -1, *p.shape[1:]) for name, p in params.items()}

    def body(x, params):
        return _scanned(layer, params, x, seed), None

    return jax.lax.scan(body, x, params)[0]


def _same(statistics):
    return statistics


CHANGED = {
    "scaled": _saving(lambda s: s * 1.5, lambda s: s / 1.5),
    "jitted": _saving(jax.jit(jnp.negative), jnp.negative),
    "selected": _saving(lambda s: jnp.where(s == -jnp.inf, 0.0, s), _same),
    "an index": _saving(lambda s: jnp.stack([s, s])[s.size % 2], _same),
    "twice": _saving(lambda s: jnp.concatenate([s, s], -1), lambda s: s[..., :1]),
    "two halves": _saving(lambda s: (s / 2, s / 2), sum),
    "a cast": _saving(lambda s: s.astype(jnp.bfloat16), lambda s: s.astype(float)),
    "a loop": _saving(_same, _same, loop=True),
}


@pytest.mark.parametrize(
    ("attend", "around"),
    [
        *((attend, None) for attend in CHANGED.values()),
        (CHANGED["scaled"], _scanned),
        (CHANGED["a loop"], _scanned),
        (attention, _scanned),
        (prepared, None),
        (prepared, _scanned),
        (prepared, _nested),
        (prepared, _in_cond),
        (prepared, _sharded),
    ],
)
def test_what_kernels_read_is_exact_for_statistics_that_forward_changes(
    arguments, attend, around
):
    params, x, seed = arguments
    x = jnp.tile(x, (2, 4, 1))
    shape = (4, 256, heads, size)
    layers = 8 if around in (_scanned, _nested) else 1
    if around is not None:
        params = {name: jnp.stack([p] * layers) for name, p in params.items()}
    each = functools.partial(layer, attend=attend)
    run = each if around is None else functools.partial(around, each)
    rows = coat.residual_report(coat.fp8_remat(run), params, x, seed).rows
    of_kernel = [row.kept for row in rows if row.shape[-4:] == shape]
    assert of_kernel == 4 * ["wide, a kernel reads it beside statistics"]
    of_tokens = [row for row in rows if row.shape[-3:] == x.shape]
    copied = [row.nbytes for row in of_tokens if row.dtype == jnp.float8_e4m3fn]
    # A loop saves what a projection reads on its own.
    is_seen = around in (None, _sharded)
    assert copied == (2 if is_seen else 3) * [layers * x.size]
