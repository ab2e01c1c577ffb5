"""Tests that a step in the backward pass has the bits of a step after it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import meta
from helpers.marks import slow, slow_except
from helpers.released import (
    LAYERS,
    SCANNED,
    SGD,
    after,
    assert_same_tree_bits,
    assert_step_is_plain,
    assert_steps_equal,
    layer,
    loss_of,
    ordinary,
    parameters,
    tokens,
    unrolled,
)
from helpers.versions import as_pure

import coat_jax as coat
from coat_jax.models import llama


def scan_of(fn):
    return loss_of(lambda _, x, layers: coat.scan_layers(fn, x, layers))


FORMS = {False: loss_of(unrolled), True: SCANNED}
KEY = jax.random.key(7)


def matrices(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def by_rank(a, b):
    def labels(params):
        def label(path, p):
            return "frozen" if path[0].key == "unread" else "ab"[p.ndim < 2]

        return jax.tree_util.tree_map_with_path(label, params)

    return optax.partition({"a": a, "b": b, "frozen": optax.set_to_zero()}, labels)


def matrices_of_layers(params):
    """Returns a mask that trains only the matrices of layers."""

    def is_trained(path, p):
        return path[0].key == "layers" and p.ndim > 1

    return jax.tree_util.tree_map_with_path(is_trained, params)


DECAYED = optax.adamw(optax.linear_schedule(1e-3, 0, 5), mask=matrices)
OPTIMIZERS = {
    "fp8 lion": (coat.with_quantized_state(optax.lion(1e-3)), {}),
    "partition": (
        optax.chain(optax.clip(1e-3), by_rank(DECAYED, optax.lion(1e-3))),
        {},
    ),
    "fp8_adamw": (
        optax.chain(optax.clip(1e-3), coat.fp8_adamw(1e-3, mask=matrices)),
        {"key": KEY},
    ),
    "fp8_adamw, trace": (optax.chain(coat.fp8_adamw(1e-3), optax.trace(0.5)), {}),
    "fp8_adamw, frozen": (
        optax.partition(
            {True: coat.fp8_adamw(1e-3), False: optax.set_to_zero()}, matrices_of_layers
        ),
        {},
    ),
}
CASES = [(name, stacked) for name in OPTIMIZERS for stacked in (True, False)]
FAST = [("partition", False), ("fp8_adamw", True)]


@pytest.mark.parametrize(("name", "stacked"), slow_except(FAST, CASES))
def test_released_steps_have_the_ordinary_bits(name, stacked):
    tx, key = OPTIMIZERS[name]
    params = parameters(stacked=stacked)
    assert_steps_equal(FORMS[stacked], tx, params, tokens(), **key)


def test_injected_hyperparameters_are_advanced_once():
    schedule = optax.linear_schedule(1e-2, 1e-3, 4)
    inject = optax.inject_hyperparams(optax.adamw, hyperparam_dtype=jnp.float32)
    tx, params = inject(schedule), parameters(stacked=True, dtype=jnp.float32)
    arguments = params, tx.init(params), tokens()
    value, new, state = after(coat.value_and_update(SCANNED, tx), *arguments)
    expected = after(ordinary(SCANNED, tx), *arguments)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    # Sums of float32 gradients have another order.
    for a, b in zip(*map(jax.tree.leaves, (new, expected[1])), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3)
    assert state.count == 2
    rate = state.hyperparams["learning_rate"]
    np.testing.assert_array_equal(rate, expected[2].hyperparams["learning_rate"])


MODELS = [
    slow({"recipe": "coat_max", "tie_embeddings": True}),
    slow({"recipe": "te", "norm": "layer"}),
    slow({"recipe": "bf16", "hidden_size": 160, "head_dim": 32}),
]


@pytest.mark.parametrize("changes", MODELS, ids=str)
def test_the_llama_steps_inside_backward(changes):
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_layers": 3}
    heads = {"num_heads": 4, "num_kv_heads": 2, "vocab_size": 128}
    config = {**sizes, **heads, "param_dtype": jnp.bfloat16, **changes}
    model = llama.Llama(llama.LlamaConfig(**config), rngs=nnx.Rngs(0))
    graph, params, others = nnx.split(model, nnx.Param, ...)

    def loss(params, tokens):
        model = nnx.merge(graph, params, others)
        return llama.cross_entropy(model, tokens[:, :-1], tokens[:, 1:])

    assert_steps_equal(loss, coat.fp8_adamw(1e-3), params, tokens(), key=KEY)


def test_a_scan_saves_neither_parameters_nor_constants_by_layer():
    params, mask = parameters(stacked=True), jnp.ones((5, 7), bool)

    def masked(p, x):
        return layer(p, x) * jnp.where(mask, 1, 2).sum().astype(x.dtype)

    def step(params, tokens):
        released = coat.value_and_update(scan_of(masked), SGD)
        return released(params, SGD.init(params), tokens)

    program = jax.make_jaxpr(step)(params, tokens()).jaxpr
    scan = next(e for e in program.eqns if e.primitive.name == "scan")
    saved = {v.aval.shape[1:] for v in scan.outvars if v.aval.shape[:1] == (3,)}
    assert (4, 8, 128) in saved
    assert not saved & {(64, 128), (128, 64), mask.shape}


def test_gradients_of_one_layer_exist_at_a_time():
    params, tx = parameters(stacked=True), SGD
    params["layers"] = jax.tree.map(lambda p: jnp.repeat(p, 8, 0), params["layers"])
    arguments = params, tx.init(params), tokens()

    def temporaries(step):
        jitted = jax.jit(step, donate_argnums=(0, 1))
        memory = jitted.lower(*arguments).compile().memory_analysis()
        return memory.temp_size_in_bytes

    stack = sum(p.nbytes for p in jax.tree.leaves(params["layers"]))
    saving = temporaries(ordinary(SCANNED, tx)) - temporaries(
        coat.value_and_update(SCANNED, tx)
    )
    assert saving > 0.8 * stack


def test_layers_close_over_arrays_and_stacks_hold_keys_and_counts():
    keys, counts = jax.random.split(jax.random.key(3), 3), jnp.arange(3)

    def loss(params, tokens):
        scale = params["unread"][0, :64] + 1

        def dropped(p, x):
            params, key, count = p
            keep = jax.random.bernoulli(key, 0.5, x.shape)
            y = jnp.where(keep, layer(params, x), x) * scale
            return y * (1 + count).astype(x.dtype)

        def run(_, x, layers):
            return coat.scan_layers(dropped, x, (layers, keys, counts))

        return loss_of(run)(params, tokens)

    assert_steps_equal(loss, SGD, parameters(stacked=True), tokens())


def test_parameters_that_changed_before_have_ordinary_gradients():
    def halves(params, tokens):
        wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)

        def run(fn, x, layers):
            first = jax.tree.map(lambda p: p[:1], layers)
            others = jax.tree.map(lambda p: p[1:], layers)
            return coat.scan_layers(fn, coat.scan_layers(fn, x, first), others)

        return loss_of(run)(wide, tokens)

    assert_steps_equal(halves, SGD, parameters(stacked=True), tokens())


WRAPPED = {
    "not": SCANNED,
    "loss under jit": jax.jit(SCANNED),
    "loss under checkpoint": jax.checkpoint(SCANNED),
    "layers under both": scan_of(jax.jit(jax.checkpoint(layer))),
}


@pytest.mark.parametrize("name", slow_except([*WRAPPED][2:], WRAPPED))
def test_layers_and_losses_may_be_wrapped(name):
    assert_step_is_plain(WRAPPED[name])


@pytest.mark.parametrize("max_norm", [None, slow(1.0)])
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "unrolled"])
def test_steps_leave_no_arrays_of_a_trace(stacked, max_norm):
    """Layers have parameters, arrays of the loss, and arrays that they close over."""
    apply = (coat.apply_layer, coat.scan_layers)[stacked]

    def loss(params, tokens):
        scale, shift = params["unread"][0, :64], params["unread"][1, :LAYERS]

        def changed(p, x):
            params, shift = p
            return layer(params, x) * scale + shift.sum()

        def run(_, x, layers):
            for part in [layers] if stacked else layers:
                x = apply(changed, x, (part, shift * scale[0]))
            return x

        return loss_of(run)(params, tokens)

    params = parameters(stacked=stacked)
    step = jax.jit(coat.value_and_update(loss, SGD, max_norm=max_norm))
    with jax.checking_leaks():
        step.lower(params, SGD.init(params), tokens())


def test_a_single_layer_and_no_layers_parameters():
    params = parameters(stacked=True)
    first = jax.tree.map(lambda p: p[:1], params.pop("layers"))

    def frozen(params, tokens):
        return SCANNED({"layers": first} | params, tokens)

    assert_steps_equal(frozen, SGD, params | {"layers": first}, tokens())
    assert_steps_equal(frozen, SGD, params, tokens())


def test_a_stack_of_no_layers():
    params = parameters(stacked=True)
    params["layers"] = jax.tree.map(lambda p: p[:0], params["layers"])
    assert_steps_equal(SCANNED, SGD, params, tokens(), steps=1)


def test_auxiliary_data_comes_back_with_the_ordinary_step():
    def loss(params, tokens):
        value = SCANNED(params, tokens)
        return value, {"twice": 2 * value, "first": tokens[0], "count": tokens.size}

    @jax.jit
    def expected(params, state, tokens):
        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(params, tokens)
        updates, state = SGD.update(grads, state, params)
        return (value, aux), optax.apply_updates(params, updates), state

    params = parameters(stacked=True)
    arguments = params, SGD.init(params), tokens()
    step = jax.jit(coat.value_and_update(loss, SGD, has_aux=True))
    (value, aux), *new = step(*arguments)
    (expected_value, expected_aux), *expected_new = expected(*arguments)
    assert aux.keys() == expected_aux.keys()
    assert aux["twice"] == 2 * value == 2 * expected_value
    np.testing.assert_array_equal(aux["first"], tokens()[0])
    assert aux["count"] == tokens().size
    assert_same_tree_bits(new, expected_new)


def test_an_nnx_optimizer_steps_by_its_documented_lines():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embedding = nnx.Embed(128, 64, rngs=rngs)
            make = nnx.vmap(lambda rngs: nnx.Linear(64, 64, rngs=rngs))
            self.layers = nnx.split_rngs(splits=3)(make)(rngs)

    def run(model, x, scan):
        graph, stacked = nnx.split(model.layers)
        return scan(lambda p, x: jnp.tanh(nnx.merge(graph, p)(x)), x, stacked)

    def loss_of_model(model, tokens, scan=coat.scan_layers):
        return jnp.mean(run(model, model.embedding(tokens), scan) ** 2)

    def plain(fn, x, stacked):
        return jax.lax.scan(lambda x, p: (fn(p, x), None), x, stacked)[0]

    model, other = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    optimizer, expected = (
        nnx.Optimizer(m, coat.fp8_adamw(1e-2), wrt=nnx.Param) for m in (model, other)
    )
    graph, params, others = nnx.split(model, nnx.Param, ...)
    step = coat.value_and_update(
        lambda params, tokens: loss_of_model(nnx.merge(graph, params, others), tokens),
        optimizer.tx,
    )
    state = as_pure(optimizer.opt_state)
    _, params, state = jax.jit(step)(as_pure(params), state, tokens())
    nnx.update(model, params)
    nnx.update(optimizer.opt_state, nnx.state(state))
    optimizer.step[...] += 1

    @nnx.jit
    def ordinary_step(model, optimizer):
        loss = lambda m: loss_of_model(m, tokens(), plain)  # noqa: E731
        optimizer.update(model, nnx.grad(loss)(model))

    ordinary_step(other, expected)
    for a, b in ((model, other), (optimizer, expected)):
        a, b = (jax.tree.leaves(nnx.state(x)) for x in (a, b))
        for x, y in zip(a, b, strict=True):
            np.testing.assert_allclose(
                np.asarray(x, np.float32), np.asarray(y, np.float32), atol=1e-6
            )


def test_linen_layers_in_boxes_step():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_partitioning(nn.initializers.normal(0.1), (None, "model"))
            return x + jnp.tanh(nn.Dense(64, kernel_init=init, dtype=x.dtype)(x))

    x = jnp.ones((2, 64))
    init = jax.vmap(lambda key: Layer().init(key, x)["params"])
    stacked = init(jax.random.split(jax.random.key(0), 3))
    stacked = meta.add_axis(stacked, 0, {nn.PARTITION_NAME: "layers"})

    def loss(params, x):
        def apply(p, x):
            return Layer().apply({"params": p}, x)

        return jnp.mean(coat.scan_layers(apply, x, params) ** 2)

    assert_steps_equal(loss, optax.adamw(1e-2), stacked, x, steps=1)
