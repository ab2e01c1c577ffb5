"""Tests what `coat.value_and_update` refuses, skips and clips."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util
from helpers.marks import slow
from helpers.released import (
    SCANNED,
    SGD,
    assert_same_tree_bits,
    assert_step_is_plain,
    assert_steps_equal,
    loss_of,
    parameters,
    tokens,
    unrolled,
)

import coat_jax as coat

UNROLLED = loss_of(unrolled)


def step_of(tx, loss=SCANNED, *, stacked=True, **options):
    """Traces a step; nothing is computed."""
    params = parameters(stacked=stacked)
    step = coat.value_and_update(loss, tx, **options)
    return jax.eval_shape(step, params, jax.eval_shape(tx.init, params), tokens())


def chained(*before):
    return optax.chain(*before, coat.fp8_adamw(1e-3))


COUPLED = {
    "global norm": (lambda: chained(optax.clip_by_global_norm(1.0)), "max_norm"),
    "finite": (lambda: optax.apply_if_finite(chained(), 3), "skip_not_finite"),
    "steps": (lambda: optax.MultiSteps(chained(), 2), "larger batch"),
    "steps, chained": (
        lambda: optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
        "larger batch",
    ),
    "steps within a chain": (
        lambda: optax.chain(
            optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
            optax.scale(1.0),
        ),
        "larger batch",
    ),
    "update norm": (
        lambda: chained(optax.normalize_by_update_norm()),
        "depends on the gradient of",
    ),
    "sharpness": (
        lambda: optax.contrib.sam(
            chained(), chained(optax.contrib.normalize()), reset_state=False
        ),
        "depends on the gradient of",
    ),
    "loss": (
        lambda: optax.chain(
            coat.fp8_adamw(1e-3), optax.contrib.reduce_on_plateau(patience=2)
        ),
        "argument: 'value'. Use jax.value_and_grad",
    ),
    "loss, before": (optax.polyak_sgd, "argument: 'value'. Use jax.value_and_grad"),
}


@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "unrolled"])
def test_steps_that_read_all_gradients_are_refused(stacked, name):
    make, match = COUPLED[name]
    with pytest.raises(ValueError, match=match):
        step_of(make(), SCANNED if stacked else UNROLLED, stacked=stacked)


NORMS = {
    "lamb": lambda: optax.lamb(1e-3),
    "lars": lambda: optax.lars(1e-3),
    "muon": lambda: optax.contrib.muon(1e-3),
    "block rms": lambda: optax.chain(optax.clip_by_block_rms(1e-3), optax.sgd(0.1)),
    "adaptive": lambda: optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=8),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_of_whole_stacks_are_refused(name):
    with pytest.raises(ValueError, match=r"mixes layers|has no axis|belongs to no"):
        step_of(NORMS[name]())


@pytest.mark.parametrize("last", [optax.lamb, slow(coat.fp8_adamw)])
def test_norms_of_unrolled_parameters_step(last):
    clip = optax.clip_by_block_rms(1e-3)
    tx = optax.chain(clip, last(1e-3), clip)
    assert_steps_equal(UNROLLED, tx, parameters(stacked=False), tokens())


def matrices(params):
    return traverse_util.path_aware_map(lambda path, p: p.ndim > 1, params)


@pytest.mark.parametrize("make", [optax.adamw, coat.fp8_adamw])
def test_masks_that_read_each_parameter_are_named(make):
    """Functions of Flax see the masks of parameters that do not step."""
    tx, params = make(1e-3, mask=matrices), {"w": jnp.eye(2), "b": jnp.ones(2)}
    step = coat.value_and_update(lambda p: jnp.sum(p["w"] * p["b"]), tx)
    message = "a mask or a label function .* fails on it: 'MaskedNode' object has no"
    with pytest.raises(ValueError, match=message):
        step_of(tx)
    with pytest.raises(ValueError, match=message):
        step(params, tx.init(params))
    step_of(make(1e-3, mask=matrices(parameters(stacked=True))))


def test_a_parameter_is_read_in_one_place():
    def twice(params, tokens):
        def run(fn, x, layers):
            return coat.scan_layers(fn, coat.scan_layers(fn, x, layers), layers)

        return loss_of(run)(params, tokens)

    def beside(params, tokens):
        decay = sum(jnp.sum(p**2) for p in jax.tree.leaves(params["layers"]))
        return SCANNED(params, tokens) + decay.astype(jnp.float32)

    def shared(params, tokens):
        first = [params["layers"][0]]
        return loss_of(unrolled)(params | {"layers": first * 2}, tokens)

    for loss, stacked in ((twice, True), (beside, True), (shared, False)):
        with pytest.raises(ValueError, match=r"is read by .* and by .* one place"):
            step_of(optax.adam(1e-3), loss, stacked=stacked)


def test_a_parameter_may_be_read_twice_without_a_gradient():
    def loss(params, tokens):
        norm = optax.tree.norm(jax.lax.stop_gradient(params))
        return SCANNED(params, tokens) + 0 * norm

    assert_step_is_plain(loss)


def test_parameters_may_be_numbers_of_python():
    params, tx = {"w": jnp.ones((4, 4)), "scale": 1.0}, optax.sgd(0.1)
    step = coat.value_and_update(lambda p: p["w"].sum() * p["scale"], tx)
    value, params, _ = step(params, tx.init(params))
    assert value == 16
    assert params["scale"] == pytest.approx(1 - 1.6)


def test_optimizers_may_be_compiled_before():
    """A jitted update is traced once to see what it reads, and again for the step."""
    adam = coat.scale_by_fp8_adam()
    compiled = optax.GradientTransformation(adam.init, jax.jit(adam.update))
    tx = optax.chain(compiled, optax.scale(-1e-3))
    params = parameters(stacked=False)
    step = jax.jit(coat.value_and_update(UNROLLED, tx))
    program = step.lower(params, tx.init(params), tokens())
    assert "coat_kernel" not in program.as_text()


def test_bad_arguments_are_named():
    with pytest.raises(TypeError, match=r"tx must be an optax .* got 3"):
        coat.value_and_update(SCANNED, 3)
    with pytest.raises(ValueError, match="max_norm must be a positive number, got -1"):
        coat.value_and_update(SCANNED, optax.sgd(1.0), max_norm=-1)
    with pytest.raises(ValueError, match="return_norms needs max_norm"):
        coat.value_and_update(SCANNED, optax.sgd(1.0), return_norms=True)
    step = coat.value_and_update(SCANNED, optax.sgd(1.0))
    with pytest.raises(ValueError, match="max_loss needs skip_not_finite"):
        step({}, optax.sgd(1.0).init({}), tokens(), max_loss=1.0)
    params = {"w": jnp.ones(3), "count": jnp.arange(3)}
    step = coat.value_and_update(lambda p: p["w"].sum(), optax.sgd(1.0))
    with pytest.raises(TypeError, match=r"\['count'\] must be floating, got int32"):
        step(params, optax.sgd(1.0).init(params))
    params = {"w": jnp.ones(3)}
    with pytest.raises(ValueError, match="key is for the stochastic rounding"):
        step(params, optax.sgd(1.0).init(params), key=jax.random.key(0))
    tx, bf16 = optax.adam(1e-3), {"w": jnp.ones(3, jnp.bfloat16)}
    state = optax.tree.map_params(tx, lambda m: m.astype(jnp.float16), tx.init(bf16))
    step = coat.value_and_update(lambda p: p["w"].sum().astype(jnp.float32), tx)
    with pytest.raises(ValueError, match=r"state of params\['w'\] from float16"):
        step(bf16, state)


def test_options_do_not_hide_arguments_of_the_loss():
    def loss(params, key=None, max_loss=None):
        return params["w"].sum() * (1.0 if key is None else jax.random.uniform(key))

    params, tx, key = {"w": jnp.ones(3)}, coat.fp8_adamw(1e-3), jax.random.key(0)
    step = coat.value_and_update(loss, tx, skip_not_finite=True)
    for name, option in {"key": key, "max_loss": 1.0}.items():
        with pytest.raises(ValueError, match=f"{name} is an option.*by position"):
            step(params, tx.init(params), **{name: option})
    value, _, _ = step(params, tx.init(params), key, 2.0, key=key, max_loss=4.0)
    assert value == 3 * jax.random.uniform(key)


@pytest.mark.parametrize(
    "stacked", [{}, {"a": jnp.ones(())}, {"a": jnp.ones((2, 3)), "b": jnp.ones(3)}]
)
def test_stacks_need_one_axis_of_layers(stacked):
    with pytest.raises(ValueError, match="one leading axis of layers"):
        coat.scan_layers(lambda p, x: x, jnp.ones(3), stacked)


def scanned(fn, x, stack):
    return jax.lax.scan(lambda x, p: (fn(p, x), None), x, stack)[0]


SCANS = {
    "scan": scanned,
    "checkpoint": lambda *args: jax.checkpoint(scanned, static_argnums=0)(*args),
    "cond": lambda fn, x, stack: jax.lax.cond(
        x.sum() > 0, lambda x, stack: scanned(fn, x, stack), lambda x, _: x, x, stack
    ),
    "sliced": lambda fn, x, stack: scanned(
        fn, x, jax.tree.map(lambda p: p[:50], stack)
    ),
}


@pytest.mark.parametrize(
    ("stacks", "scan"),
    [(["layers"], scan) for scan in SCANS] + [(["layers", "encoder"], "scan")],
)
def test_layers_that_lax_scan_hides_give_a_warning(stacks, scan):
    def loss(params, tokens):
        def run(fn, x, layers):
            for stack in [layers, *(params[name] for name in stacks[1:])]:
                x = SCANS[scan](fn, x, stack)
            return x

        return loss_of(run)(params, tokens)

    def deep(name):  # Stacks may differ in depth.
        depth = 100 + len(name)
        return jax.tree.map(
            lambda p: jax.ShapeDtypeStruct((depth, *p.shape[1:]), p.dtype),
            params["layers"],
        )

    params = parameters(stacked=True)
    large = params | {name: deep(name) for name in stacks}
    small = params | {name: params["layers"] for name in stacks}
    state = SGD.init(small)
    step = coat.value_and_update(loss, SGD)
    with pytest.warns(UserWarning, match=r"\['a'\].*coat.scan_layers"):
        jax.eval_shape(step, large, state, tokens())
    jax.eval_shape(coat.value_and_update(SCANNED, SGD), large, state, tokens())
    if (stacks, scan) == (["layers"], "scan"):
        assert_step_is_plain(loss)


BF16 = jnp.bfloat16
COMPUTED = {
    "cast": lambda p: p["w"].astype(BF16),
    "cast, next to a small parameter": lambda p: (p["w"].astype(BF16), p["norm"]),
    "cast, next to a large parameter": lambda p: (p["w"].astype(BF16), p["v"]),
    "scaled": lambda p: p["w"] * p["norm"][0, 0],
    "sliced": lambda p: p["w"][:, 1:],
    "constrained": lambda p: jax.lax.optimization_barrier(p["w"]),
}
ORDINARY = {
    "parameters": lambda p: p,
    "frozen": lambda p: jax.lax.stop_gradient(p["w"]).astype(BF16),
    "small": lambda p: 2 * p["norm"],
    "activations": lambda p: (p["w"], jnp.broadcast_to(p["norm"], (2, 400, 999))),
}


def traced_step(stack_of, apply=coat.scan_layers, around=lambda loss: loss):
    """Traces a step of layers that get `stack_of` the parameters."""
    shapes = {"w": (2, 999, 999), "v": (2, 999, 999), "norm": (2, 1, 999)}
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}

    def layer(p, x):
        return x + sum(jnp.sum(w.astype(jnp.float32)) for w in jax.tree.leaves(p))

    def loss(params):
        return apply(layer, jnp.float32(0), stack_of(params))

    step = coat.value_and_update(around(loss), SGD)
    jax.eval_shape(step, params, jax.eval_shape(SGD.init, params))


@pytest.mark.parametrize("apply", [coat.scan_layers, coat.apply_layer])
@pytest.mark.parametrize("name", COMPUTED)
def test_layers_of_arrays_that_the_loss_computes_give_one_warning(name, apply):
    with pytest.warns(UserWarning, match="cast, scale or reshape them") as record:
        traced_step(COMPUTED[name], apply)
    assert [warning.filename for warning in record] == [__file__]


AROUND = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "cond": lambda loss: lambda p: jax.lax.cond(p["w"][0, 0, 0] > 0, loss, loss, p),
    "layer": lambda loss: lambda p: coat.apply_layer(lambda p, _: loss(p), 0.0, p),
}
CHANGED = {
    "scaled": lambda w: 2 * w,
    "chosen": lambda w: jnp.where(w > 0, w, 0),
    "normalized": lambda w: w / jnp.linalg.norm(w, axis=-1, keepdims=True),
    "cut and scaled": lambda w: 2 * w[:, :500],
    "in another order": lambda w: w[jnp.array([1, 0])],
    "by a condition": lambda w: jax.lax.cond(w[0, 0, 0] > 0, lambda w: -w, jnp.tanh, w),
}


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("around", ["jit", "checkpoint", "cond"])
def test_stacks_that_change_within_a_transformation_give_a_warning(around, name):
    with pytest.warns(UserWarning, match=r"params\['w'\].*parameters unchanged"):
        traced_step(lambda p: CHANGED[name](p["w"]), around=AROUND[around])


FROM = {
    "frozen": lambda p: 2 * jax.lax.stop_gradient(p["w"]),
    "a number": lambda p: jnp.ones((2, 300)) * p["w"][0, 0, 0],
    "activations": lambda p: jnp.ones((5, 999)) @ p["w"][0],
}


@pytest.mark.parametrize("name", FROM)
def test_arrays_that_are_no_changed_stack_give_no_warning(name):
    traced_step(FROM[name], around=jax.jit)


@pytest.mark.parametrize("name", ORDINARY)
def test_layers_of_other_arrays_give_no_warning(name):
    traced_step(ORDINARY[name])


@pytest.mark.parametrize("around", AROUND)
def test_a_loss_within_a_transformation_gives_a_warning_that_names_it(around):
    with pytest.warns(UserWarning, match="coat.scan_layers within jax.jit"):
        traced_step(lambda params: params, around=AROUND[around])


# --- Clipping by the global norm, and steps that are skipped. ---
@pytest.mark.parametrize(
    ("stacked", "limit"), [(True, 0.01), slow(True, 1e6), slow(False, 0.01)]
)
def test_norms_are_those_of_the_gradients_and_clip_as_optax(stacked, limit):
    loss, params = (SCANNED, UNROLLED)[not stacked], parameters(stacked=stacked)
    tx = optax.sgd(1.0)
    step = coat.value_and_update(loss, tx, max_norm=limit, return_norms=True)
    _, new, _, norms = jax.jit(step)(params, tx.init(params), tokens())
    grads = jax.jit(jax.grad(loss))(params, tokens())
    expected = jax.tree.map(
        lambda g: np.linalg.norm(np.asarray(g, np.float64).reshape(-1)), grads
    )
    assert jax.tree.structure(norms) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(norms), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3)
    clip = optax.clip_by_global_norm(limit)

    def stepped(params, grads):
        clipped, _ = clip.update(grads, clip.init(params))
        return optax.apply_updates(params, jax.tree.map(jnp.negative, clipped))

    stepped = jax.jit(stepped)(params, grads)
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(stepped), strict=True):
        # The norm is a sum in another order, which may round a gradient differently.
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=2**-7, atol=1e-4)
        assert np.mean(a != b) < 0.01


@functools.cache
def skipping(max_norm, stacked, **options):
    """Returns a jitted step for a loss plus the square root of a parameter."""
    form = SCANNED if stacked else UNROLLED

    def loss(params, tokens):
        root = jnp.sqrt(params["unread"][0, 0]).astype(jnp.float32)
        return form(params, tokens) + root

    tx = optax.adamw(1e-2)
    return jax.jit(coat.value_and_update(loss, tx, max_norm=max_norm, **options))


@pytest.mark.parametrize("stacked", [True, slow(False)])
@pytest.mark.parametrize("max_norm", [slow(None), 1.0])
def test_steps_that_are_not_finite_or_above_a_loss_change_no_bit(max_norm, stacked):
    params = parameters(stacked=stacked)
    params["unread"] = jnp.abs(params["unread"])
    state = optax.adamw(1e-2).init(params)
    step = skipping(max_norm, stacked, skip_not_finite=True)
    above = jnp.float32(100.0)
    value, *new = step(params, state, tokens(), max_loss=above)
    _, *expected = skipping(max_norm, stacked)(params, state, tokens())
    assert_same_tree_bits(new, expected)
    _, *same = step(params, state, tokens(), max_loss=value * 0.99)
    assert_same_tree_bits(same, [params, state])
    bad = params | {"embedding": params["embedding"].at[tokens()[0, 0]].set(jnp.nan)}
    value, *same = step(bad, state, tokens(), max_loss=above)
    assert np.isnan(value)
    assert_same_tree_bits(same, [bad, state])
    if max_norm is not None:
        # The derivative of a root at zero is not finite, though the loss is.
        bad = params | {"unread": params["unread"].at[0, 0].set(0)}
        value, *same = step(bad, state, tokens(), max_loss=above)
        assert np.isfinite(value)
        assert_same_tree_bits(same, [bad, state])
