"""Tests experts against an oracle that runs each token through each expert.

The oracle of unquantized recipes is in float64. The oracle of the FP8 flow is a chain
of vector-Jacobian products of plain functions, each at dequantized arrays.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import oracle
from helpers.gradients import assert_close, compiled, cosine, fake, saved, saved_bytes
from helpers.marks import slow
from helpers.models import normal

from coat_jax.layers import recipes
from coat_jax.layers.decoder import DecoderLayer
from coat_jax.layers.experts.routing import Experts, Routing, updated_bias
from coat_jax.layers.parts import Norm
from pallas_kernels import explain

HIDDEN, INNER, COUNT = 64, 32, 5
BATCH, LENGTH = 2, 21  # No multiple of 8.
NORM = Norm(kind="rms", eps=1e-5)
PLAIN = Experts(num_experts=COUNT, top_k=2)
KINDS = {
    "shared": (
        Experts(num_experts=COUNT, top_k=2, num_shared=1, normalized=False),
        "silu",
    ),
    "one": (Experts(num_experts=COUNT, top_k=1, normalized=False), "gelu"),
    "all": (Experts(num_experts=COUNT, top_k=COUNT), "silu"),
    "sigmoid": (
        Experts(
            num_experts=COUNT, top_k=3, scores="sigmoid", scale=2.5, selection_bias=True
        ),
        "gelu_exact",
    ),
}
# XLA compiles quickly rather than well.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
LOADS = ("random", "one expert", "empty experts")
ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
}


def parameters(experts: Experts, load: str = "random") -> dict:
    """Returns float32 parameters; `load` says how tokens spread over experts."""
    groups = experts.num_groups
    router = normal(0, COUNT, HIDDEN, scale=0.2)
    params = {
        "norm": 1 + normal(1, HIDDEN, scale=0.2),
        "router": router,
        "router_bias": None,
        "gate_up": normal(2, groups, 2, INNER, HIDDEN, scale=0.15),
        "down": normal(3, groups, HIDDEN, INNER, scale=0.15),
    }
    if load == "one expert":
        # The mean of tokens is far from zero, and so is one expert's logit.
        params["router"] = router.at[3].add(1.0)
    if load == "empty experts":
        params["router"] = router.at[jnp.array([0, 4])].add(-1.0)
    if experts.selection_bias:
        params["router_bias"] = normal(4, COUNT, scale=0.3)
    return params


def tokens(dtype=jnp.float32) -> tuple[jax.Array, jax.Array]:
    """Returns the residual stream and the gradient of the result."""
    x = 1 + normal(5, BATCH, LENGTH, HIDDEN)
    return x.astype(dtype), normal(6, BATCH, LENGTH, HIDDEN).astype(dtype)


@functools.cache
def passes(name: str, experts: Experts, gate="silu"):
    """Returns a jitted function that computes a layer's results and all gradients."""
    return jax.jit(passes_of(name, experts, gate), compiler_options=QUICK)


def passes_of(name: str, experts: Experts, gate="silu"):
    """Returns the function of `passes`, without `jit`."""
    recipe = recipes.RECIPES[name]

    def layer(params, x):
        options = {"norm": NORM, "gate": gate, "experts": experts}
        y, shares = recipe.experts(params, recipe.enter(x), **options)
        return recipe.leave(y), Routing.of(shares)

    return functools.partial(with_gradients, layer)


def with_gradients(layer, params, x, dy):
    (y, routing), vjp = jax.vjp(layer, params, x)
    # The gradients of both losses differ from 1 as in training.
    losses = Routing(jnp.zeros(COUNT), jnp.float32(0.3), jnp.float32(0.02))
    zero = jax.tree.map(jnp.zeros_like, routing)
    of_losses = jax.tree.map(lambda z, v: z + v.astype(z.dtype), zero, losses)
    return y, routing, vjp((dy, of_losses))


def norm(x, weight):
    rate = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)
    return x * rate * weight


def weights_of(logits, ids, experts):
    """Returns the weight of each expert for each token, and the routing.

    The weights [tokens, experts] are zero for experts that are not in `ids`. Shared
    experts come last and have weight 1. The routing has the loads and both auxiliary
    losses.
    """
    softmax = jax.nn.softmax(logits)
    scores = softmax if experts.scores == "softmax" else jax.nn.sigmoid(logits)
    chosen = jnp.zeros(logits.shape).at[jnp.arange(len(ids))[:, None], ids].set(1.0)
    weights = scores * chosen
    if experts.normalized:
        weights = weights / weights.sum(1, keepdims=True)
    load = chosen.mean(0) / experts.top_k
    shares = (scores / scores.sum(1, keepdims=True)).mean(0)
    z = jnp.mean(jnp.log(jnp.exp(logits).sum(1)) ** 2)
    shared = jnp.ones((len(ids), experts.num_shared))
    weights = jnp.concatenate([weights * experts.scale, shared], axis=1)
    return weights, Routing(load, COUNT * jnp.sum(load * shares), z)


def chosen(logits, params, experts):
    scores = np.asarray(logits, np.float64)
    if experts.scores == "sigmoid":
        scores = 1 / (1 + np.exp(-scores))
    if params["router_bias"] is not None:
        scores = scores + np.asarray(params["router_bias"])
    return np.argsort(-scores, axis=1, kind="stable")[:, : experts.top_k]


def dense(experts, gate, ids, params, x):
    """Returns the result and the routing, with each token run through each expert."""
    flat = x.reshape(-1, HIDDEN)
    h = norm(flat, params["norm"])
    weights, routing = weights_of(h @ params["router"].T, ids, experts)
    up = jnp.einsum("th,epfh->tepf", h, params["gate_up"])
    a = ACTIVATIONS[gate](up[:, :, 0]) * up[:, :, 1]
    y = jnp.einsum("tef,ehf,te->th", a, params["down"], weights)
    return (flat + y).reshape(x.shape), routing


def in_float64(experts, gate, params, x, dy):
    params, x, dy = jax.tree.map(lambda v: np.asarray(v, np.float64), (params, x, dy))
    flat = x.reshape(-1, HIDDEN)
    rate = 1 / np.sqrt(np.mean(flat**2, axis=1, keepdims=True) + 1e-5)
    ids = chosen(flat * rate * params["norm"] @ params["router"].T, params, experts)
    with jax.enable_x64(True):
        run = oracle_of(experts, gate)
        return jax.tree.map(np.asarray, run(ids, params, x, dy))


@functools.cache
def oracle_of(experts, gate):
    """Returns a jitted function that computes the results and gradients of `dense`."""

    def run(ids, params, x, dy):
        return with_gradients(
            functools.partial(dense, experts, gate, ids), params, x, dy
        )

    return jax.jit(run, compiler_options=QUICK)


@pytest.mark.parametrize("kind", ["sigmoid", *map(slow, ("shared", "one", "all"))])
@pytest.mark.parametrize("dtype", [jnp.float32, slow(jnp.bfloat16)])
def test_unquantized_experts_are_those_of_float64(kind, dtype):
    experts, gate = KINDS[kind]
    x, dy = tokens(dtype)
    run = passes("bf16", experts, gate)
    for load in LOADS:
        params = parameters(experts, load)
        actual = run(params, x, dy)
        expected = in_float64(experts, gate, params, x, dy)
        spread = np.asarray(actual[1].load)
        if load == "one expert" and experts.top_k == 1 and kind != "sigmoid":
            assert spread.max() == 1
        if dtype == jnp.float32:
            assert_close(actual, expected, 2e-5)
        else:
            np.testing.assert_allclose(spread, expected[1].load, atol=0.03)
            assert cosine(actual[2], expected[2]) > 0.999


def tensor(x, format=oracle.E4M3):
    return fake(np.asarray(x, np.float32), None, format)


def rows(x):
    x = np.asarray(x, np.float32)
    scale = np.abs(x).max(axis=-1, keepdims=True) * np.float32(1 / 448)
    scale = np.maximum(scale, np.float32(oracle.TINY))
    return oracle.E4M3.round(x / scale) * scale


def groups(x, size=16):
    return fake(np.asarray(x, np.float32), size)


def matrices(w):
    """Quantizes with a scale for each expert, and dequantizes."""
    w = np.asarray(w, np.float32)
    return groups(w.reshape(len(w), -1), w[0].size).reshape(w.shape)


@functools.cache
def pieces(experts, gate):
    """Returns the router, the gate and the norm of the oracle, each jitted.

    Each returns its result, and the gradients of its inputs if cotangents are given.
    """
    quick = functools.partial(jax.jit, compiler_options=QUICK)

    def router(ids, logits, *cotangents):
        outputs, vjp = jax.vjp(lambda x: weights_of(x, ids, experts), logits)
        return outputs, vjp(cotangents)[0] if cotangents else None

    def gated(up, *da):
        def fn(up):
            return ACTIVATIONS[gate](up[..., 0, :]) * up[..., 1, :]

        a, vjp = jax.vjp(fn, up)
        return a, vjp(*da)[0] if da else None

    def normed(x, weight, *dy):
        y, vjp = jax.vjp(norm, x, weight)
        return y, vjp(*dy) if dy else None

    return quick(router), quick(gated), quick(normed)


def in_fp8(experts, gate, params, x, dy):
    """Computes the layer with fake-quantized arrays.

    Returns:
      The result, the gradient of `x`, the gradients of parameters, and the routing.
    """
    router, gated, normed = pieces(experts, gate)
    flat = np.asarray(x, np.float32).reshape(-1, HIDDEN)
    h, _ = normed(flat, params["norm"])
    of_router = np.asarray(params["router"])
    logits = np.asarray(h) @ of_router.T
    ids = chosen(logits, params, experts)
    (weights, routing), _ = router(ids, logits)
    weights = np.asarray(weights)[..., None]
    merged = np.asarray(params["gate_up"]).reshape(experts.num_groups, -1, HIDDEN)
    up = np.einsum("th,enh->ten", rows(h), groups(merged, HIDDEN), optimize=True)
    up = up.reshape(*weights.shape[:2], 2, INNER)
    a = rows(gated(up)[0]) * weights
    down = groups(params["down"], INNER)
    y = np.einsum("tef,ehf->th", a, down, optimize=True)
    up = groups(up)
    a, _ = gated(up)
    gradient = tensor(np.asarray(dy).reshape(-1, HIDDEN), oracle.E5M2)
    down = matrices(params["down"])
    da = np.einsum("th,ehf->tef", gradient, down, optimize=True)
    dweights = np.sum(da * a, -1) * (weights[..., 0] > 0)
    # Products with weights have a power of two for each expert.
    powers = np.exp2(np.ceil(np.log2(weights.max(0, keepdims=True) + 1e-30)))
    _, dup = gated(up, da * (weights / powers))
    dup = tensor(dup, oracle.E5M2).reshape(*weights.shape[:2], -1) * powers
    dh = np.einsum("ten,enh->th", dup, matrices(merged), optimize=True)
    zeros = np.zeros(COUNT, np.float32)
    losses = Routing(zeros, np.float32(0.3), np.float32(0.02))
    h, _ = normed(groups(flat), params["norm"])
    # Logits are saved, and the norm's output is computed again from groups.
    _, dlogits = router(ids, logits, dweights, losses)
    dh, drouter = dh + dlogits @ of_router, dlogits.T @ h
    _, (dx, dnorm) = normed(groups(flat), params["norm"], dh)
    a = tensor(a * (weights / powers)) * powers
    grads = {
        "norm": dnorm,
        "router": drouter,
        "gate_up": np.einsum("ten,th->enh", dup, tensor(h), optimize=True),
        "down": np.einsum("th,tef->ehf", gradient, a, optimize=True),
    }
    return y, dx, grads, routing


@pytest.mark.parametrize("kind", ["shared", slow("sigmoid"), slow("one"), slow("all")])
def test_experts_of_the_fp8_flow_are_those_of_quantized_numbers(kind):
    experts, gate = KINDS[kind]
    x, dy = tokens()
    run = passes("coat", experts, gate)
    for load in LOADS:
        params = parameters(experts, load)
        y, routing, (dparams, dx) = run(params, x, dy)
        inner, dx_inner, grads, losses = in_fp8(experts, gate, params, x, dy)
        assert_close(routing, losses, 1e-5)
        shape = (-1, HIDDEN)
        # A few numbers round the other way, where sums have another order.
        near((y - x).reshape(shape), inner, 0.01)
        near((dx - dy).reshape(shape), dx_inner, 0.02)
        for name, gradient in grads.items():
            near(dparams[name].reshape(gradient.shape), gradient, 0.02)
        if experts.selection_bias:
            assert not np.any(dparams["router_bias"])


def test_an_expert_with_small_weights_keeps_its_gradients():
    """A common scale would give zeros, as weights differ by a factor of 1e-5."""
    experts, gate = KINDS["shared"]
    x, dy = tokens()
    params = parameters(experts)
    # All tokens choose expert 3 with weights of nearly 1, and then another one.
    params["router"] = params["router"].at[3].add(0.3)
    _, _, (dparams, _) = passes("coat", experts, gate)(params, x, dy)
    _, _, expected, _ = in_fp8(experts, gate, params, x, dy)
    for name in ("gate_up", "down"):
        gradients = expected[name][:COUNT]
        largest = np.abs(gradients).max(axis=tuple(range(1, gradients.ndim)))
        chosen = np.flatnonzero(largest)
        assert len(chosen) == COUNT - 1  # An expert has no tokens.
        assert np.median(largest) < 2e-5 * largest.max()
        for expert in chosen:
            actual = dparams[name][expert].reshape(gradients[expert].shape)
            assert cosine(actual, gradients[expert]) > 0.99, (name, expert)


def near(actual, expected, error):
    """Asserts that norm(a - b) <= error * norm(b)."""
    a, b = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert a.shape == b.shape
    assert np.linalg.norm(a - b) <= error * np.linalg.norm(b)


@pytest.mark.parametrize("name", ["bf16", "te", "coat"])
def test_no_rows_of_the_residual_stream_are_saved(name):
    experts, recipe = KINDS["shared"][0], recipes.RECIPES[name]
    x, _ = tokens(jnp.bfloat16)

    def layer(params, x):
        params = {**params, "router_bias": None}
        options = {"norm": NORM, "gate": "silu", "experts": experts}
        y, shares = recipe.experts(params, recipe.enter(x), **options)
        return recipe.leave(y), shares

    params = parameters(experts)
    del params["router_bias"]
    residuals = saved(layer, params, x)
    count = BATCH * LENGTH
    rows_of_experts = -(-count * experts.choices // 8) * 8 + 128
    largest = max(r.nbytes for r in residuals if r.argument is None)
    for residual in residuals:
        shape = residual.shape
        assert shape[:1] != (rows_of_experts,) or shape[-1:] != (HIDDEN,)
    if name == "coat":
        in_groups = 1 + 2 / 16
        # Codes of gate and up, their largest scale, and the order of rows.
        of_rows = rows_of_experts * (2 * INNER * in_groups + 4 + 4)
        # Codes of the input, and the experts and logits of each token.
        of_tokens = count * (HIDDEN * in_groups + experts.choices * 4 + COUNT * 4)
        # The rows of each expert, two scales of weights, and two scales of tensors.
        others = (4 + 2 * 4) * experts.num_groups + 2 * 4
        assert saved_bytes(residuals) == of_rows + of_tokens + others
        assert largest == rows_of_experts * 2 * INNER


def test_kernels_read_tokens_in_place_of_copied_rows():
    """Sums, and transposes of rows, are computed without arrays of all rows."""
    experts, (count, hidden) = KINDS["shared"][0], (48, 128)
    groups = experts.num_groups
    shapes = {
        "norm": (hidden,),
        "router": (COUNT, hidden),
        "gate_up": (groups, 2, INNER, hidden),
        "down": (groups, hidden, INNER),
    }
    params, x = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        (shapes, (1, count, hidden)),
        is_leaf=lambda shape: isinstance(shape, tuple) and isinstance(shape[0], int),
    )
    run = passes_of("coat", experts)
    choices = explain(run, {**params, "router_bias": None}, x, x).choices
    # Forward adds the stream to its sums, and backward the gradient from the router.
    stream = f"bfloat16[{count},{hidden}]"
    of_sums = [c.arrays for c in choices if c.operation == "sum_rows"]
    assert [stream in arrays for arrays in of_sums] == [True, True]
    # Forward multiplies rows of the norm's output, which backward does not copy again.
    # The rows of the result's gradient are copied once, multiplied and transposed.
    codes = {"norm": "float8_e4m3fn", "gradient": "float8_e5m2"}
    of_tokens = {name: f"{dtype}[{count},{hidden}]" for name, dtype in codes.items()}
    copied = [c.arrays[0] for c in choices if c.operation == "copy_rows"]
    assert sorted(copied) == sorted(of_tokens.values())
    of_transposes = [c.arrays for c in choices if c.operation == "grouped_transpose"]
    rows = -(-count * experts.choices // 8) * 8 + 128
    expected = [of_tokens["norm"], f"{codes['gradient']}[{rows},{hidden}]"]
    assert sorted(arrays[0] for arrays in of_transposes) == expected


def layers_of(experts, **options):
    sizes = HIDDEN, INNER, 4, 2, 16
    return DecoderLayer(*sizes, experts=experts, **options, rngs=nnx.Rngs(0))


def test_equal_experts_are_a_dense_layer():
    options = {"recipe": "bf16", "qk_norm": "head"}
    dense_layer, layer = layers_of(None, **options), layers_of(PLAIN, **options)
    for name in ("gate_up", "down"):
        weight = getattr(dense_layer, name)[...] * 10
        setattr(dense_layer, name, nnx.Param(weight))
        equal = jnp.broadcast_to(weight, (COUNT, *weight.shape))
        setattr(layer, name, nnx.Param(equal))
    for name in ("attention_norm", "qkv", "out", "mlp_norm"):
        setattr(layer, name, getattr(dense_layer, name))
    x, _ = tokens()
    y, expected = (compiled(lambda x, m=m: m(x), x) for m in (layer, dense_layer))
    assert np.abs(np.asarray(expected - x)).max() > 0.1
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5)


def test_options_that_do_not_go_together_are_refused():
    for options, rule in (
        ({"top_k": 6}, "top_k must be at most num_experts 5, got 6"),
        ({"top_k": 0}, "top_k must be a positive int, got 0"),
        ({"num_shared": -1}, "num_shared must be an integer of 0 or more, got -1"),
        ({"scores": "relu"}, "scores must be one of softmax, sigmoid, got 'relu'"),
        ({"scale": 0.0}, "scale must be positive, got 0.0"),
        ({"z_weight": float("nan")}, "z_weight must be 0 or more, got nan"),
    ):
        with pytest.raises(ValueError, match=rule):
            Experts(**{"num_experts": COUNT, "top_k": 2, **options})
    for options, rule in (
        (
            {"recipe": "coat_block"},
            "a recipe among bf16, te, coat, coat_max, coat_bf16, got",
        ),
        ({"scaling": "delayed"}, "scaling='just_in_time', got 'delayed'"),
        ({"norm_placement": "both"}, "norm_placement='before', got 'both'"),
    ):
        with pytest.raises(ValueError, match=rule):
            layers_of(PLAIN, **options)


def test_biases_rise_for_experts_with_little_load():
    load = jnp.array([[0.5, 0.25, 0.25], [0.2, 0.3, 0.5]])
    bias = updated_bias(jnp.zeros((2, 3)), load, 0.001)
    expected = 0.001 * np.array([[-1, 1, 1], [1, 1, -1]])
    np.testing.assert_allclose(bias, expected, rtol=1e-6)


def test_weights_of_experts_are_quantized_in_each_pass():
    def quantized():
        layer = layers_of(PLAIN, recipe="coat")
        layer.quantize_weights()
        return layer

    assert set(nnx.eval_shape(quantized).codes) == {"qkv", "out"}
