"""Tests that one matmul for gate and up becomes two if a gate's kernel reads them.

All other programs stay as they are without this rewrite.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers.dots import (
    assert_follows_autodiff,
    assert_near,
    gates,
    linear,
    mlp_arguments,
)
from helpers.gradients import FP8, fp8_bytes, saved, saved_bytes, value_and_vjp
from helpers.marks import slow, slow_except
from jax.ad_checkpoint import checkpoint_name

from coat_jax import fp8_dot_general, fp8_remat
from coat_jax.fusion import fuse
from pallas_kernels.dispatch import devices, operations

TOKENS, K, F = 96, 48, 64
BF16 = jnp.bfloat16


def silu(gate, up):
    return nn.silu(gate) * up


def contracted(x, w, axis):
    """Multiplies `x` by a stack of weights, with `axis` as the contracted axis."""
    return fp8_dot_general(x, w, (((x.ndim - 1,), (axis,)), ((), ())))


# The ways to compute gate and up from x and a weight [k, 2 f], and how they lie in it.
WAYS = {
    "split": lambda x, w: jnp.split(linear(x, w), 2, axis=-1),
    "slices": lambda x, w: ((h := linear(x, w))[..., :F], h[..., F:]),
    "swapped": lambda x, w: ((h := linear(x, w))[..., F:], h[..., :F]),
    "a barrier": lambda x, w: jnp.split(
        jax.lax.optimization_barrier(linear(x, w)), 2, axis=-1
    ),
    "a reshape": lambda x, w: ((h := pairs(linear(x, w)))[..., 0, :], h[..., 1, :]),
    "unstacked": lambda x, w: jnp.unstack(pairs(linear(x, w)), axis=-2),
    "a stack [2, k, f]": lambda x, w: (
        (h := contracted(x, stack(w), 1))[..., 0, :],
        h[..., 1, :],
    ),
    "a stack [2, f, k]": lambda x, w: (
        (h := contracted(x, stack(w).mT, 2))[..., 0, :],
        h[..., 1, :],
    ),
    "a split stack": lambda x, w: (
        half[..., 0, :] for half in jnp.split(contracted(x, stack(w), 1), 2, axis=-2)
    ),
    "jitted": lambda x, w: jax.jit(lambda h: jnp.split(h, 2, axis=-1))(linear(x, w)),
    "heads": lambda x, w: (
        half.reshape(*half.shape[:-2], F)
        for half in jnp.split(linear(x, w).reshape(*x.shape[:-1], 8, -1), 2, axis=-2)
    ),
}


def pairs(h):
    return h.reshape(*h.shape[:-1], 2, -1)


def stack(w):
    return jnp.stack(jnp.split(w, 2, axis=1))


def mlp(way, product=silu, dtype=BF16):
    """Returns a function of weights and x; `way` computes gate and up."""

    def fn(weights, x):
        both, down = (w.astype(dtype) for w in weights)
        return linear(product(*way(x, both)), down)

    return fn


def arguments(f=F, **options):
    """Returns the weights [k, 2 f] and [f, 32], activations, and a gradient.

    The halves of the first weight have scales that differ.
    """
    options = {"tokens": (TOKENS,)} | options
    weights, x, dy = mlp_arguments((K, 2 * f), (f, 32), **options)
    return [weights[0].at[:, f:].mul(3), weights[1]], x, dy


every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@every_way
def test_each_way_saves_codes_of_its_halves_as_a_gate_does(way):
    """Without the gate's kernel codes of [tokens, 2 f] would be saved."""
    weights, x, _ = arguments(tokens=(2, TOKENS // 2))
    actual = saved(fp8_remat(mlp(way)), weights, x, params=2)
    statistics = 4 * TOKENS + 2 * 4  # The largest scales of tokens; two scales.
    copies = 2 * fp8_bytes((TOKENS, F)) + fp8_bytes((TOKENS, K))
    assert saved_bytes(actual) == copies + statistics
    shapes = [r.shape for r in actual if r.shape[-1:] == (F,) and r.dtype in FP8]
    assert shapes in ([(TOKENS, F)] * 2, [(TOKENS, 2, F)])


IN_ONE = f"bfloat16[{TOKENS},2,{F}]"
APART = " ".join(2 * [f"bfloat16[{TOKENS},1,{F}]"])


@pytest.mark.parametrize(
    ("name", "expected"),
    [("split", IN_ONE), ("swapped", APART), ("a stack [2, k, f]", APART)],
)
def test_one_kernel_computes_the_gate(name, expected):
    """A single matmul computes both halves if gate comes first and no weight moves."""
    weights, x, _ = arguments()
    assert gates(fp8_remat(mlp(WAYS[name])), weights, x) == {expected}


def _of_stack(stack, x):
    gate, up, down = *jnp.unstack(stack[0]), stack[1]
    return linear(silu(linear(x, gate.T), linear(x, up.T)), down)


# Stacks [2, f, k] that one matmul reads, and others that none can.
STACKS = {
    "unstacked": (_of_stack, IN_ONE),
    "indices": (
        lambda ws, x: linear(silu(linear(x, ws[0][0].T), linear(x, ws[0][1].T)), ws[1]),
        IN_ONE,
    ),
    "reversed": (lambda ws, x: _of_stack((ws[0][::-1], ws[1]), x), APART),
    "swapped": (
        lambda ws, x: linear(silu(linear(x, ws[0][1].T), linear(x, ws[0][0].T)), ws[1]),
        APART,
    ),
    "one of both": (
        lambda ws, x: linear(
            silu(linear(x, ws[0][0].T), linear(x, ws[0][0].T * 2)), ws[1]
        ),
        APART,
    ),
    "of two stacks": (
        lambda ws, x: linear(
            silu(linear(x, ws[0][0].T), linear(x, (2 * ws[0])[1].T)), ws[1]
        ),
        APART,
    ),
}


@pytest.mark.parametrize("name", slow_except(STACKS.keys() - {"indices"}, STACKS))
def test_stacks_are_read_by_one_matmul(name):
    fn, expected = STACKS[name]
    ((w, down), x, _) = arguments()
    weights = (w.astype(BF16).T.reshape(2, F, K), down.astype(BF16))
    assert gates(fp8_remat(fn), weights, x) == {expected}


def test_a_stack_of_three_is_no_pair():
    ((w, down), x, _) = arguments()
    three = jnp.concatenate([w, w[:, :F]], 1).T.reshape(3, F, K)

    def fn(weights, x):
        gate, up, _ = jnp.unstack(weights[0])
        return linear(silu(linear(x, gate.T), linear(x, up.T)), weights[1])

    weights = three.astype(BF16), down.astype(BF16)
    assert gates(fp8_remat(fn), weights, x) == {APART}


def test_halves_that_are_multiplied_apart_have_a_scale_each():
    (w, down), x, dy = arguments()

    def fn(weights, x):
        w, down = weights
        return linear(silu(linear(x, w[:, :F]), linear(x, w[:, F:])), down)

    weights = w.at[:, :F].mul(1e-6).astype(BF16), down.astype(BF16)
    assert gates(fp8_remat(fn), weights, x) == {APART}
    assert_follows_autodiff(fn, dy, weights, x)


def apart(weights, x):
    gate, up, down = weights
    return linear(silu(linear(x, gate), linear(x, up)), down)


@functools.cache
def passes_apart():
    (w, down), x, dy = arguments()
    weights = *jnp.split(w.astype(BF16), 2, axis=1), down.astype(BF16)
    return value_and_vjp(fp8_remat(apart), dy, weights, x)


@pytest.mark.parametrize("name", ["split", "swapped", slow("a stack [2, f, k]")])
def test_one_matmul_computes_what_two_do(name):
    (w, down), x, dy = arguments()
    halves = jnp.split(w.astype(BF16), 2, axis=1)
    w = jnp.concatenate(halves[:: -1 if name == "swapped" else 1], axis=1)
    fn = fp8_remat(mlp(WAYS[name]))
    y, ((dw, ddown), dx) = value_and_vjp(fn, dy, (w, down.astype(BF16)), x)
    expected, ((dgate, dup, expected_ddown), expected_dx) = passes_apart()
    np.testing.assert_array_equal(y, expected)
    dhalves = [dup, dgate] if name == "swapped" else [dgate, dup]
    np.testing.assert_array_equal(dw, jnp.concatenate(dhalves, axis=1))
    np.testing.assert_array_equal(ddown, expected_ddown)
    # One matmul adds products in float32, and two round in between.
    assert_near(dx, np.asarray(expected_dx, float))


@pytest.mark.slow
@every_way
def test_each_way_computes_the_same(way):
    weights, x, dy = arguments()
    assert_follows_autodiff(mlp(way), dy, weights, x)


@pytest.mark.parametrize("name", WAYS)
def test_weights_that_devices_may_share_are_not_sliced(name, monkeypatch):
    """Several devices split only stacks, along the stack's axis."""
    monkeypatch.setattr(devices, "is_alone", lambda: False)
    weights, x, _ = arguments()
    with operations.traced_anew():
        kernels = gates(fp8_remat(mlp(WAYS[name])), weights, x)
    assert len(kernels) == ("stack [" in name or name == "a split stack")


def test_edges():
    split = WAYS["split"]
    for options in ({"f": 17, "tokens": (33,)}, {"dtype": jnp.float32}):
        weights, x, _ = arguments(**options)
        fn = mlp(split, dtype=x.dtype)
        assert len(gates(fp8_remat(fn), weights, x)) == 1
    weights, x, _ = arguments(tokens=(3, TOKENS))
    fn = jax.vmap(mlp(split), in_axes=(None, 0))
    assert len(gates(fp8_remat(fn), weights, x)) == 1


def test_gates_in_a_scan():
    weights, x, _ = arguments()
    light = fp8_remat(mlp(WAYS["split"]))

    def scanned(weights, x):
        def body(x, weights):
            return x + jnp.pad(light(weights, x), ((0, 0), (0, K - 32))), None

        return jax.lax.scan(body, x, [jnp.stack([w, w]) for w in weights])[0]

    shapes = {r.shape[-2:] for r in saved(scanned, weights, x)}
    assert (2, F) in shapes
    assert (TOKENS, 2 * F) not in shapes


# Arrays that are no halves, or that others read.
NEAR_MISSES = {
    "interleaved": lambda x, w: (
        (h := linear(x, w).reshape(-1, F, 2))[..., 0],
        h[..., 1],
    ),
    "steps": lambda x, w: ((h := linear(x, w))[..., ::2], h[..., 1::2]),
    "an overlap": lambda x, w: ((h := linear(x, w))[..., :F], h[..., F - 1 : -1]),
    "one half": lambda x, w: ((h := linear(x, w))[..., :F], h[..., :F] + 1),
    "unequal": lambda x, w: ((h := linear(x, w))[..., : F - 8], h[..., F + 8 :]),
    "three parts": lambda x, w: jnp.split(linear(x, w)[..., : F * 3 // 2], 3, -1)[:2],
    "less than halves": lambda x, w: jnp.split(linear(x, w), [F - 8, 2 * F - 16], -1)[
        :2
    ],
    "columns first": lambda x, w: (
        (h := linear(x, w).reshape(-1, 2, F, order="F"))[:, 0],
        h[:, 1],
    ),
    "transposed": lambda x, w: (half.T for half in jnp.split(linear(x, w).T, 2)),
    "rows": lambda x, w: jnp.split(linear(x, w), 2, axis=0),
    "rows in a reshape": lambda x, w: (
        (h := linear(x, w).reshape(2, -1, 2 * F))[0],
        h[1],
    ),
    "reversed": lambda x, w: jnp.split(linear(x, w)[..., ::-1], 2, axis=-1),
    "a third reader": lambda x, w: (
        (h := linear(x, w))[..., :F],
        h[..., F:] * (1 + h.mean()),
    ),
    "a bias": lambda x, w: jnp.split(linear(x, w) + w[0], 2, axis=-1),
    "a name": lambda x, w: jnp.split(checkpoint_name(linear(x, w), "both"), 2, axis=-1),
    "a narrow cast": lambda x, w: (
        half.astype(BF16)
        for half in jnp.split(linear(x, w).astype(jnp.float16), 2, axis=-1)
    ),
    "another matmul": lambda x, w: (
        (h := linear(x, w))[..., :F],
        h[..., F:] + linear(x, w[:, 1 : F + 1]),
    ),
    "no parameter": lambda x, w: jnp.split(linear(x, w * (1 + x[0, 0])), 2, axis=-1),
    "no FP8": lambda x, w: jnp.split(x @ w, 2, axis=-1),
    "float16": lambda x, w: jnp.split(
        linear(*(a.astype(jnp.float16) for a in (x, w))), 2, axis=-1
    ),
}
PRODUCTS = {
    "another activation": lambda gate, up: nn.relu(gate) * up,
    "a sum": lambda gate, up: nn.silu(gate) + up,
    "a limit": lambda gate, up: nn.silu(jnp.minimum(gate, 7)) * up,
}
RETURNED = {
    "gate": lambda x, w, down: (
        (h := jnp.split(linear(x, w), 2, axis=-1))[0],
        linear(silu(*h), down),
    ),
    "both": lambda x, w, down: (
        h := linear(x, w),
        linear(silu(*jnp.split(h, 2, axis=-1)), down),
    ),
    "an unread half": lambda x, w, down: linear(
        jnp.split(linear(x, w), 2, -1)[0], down
    ),
    "two gates": lambda x, w, down: (
        linear(silu(*(h := jnp.split(linear(x, w), 2, axis=-1))), down),
        linear(silu(*h[::-1]), down),
    ),
}


def with_and_without(fn, weights, x, monkeypatch):
    """Returns the text of the program with this rewrite, and without it."""

    def program():
        with operations.traced_anew():
            return str(jax.make_jaxpr(fp8_remat(fn))(weights, x))

    actual = program()
    with monkeypatch.context() as patch:
        patch.setattr(fuse, "_with_halves", lambda program, params: (program, set()))
        return actual, program()


@pytest.mark.internals
def test_programs_with_halves_differ(monkeypatch):
    weights, x, _ = arguments()
    actual, expected = with_and_without(mlp(WAYS["split"]), weights, x, monkeypatch)
    assert actual != expected


@pytest.mark.internals
@pytest.mark.parametrize("name", NEAR_MISSES)
def test_other_parts_are_left_alone(name, monkeypatch):
    def fn(weights, x):
        both, down = (w.astype(BF16) for w in weights)
        h = silu(*NEAR_MISSES[name](x, both)).astype(BF16)
        return linear(h, jnp.tile(down, (2, 1))[: h.shape[-1]])

    weights, x, _ = arguments()
    actual, expected = with_and_without(fn, weights, x, monkeypatch)
    assert actual == expected


@pytest.mark.internals
@pytest.mark.parametrize("name", PRODUCTS)
def test_other_products_of_halves_are_left_alone(name, monkeypatch):
    weights, x, _ = arguments()
    fn = mlp(WAYS["split"], PRODUCTS[name])
    actual, expected = with_and_without(fn, weights, x, monkeypatch)
    assert actual == expected


@pytest.mark.internals
@pytest.mark.parametrize("name", RETURNED)
def test_halves_that_others_read_are_left_alone(name, monkeypatch):
    def fn(weights, x):
        return RETURNED[name](x, *(w.astype(BF16) for w in weights))

    weights, x, _ = arguments()
    actual, expected = with_and_without(fn, weights, x, monkeypatch)
    assert actual == expected
