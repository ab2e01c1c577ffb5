"""Tests of policies that offload residuals to the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.gradients import fake
from jax.ad_checkpoint import checkpoint_name

import coat_jax as coat
from coat_jax.remat.api import fp8_remat


def _names(src="device", dst="pinned_host"):
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["h"],
        offload_src=src,
        offload_dst=dst,
    )


_NAMES = _names()


def _layer(params, x):
    h = checkpoint_name(jnp.tanh(x @ params["up"]), "h")
    return jnp.sin(h) @ params["down"]


def _layers(params, x):
    return jax.lax.scan(lambda x, _: (_layer(params, x), None), x, length=3)[0]


def _arguments(dtype=jnp.bfloat16):
    up, down, x = (
        jax.random.normal(jax.random.key(i), shape, dtype) / 8
        for i, shape in enumerate([(64, 256), (256, 64), (128, 64)])
    )
    return {"up": up, "down": down}, 8 * x


def _on_host(fn, *args):
    """Returns the types of the arrays that wait on the host for the backward pass."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(fn, *a)[1], *args))
    program = jax.make_jaxpr(lambda *a: jax.tree.leaves(jax.vjp(fn, *a)[1]))(*args)
    assert len(leaves) == len(program.out_avals)
    return [a for a in program.out_avals if a.memory_space == jax.memory.Space.Host]


def _bytes(types):
    return sum(t.size * t.dtype.itemsize for t in types)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_codes_wait_on_the_host(wrap):
    params, x = _arguments()
    wide = _on_host(wrap(jax.checkpoint(_layer, policy=_NAMES)), params, x)
    light = _on_host(wrap(fp8_remat(_layer, policy=_NAMES)), params, x)
    assert [(t.shape, t.dtype) for t in wide] == [((128, 256), jnp.bfloat16)]
    assert sorted(t.size for t in light) == [128 * 256 // 16, 128 * 256]
    assert _bytes(light) <= 0.57 * _bytes(wide)


@pytest.mark.parametrize("fn", [_layer, _layers])
@pytest.mark.parametrize("kind", ["names", "products"])
def test_what_is_offloaded_to_the_device_stays_there(kind, fn):
    params, x = _arguments()
    policy = {
        "names": _names(dst="device"),
        "products": jax.checkpoint_policies.offload_dot_with_no_batch_dims(
            "device", "device"
        ),
    }[kind]
    light = fp8_remat(fn, policy=policy)
    assert not _on_host(light, params, x)
    saved = [row.kept for row in coat.residual_report(light, params, x).rows]
    assert any(kept.startswith("E4M3") for kept in saved), saved


@pytest.mark.parametrize("fn", [_layer, _layers])
@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (_names(dst="unpinned_host"), "offload_dst .* 'device', got 'unpinned_host'"),
        (_names(dst="host"), "offload_dst .* 'device', got 'host'"),
        (_names(src="pinned_host"), "offload_src .* 'device', got 'pinned_host'"),
    ],
)
def test_other_kinds_of_memory_are_refused(policy, message, fn):
    params, x = _arguments()
    light = fp8_remat(fn, policy=policy)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda *args: jax.vjp(light, *args)[0], params, x)


def test_a_report_says_where_arrays_wait():
    rows = coat.residual_report(fp8_remat(_layer, policy=_NAMES), *_arguments()).rows
    copies = [row.kept for row in rows if row.shape == (128, 256)]
    assert copies == ["E4M3, groups of 16, on the host"]


def test_gradients_are_those_of_the_rounded_array():
    params, x = _arguments(jnp.float32)
    dy = jax.random.normal(jax.random.key(9), (128, 64))

    @jax.jit
    def gradient(params, x):
        return jax.vjp(fp8_remat(_layer, policy=_NAMES), params, x)[1](dy)

    actual, _ = gradient(params, x)
    h = fake(np.tanh(np.asarray(x @ params["up"])), 16).astype(np.float64)
    down = np.sin(h).T @ np.asarray(dy, np.float64)
    np.testing.assert_allclose(actual["down"], down, atol=1e-4 * np.abs(down).max())


def test_offloaded_integers_and_statistics_stay_exact():
    offload = jax.checkpoint_policies.offload_dot_with_no_batch_dims
    light = fp8_remat(_layer, policy=offload("device", "pinned_host"))
    params, x = _arguments(jnp.float32)

    def loss(fn):
        return jax.jit(jax.grad(lambda p: jnp.sum(fn(p, x) ** 2)))

    actual, expected = loss(light)(params), loss(_layer)(params)
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert jnp.vdot(a, b) / jnp.linalg.norm(a) / jnp.linalg.norm(b) > 0.999


def test_what_a_loop_offloads_stays_wide():
    params, x = _arguments()
    light = fp8_remat(_layers, policy=_NAMES)
    types = _on_host(light, params, x)
    assert [(t.shape, t.dtype) for t in types] == [((3, 128, 256), jnp.bfloat16)]
    rows = coat.residual_report(light, params, x).rows
    (kept,) = [row.kept for row in rows if row.shape == (3, 128, 256)]
    assert kept == "wide, offloaded by the policy in a loop"


def test_layers_in_a_loop_have_their_codes_on_the_host():
    params, x = _arguments()

    def layers(params, x):
        def body(x, _):
            return fp8_remat(_layer, policy=_NAMES)(params, x), None

        return jax.lax.scan(body, x, None, length=3)[0]

    types = _on_host(layers, params, x)
    assert sorted(t.size for t in types) == [3 * 128 * 256 // 16, 3 * 128 * 256]
    gradient = jax.jit(jax.grad(lambda p: jnp.sum(layers(p, x).astype(jnp.float32))))
    assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(gradient(params)))
