"""Tests that `fp8_remat` computes gradients of gates before BF16 matmuls by a kernel.

The forward pass keeps its bits, and backward reads FP8 copies of gate and up.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.dots import ACTIVATIONS, assert_near, bfloat16
from helpers.gradients import fake, saved, value_and_vjp
from helpers.marks import slow
from jax import lax

import pallas_kernels as pk
from coat_jax import fp8_remat

BF16, F32 = jnp.bfloat16, jnp.float32
TOKENS, K, F = (2, 64), 96, 128


def array(seed, *shape, dtype=BF16):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


WEIGHTS = {
    "gate": array(1, K, F) / 8,
    "up": array(2, K, F) / 8,
    "both": array(3, K, 2 * F) / 8,
    "stack": array(4, 2, F, K) / 8,
    "down": array(5, F, K) / 8,
    "transposed": array(6, 2, 48, F) / 8,
}
X, DY = array(7, *TOKENS, K), array(8, *TOKENS, K)


def silu(gate, up):
    return nnx.silu(gate) * up


def of_two_weights(w, x):
    return silu(x @ w["gate"], x @ w["up"]) @ w["down"]


def of_halves(w, x):
    gate, up = jnp.split(x @ w["both"], 2, axis=-1)
    return silu(gate, up) @ w["down"]


def of_a_stack(w, x):
    y = jnp.einsum("bsk,cfk->bscf", x, w["stack"])
    return silu(y[:, :, 0], y[:, :, 1]) @ w["down"]


def of_up_and_gate(w, x):
    up, gate = jnp.split(x @ w["both"], 2, axis=-1)
    return silu(gate, up) @ w["down"]


def in_float32(w, x):
    gate, up = x @ w["gate"], x @ w["up"]
    a = nnx.silu(gate.astype(F32)) * up.astype(F32)
    return a.astype(BF16) @ w["down"]


def of_cut_rows(w, x):
    """Rows of the halves are cut in two after the halves are taken."""
    y = (x @ w["both"]).reshape(-1, 2 * F)
    halves = y[:, :F], y[:, F:]
    gate, up = (lax.squeeze(h.reshape(1, -1, F // 2), (0,)) for h in halves)
    return (silu(gate, up) @ w["down"][: F // 2]).reshape(*x.shape[:-1], -1)[..., :K]


def to_several_axes(w, x):
    a = silu(x @ w["gate"], x @ w["up"])
    return jnp.einsum("bsf,cdf->bscd", a, w["transposed"]).reshape(x.shape)


def without_up(w, x):
    return nnx.gelu(x @ w["gate"]) @ w["down"]


def under_a_scan(w, x):
    def step(x, _):
        return x + fp8_remat(of_two_weights)(w, x), None

    return lax.scan(step, x, None, length=2)[0]


FORMS = [of_two_weights, of_halves, of_a_stack, of_up_and_gate, in_float32]
FORMS += [of_cut_rows, to_several_axes, without_up]


def has_kernel(fn):
    choices = pk.explain(lambda w, x: jax.vjp(fn, w, x)[1](DY), WEIGHTS, X).choices
    return "gated_grad" in {choice.operation for choice in choices}


def results(fn):
    """Returns the result of a function, and its gradients for `DY`."""
    return value_and_vjp(fn, DY, WEIGHTS, X)


def assert_gradients_near(gradients, of_autodiff):
    pairs = zip(*map(jax.tree.leaves, (gradients, of_autodiff)), strict=True)
    for actual, right in pairs:
        assert_near(actual, np.asarray(right, float), 0.06)


@pytest.mark.parametrize("fn", [*FORMS, under_a_scan])
def test_the_kernel_runs_and_the_forward_pass_keeps_its_bits(fn):
    assert has_kernel(fp8_remat(fn))
    y, gradients = results(fp8_remat(fn))
    expected, of_autodiff = results(fn)
    np.testing.assert_array_equal(y, expected)
    assert_gradients_near(gradients, of_autodiff)
    pairs = zip(*map(jax.tree.leaves, (gradients, of_autodiff)), strict=True)
    assert all(actual.dtype == right.dtype for actual, right in pairs)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("has_up", [True, slow(False)])
def test_gradients_follow_their_formulas(name, has_up):
    activation, exact = ACTIVATIONS[name]

    def fn(w, x):
        up = x @ w["up"] if has_up else 1
        return (activation(x @ w["gate"]) * up) @ w["down"]

    _, (dw, dx) = results(fp8_remat(fn))
    x, dy = (np.asarray(v, float).reshape(-1, v.shape[-1]) for v in (X, DY))
    gate, up, down = (np.asarray(WEIGHTS[k], float) for k in ("gate", "up", "down"))
    g, u = (fake(np.float32(bfloat16(x @ w)), 16).astype(float) for w in (gate, up))
    u = u if has_up else np.ones_like(g)
    step = 1e-5
    slope = (exact(g + step) - exact(g - step)) / (2 * step)
    da = bfloat16(dy @ down.T)
    dg, du = bfloat16(da * u * slope), bfloat16(da * exact(g))
    # Only a matmul reads the copy of x, so it has large groups.
    again = fake(np.asarray(X, np.float32), K).astype(float).reshape(x.shape)
    expected = {"gate": again.T @ dg, "down": bfloat16(exact(g) * u).T @ dy}
    of_x = dg @ gate.T
    if has_up:
        expected["up"] = again.T @ du
        of_x = of_x + du @ up.T
    for key, right in expected.items():
        assert_near(dw[key], right, 2e-2)
    assert_near(dx.reshape(x.shape), of_x)


@pytest.mark.parametrize("fn", FORMS)
def test_gate_and_up_are_saved_once(fn):
    """Gate and up have one copy, and x has one; nothing else is saved."""
    residuals = [r for r in saved(fp8_remat(fn), WEIGHTS, X) if r.argument is None]
    codes = sum(np.prod(r.shape) for r in residuals if r.dtype == jnp.float8_e4m3fn)
    assert codes == np.prod(TOKENS) * ((1 if fn is without_up else 2) * F + K)
    assert {r.dtype.name for r in residuals} == {"float8_e4m3fn", "uint16"}


def with_an_output_for_others(w, x):
    a = silu(x @ w["gate"], x @ w["up"])
    return a @ w["down"] + a[..., :K]


def of_float32(w, x):
    w, x = jax.tree.map(lambda v: v.astype(F32), (w, x))
    return of_two_weights(w, x).astype(BF16)


def with_another_activation(w, x):
    return (jnp.tanh(x @ w["gate"]) * (x @ w["up"])) @ w["down"]


def of_a_float32_result(w, x):
    a = silu(x @ w["gate"], x @ w["up"])
    return jnp.matmul(a, w["down"], preferred_element_type=F32).astype(BF16)


def with_batches(w, x):
    a = silu(x @ w["gate"], x @ w["up"])
    return jnp.einsum("bsf,bfk->bsk", a, jnp.stack([w["down"]] * 2))


def of_rows(w, x):
    """The matmul contracts tokens instead of the gate's outputs."""
    a = silu(x @ w["gate"], x @ w["up"])
    return jnp.einsum("bsf,st->btf", a, jnp.ones((64, 64), BF16))[..., :K]


def of_short_rows(w, x):
    a = silu(x @ w["gate"][:, :24], x @ w["up"][:, :24])
    return a @ w["down"][:24]


def of_few_elements(w, x):
    """Arrays of less than 4,096 elements have no copies."""
    y = of_two_weights(w, x[:1, :16])
    return jnp.zeros_like(x).at[:1, :16].set(y)


@jax.custom_vjp
def _straight(x):
    return nnx.silu(x)


_straight.defvjp(lambda x: (nnx.silu(x), None), lambda _, dy: (dy,))


def with_a_rule(w, x):
    return (_straight(x @ w["gate"]) * (x @ w["up"])) @ w["down"]


def with_a_scale(w, x):
    """SiLU of a doubled gate is no activation of the kernel's."""
    return silu(2 * (x @ w["gate"]), x @ w["up"]) @ w["down"]


NEAR_MISSES = [with_an_output_for_others, of_float32, with_another_activation]
NEAR_MISSES += [of_a_float32_result, with_batches, of_rows, of_short_rows]
NEAR_MISSES += [of_few_elements, with_a_rule]


@pytest.mark.parametrize("fn", NEAR_MISSES)
def test_near_misses_stay_with_autodiff(fn):
    assert not has_kernel(fp8_remat(fn))
    y, gradients = results(fp8_remat(fn))
    expected, of_autodiff = results(fn)
    assert_near(y, np.asarray(expected, float), 1e-2)
    assert_gradients_near(gradients, of_autodiff)


def test_factors_before_the_activation_are_part_of_its_operand():
    (_, gradients), (_, of_autodiff) = map(
        results, (fp8_remat(with_a_scale), with_a_scale)
    )
    assert_gradients_near(gradients, of_autodiff)


@pytest.mark.parametrize(
    "options",
    [
        {"group": 32},
        {"where": lambda _: True},
        {"key": jax.random.key(0)},
        {"policy": jax.checkpoint_policies.dots_saveable},
    ],
    ids="".join,
)
def test_other_options_of_copies_leave_gates_to_autodiff(options):
    assert not has_kernel(fp8_remat(of_two_weights, **options))
