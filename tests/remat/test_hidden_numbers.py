"""Tests that arrays in which large numbers hide small ones have no FP8 copies."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.gradients import flat
from helpers.marks import slow_except
from jax import nn
from jax.ad_checkpoint import checkpoint_name

import coat_jax as coat
from coat_jax.programs.graph import written_out
from coat_jax.remat.hiding import hiding_arrays

pytestmark = pytest.mark.internals

B, S, D = 2, 64, 128
MASK = jnp.tril(jnp.ones((S, S), bool))


def selected(scores, mask, low):
    return jnp.where(mask, scores, low)


def added(scores, mask, low):
    return scores + jnp.where(mask, 0.0, low)


def multiplied(scores, mask, low):
    return scores + (1 - mask.astype(scores.dtype)) * low


def scaled(scores, mask, low):
    return 0.5 * (jnp.where(mask, 2 * scores, low) - 0.3)


def negated(scores, mask, low):
    return -jnp.where(mask, -scores, -low)


def biased(x):
    """Computes silu(x) + sigmoid(x), for which autodiff saves x."""
    return nn.silu(x) + nn.sigmoid(x)


def attend(hide, function, low, params, x, mask):
    q, k, v = (x @ params[name] for name in "qkv")
    scores = jnp.einsum("btd,bsd->bts", q, k) / D**0.5
    return function(hide(scores, mask, low)) @ v


def arrays():
    keys = jax.random.split(jax.random.key(0), 5)
    params = {
        n: jax.random.normal(k, (D, D)) / D**0.5
        for n, k in zip("qkv", keys, strict=False)
    }
    return params, *(jax.random.normal(key, (B, S, D)) for key in keys[3:])


def error(fn, mask, light=coat.fp8_remat):
    params, x, dy = arrays()

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(fn, params, mask):
        return jax.grad(lambda params: jnp.sum(fn(params, x, mask) * dy))(params)

    actual, expected = (flat(gradient(f, params, mask)) for f in (light(fn), fn))
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


HIDES = [selected, added, multiplied, scaled, negated]
CASES = [
    (hide, function, -1e6)
    for hide in HIDES
    for function in (nn.sigmoid, nn.silu, nn.gelu, biased)
]
# Other functions and products compute 0 * inf in the program itself.
CASES += [(hide, nn.sigmoid, -jnp.inf) for hide in HIDES if hide is not multiplied]
# Each way to hide numbers and each function once.
FAST = [
    (selected, nn.silu, -1e6),
    (added, nn.sigmoid, -1e6),
    (multiplied, nn.gelu, -1e6),
    (scaled, biased, -1e6),
    (negated, nn.silu, -1e6),
    (selected, nn.sigmoid, -jnp.inf),
]


@pytest.mark.parametrize(("hide", "function", "low"), slow_except(FAST, CASES))
def test_gradients_are_as_near_as_without_large_numbers(hide, function, low):
    run = functools.partial(attend, hide, function)
    of_small = functools.partial(run, -20.0)
    assert error(functools.partial(run, low), MASK) < 1.1 * error(of_small, MASK) + 0.01


@pytest.mark.parametrize(("hide", "share"), [(selected, 1.0), (added, 1.12)])
def test_arrays_with_a_constant_mask_take_few_more_bytes(hide, share):
    params, x, _ = arrays()

    def saved(low):
        fn = functools.partial(attend, hide, nn.sigmoid, low)
        run = coat.fp8_remat(lambda params, x: fn(params, x, MASK))
        return coat.residual_report(run, params, x).nbytes

    assert saved(-1e9) <= share * saved(-20.0)


def test_an_offloaded_array_is_saved_as_it_is():
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["h"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def run(low, params, x, mask):
        def hide(*args):
            return checkpoint_name(selected(*args), "h")

        return attend(hide, nn.silu, low, params, x, mask)

    fn = functools.partial(run, -1e6)
    light = functools.partial(coat.fp8_remat, policy=policy)
    assert error(fn, MASK, light) < 0.06


def test_reports_say_why_an_array_has_no_copy():
    """A sum with two activations is not computed again from one of them."""
    params, x, _ = arrays()

    def fn(params, x):
        scores, gate = x @ params["q"], nn.sigmoid(x @ params["k"])
        return nn.silu(scores + (1 - gate) * -1e9) @ params["v"]

    report = coat.residual_report(coat.fp8_remat(fn), params, x)
    kept = {row.kept for row in report.rows if row.shape == x.shape}
    assert "wide, large numbers hide others in it" in kept


@pytest.mark.parametrize(
    "cut",
    [
        lambda x: jnp.maximum(x, 0),
        jnp.tanh,
        lambda x: jnp.minimum(-x, 0),
        lambda x: jnp.clip(x, -5, 5),
    ],
)
def test_functions_that_cut_large_numbers_off_leave_copies(cut):
    params, x, _ = arrays()

    def fn(params, x):
        scores = x @ params["q"]
        hidden = cut(jnp.where(scores > x, scores, -1e9))
        return (hidden * jnp.sin(hidden)) @ params["v"]

    report = coat.residual_report(coat.fp8_remat(fn), params, x)
    assert not any("hide" in row.kept for row in report.rows)


X = jax.ShapeDtypeStruct((S, S), jnp.float32)
H = lambda x: jnp.sin(x @ x)  # noqa: E731 It is no mask.
HITS = {
    "selection": lambda x: jnp.where(MASK, H(x), -1e9),
    "infinity": lambda x: jnp.where(MASK, H(x), -jnp.inf),
    "two": lambda x: jnp.where(MASK, -1e9, jnp.where(x > 0, 1e9, H(x))),
    "sum": lambda x: H(x) + jnp.where(MASK, 0.0, -1e9),
    "product": lambda x: H(x) + (1 - x) * -1e9,
    "difference": lambda x: H(x) + (x * 1e9 - 1e9),
    "two factors": lambda x: H(x) + (1 - x) * 1e3 * 1e3,
    "quotient": lambda x: H(x) - (1 - x) / 1e-6,
    "selected product": lambda x: H(x) + jnp.where(MASK, 0.0, (1 - x) * -1e9),
    "soft mask": lambda x: H(x) - nn.sigmoid(H(x)) * 1e9,
    "concatenation": lambda x: jnp.concatenate([H(x), jnp.full((2, S), -1e9)]),
    "padding": lambda x: jnp.pad(H(x), 1, constant_values=-1e9),
    "update": lambda x: H(x).at[:, 2:].set(-1e9),
    "slice": lambda x: jax.lax.dynamic_update_slice(
        H(x), jnp.full((2, S), -1e9), (0, 0)
    ),
    "barrier": lambda x: jax.lax.optimization_barrier((x, jnp.where(MASK, H(x), -1e9)))[
        1
    ],
    "taken": lambda x: jnp.where(MASK, H(x), -1e9)[jnp.arange(4)],
    "scaled": lambda x: -0.5 * jnp.where(MASK, H(x), -1e9) + 3,
    "other end": lambda x: jnp.maximum(jnp.where(MASK, H(x), 1e9), 0),
}
NO_HITS = {
    "small": lambda x: jnp.where(MASK, H(x), -100.0),
    "beside": lambda x: jax.lax.optimization_barrier((-1e9 + 0 * x, H(x)))[1],
    "large": lambda x: 1e9 * H(x),
    "sum of large": lambda x: 1e5 * H(x) + H(H(x)),
    "clip": lambda x: jnp.clip(jnp.where(MASK, H(x), -1e9), -5, 5),
    "clip, wide": lambda x: jnp.clip(H(x), -65504.0, 65504.0),
    "relu": lambda x: nn.relu(jnp.where(MASK, H(x), -1e9)),
    "zeros": lambda x: jnp.maximum(jnp.where(MASK, H(x), -1e9), jnp.zeros_like(x)),
    "bounded": lambda x: jnp.tanh(jnp.where(MASK, H(x), -1e9)),
    "softmax": lambda x: nn.softmax(jnp.where(MASK, H(x), -1e9)),
    "finite": lambda x: jnp.nan_to_num(H(x)),
    "positions": lambda x: H(x) * jnp.cos(jnp.arange(S) * 10_000.0),
    "gate": lambda x: H(x) * nn.sigmoid(H(x)) + x,
}


@pytest.mark.parametrize(
    ("fn", "hides"),
    [*((fn, True) for fn in HITS.values()), *((fn, False) for fn in NO_HITS.values())],
    ids=[*HITS, *NO_HITS],
)
def test_arrays_are_found_by_the_program(fn, hides):
    program = written_out(jax.make_jaxpr(fn)(X).jaxpr)
    assert (program.outvars[0] in hiding_arrays(program)) == hides
