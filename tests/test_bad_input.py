"""A table of bad input: each entry is refused by an error with its value and rule.

An entry is a call and what its error must contain: the value, or the place of it.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import coat_jax as coat
import pallas_kernels as pk
from coat_jax.layers.decoder import DecoderLayer
from coat_jax.layers.matmul import linear
from coat_jax.models import llama

X = jnp.ones((4, 256))
INTEGERS = jnp.ones((4, 256), jnp.int32)
PARAMS = {"w": jnp.ones((64, 256)), "v": jnp.ones((64, 256))}
KEY = jax.random.key(0)
CODES = jnp.ones((16, 128), jnp.float8_e4m3fn)
ONE = jnp.float32(1)
SIZES = dict(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_layers=1, num_heads=4,
    num_kv_heads=2,
)  # fmt: skip
LAYER = dict(
    hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, head_dim=16
)
TABLE: dict[str, tuple] = {}


def refused(function, values, *, name="{value}", contains=None):
    """Adds an entry for each of the values: `function(value)` is refused."""
    for value in values:
        shown = re.sub(r"\s+", " ", f"{value!r}")[:40]
        label = f"{name.format(value=shown)} {len(TABLE)}"
        TABLE[label] = (
            (lambda f=function, v=value: f(v)),
            repr(value) if contains is None else contains,
        )


# Arrays and numbers.
refused(coat.quantize, [None, "x", 1.0, [1.0, 2.0], {"w": 1.0}], name="quantize")
refused(coat.quantize, [INTEGERS], name="quantize", contains="int32")
refused(coat.quantize, [X > 0, X * 1j], name="quantize", contains="floating array")
refused(coat.quantize, [coat.quantize(X)], name="quantize", contains="QuantizedArray")
refused(coat.dequantize, [None, 1.0, "x", {"w": 1}], name="dequantize")
refused(coat.dequantize, [X], name="dequantize", contains="QuantizedArray")
refused(np.asarray, [coat.quantize(X)], name="numpy", contains=".dequantize()")
refused(
    lambda v: coat.quantize(X, granularity=v),
    [128, None, "row", (1, 16), coat.PerTensor, coat.PerGroup],
    name="granularity",
)
refused(
    lambda v: coat.quantize(X, format=v),
    [None, "E4M3", 8, jnp.float8_e4m3fn],
    name="format",
)
refused(
    lambda v: coat.quantize(X, expand=v),
    [None, "yes", 0, 0.0, -1.0, np.inf, np.nan, [1.0], 1j],
    name="expand",
)
refused(
    lambda v: coat.quantize(X, noise=v),
    [jnp.ones((4, 256), dtype) for dtype in ("uint8", "int32", "float32")],
    name="noise",
    contains="noise must be",
)
refused(
    lambda v: coat.quantize(X, noise=v),
    [KEY, jnp.ones(3, jnp.uint32), jnp.ones((256, 4), jnp.uint32), [1]],
    name="noise",
    contains="noise must be",
)
refused(coat.PerGroup, [0, -1, 1.5, True, np.True_, None, "16", (16,)], name="PerGroup")
for position in (0, 1):
    refused(
        lambda v, at=position: coat.PerBlock(*((v, 8) if at == 0 else (8, v))),
        [0, -8, 2.0, False, None, "8"],
        name="PerBlock",
    )
refused(
    lambda v: coat.quantize(jnp.ones(v), granularity=coat.PerBlock(2, 8)),
    [(3,), ()],
    name="PerBlock of shape",
)

# Optimizers.
for factory in (coat.fp8_adamw, lambda _, **options: coat.scale_by_fp8_adam(**options)):
    refused(
        lambda v, make=factory: make(1e-3, granularity=v),
        [128, None, coat.PerTensor(), coat.PerBlock(2, 8)],
        name="granularity of moments",
        contains="granularity must be coat.PerGroup",
    )
    for option in ("mu_format", "nu_format"):
        refused(
            lambda v, make=factory, name=option: make(1e-3, **{name: v}),
            [None, "E4M3", jnp.float8_e4m3fn],
            name=option,
        )
    refused(
        lambda v, make=factory: make(1e-3, mu_format=v),
        [coat.UE4M4, coat.LOG8],
        name="mu_format without a sign",
    )
    refused(
        lambda v, make=factory: make(1e-3, rounding=v),
        [None, "up", True, 0],
        name="rounding",
    )
    refused(
        lambda v, make=factory: make(1e-3, quantize_mask=v).init(PARAMS),
        ["w", 1, 0.5, np.float32(1)],
        name="quantize_mask",
        contains="quantize_mask must be a bool",
    )
    refused(
        lambda v, make=factory: make(1e-3, quantize_mask={"w": True, "v": v}).init(
            PARAMS
        ),
        ["no", 0, 2.0],
        name="quantize_mask of v",
        contains="quantize_mask['v'] must be a bool",
    )
refused(
    lambda v: coat.fp8_adamw(1e-3, quantize_mask=v).init(PARAMS),
    [{"w": True}, {"u": True}, [True, True]],
    name="quantize_mask of another structure",
    contains="",
)
TX = coat.fp8_adamw(1e-3)
STATE = TX.init(PARAMS)
refused(
    lambda v: TX.init({"w": v}),
    [jnp.ones((64, 256), jnp.complex64)],
    name="complex parameters",
    contains="['w']",
)
BAD_GRADIENTS = {
    "integers": ({"w": jnp.ones((64, 256), jnp.int32), "v": X}, "int32"),
    "bools": ({"w": jnp.ones((64, 256), bool), "v": X}, "bool"),
    "complex": ({"w": jnp.ones((64, 256), jnp.complex64), "v": X}, "complex64"),
    "missing": ({"w": PARAMS["w"]}, "['v']"),
    "shape": ({"w": PARAMS["w"], "v": X}, "(64, 256)"),
    "transposed": ({"w": PARAMS["w"].T, "v": PARAMS["v"]}, "(256, 64)"),
}
for kind, (bad, contains) in BAD_GRADIENTS.items():
    refused(
        lambda v: TX.update(v, STATE, PARAMS),
        [bad],
        name=f"gradients, {kind}",
        contains=contains,
    )
    refused(
        lambda v: coat.fused_update(TX, v, STATE, PARAMS),
        [bad],
        name=f"gradients of fused_update, {kind}",
        contains=contains,
    )
    refused(
        lambda v: coat.with_quantized_state(optax.lion(1e-3)).update(
            v, coat.with_quantized_state(optax.lion(1e-3)).init(PARAMS), PARAMS
        ),
        [bad],
        name=f"gradients of lion, {kind}",
        contains=contains,
    )
refused(
    lambda v: TX.update(PARAMS, v, PARAMS),
    [optax.adamw(1e-3).init(PARAMS)],
    name="a state of optax",
    contains="coat.from_optax_state",
)
refused(
    lambda v: coat.fused_update(v, PARAMS, v.init(PARAMS), PARAMS),
    [optax.adamw(1e-3), optax.chain(coat.fp8_adamw(1e-3), optax.scale(0.5))],
    name="fused_update without",
    contains="ends in coat.fp8_adamw",
)
refused(
    lambda v: coat.fused_update(TX, PARAMS, STATE, PARAMS, key=v),
    [0, "key", 1.5],
    name="key of fused_update",
)
refused(
    lambda v: coat.with_quantized_state(optax.lion(1e-3), moments=v).init(PARAMS),
    [{"nu": coat.Moment()}],
    name="moments without a field",
    contains="'nu'",
)
refused(
    lambda v: coat.with_quantized_state(optax.lion(1e-3), moments={"mu": v}),
    ["E4M3", True, coat.E4M3, 3.0],
    name="moments",
)
refused(
    coat.with_quantized_state,
    [None, 1e-3, "adam", optax.adamw],
    name="with_quantized_state",
)
refused(lambda v: coat.Moment(format=v), [None, "E4M3", 8], name="Moment.format")
refused(lambda v: coat.Moment(power=v), [0, -1.0, np.nan, "cube"], name="Moment.power")
refused(
    coat.moment_report,
    [None, PARAMS, optax.adamw(1e-3).init(PARAMS)],
    name="moment_report",
    contains="moment_report needs a state",
)
# fp8_remat and reports.
FN = lambda w, x: jnp.tanh(x @ w)  # noqa: E731
refused(coat.fp8_remat, [None, 3, "mlp", [FN], jnp.ones(3), int], name="fp8_remat")
refused(
    lambda v: coat.fp8_remat(FN, params_argnums=v),
    ["w", 1.5, None, (0, "x")],
    name="params_argnums",
)
refused(
    lambda v: coat.fp8_remat(FN, format=v),
    [None, "E4M3", jnp.float8_e4m3fn],
    name="format of copies",
)
refused(
    lambda v: coat.fp8_remat(FN, group=v),
    [0, -16, 1.5, True, None, "16"],
    name="group of copies",
)
for option in ("where", "policy"):
    refused(
        lambda v, name=option: coat.fp8_remat(FN, **{name: v}),
        [1, "all", True, []],
        name=option,
    )
refused(
    lambda v: coat.fp8_remat(FN, key=v),
    [0, "key", jnp.zeros(3, jnp.uint32), jax.random.split(KEY)],
    name="key of fp8_remat",
    contains="key must be one jax.random.key",
)
refused(
    lambda v: coat.fp8_remat(FN, params_argnums=v)(jnp.ones((8, 8)), jnp.ones((8, 8))),
    [2, (0, 3)],
    name="missing argument",
    contains="argument",
)
refused(coat.residual_report, [None, 3, "f"], name="residual_report")
refused(coat.memory_report, [None, 3, "f"], name="memory_report")

# Matmuls and layers.
NUMBERS = (((1,), (0,)), ((), ()))
refused(
    lambda v: coat.fp8_dot_general(v, v.T, NUMBERS),
    [INTEGERS, X > 0],
    name="fp8_dot_general",
    contains="lhs must be floating",
)
refused(
    lambda v: coat.fp8_dot_general(X, X.T.astype(v), NUMBERS),
    ["int32", "bool"],
    name="fp8_dot_general, weights",
    contains="rhs must be floating",
)
refused(
    lambda v: coat.fp8_dot_general(X, X.T, v),
    [(((0,), (0,)), ((), ())), (((5,), (0,)), ((), ()))],
    name="dimension numbers",
    contains="dot_general",
)
refused(
    lambda v: coat.fp8_dot_general(X, X.T, NUMBERS, **{v: None}),
    ["prefered_element_type", "out_shardings"],
    name="keyword",
)
refused(lambda v: linear(X, jnp.ones(v)), [(3, 255), (256,), (256, 3)], name="linear")
for option in LAYER:
    refused(
        lambda v, name=option: DecoderLayer(**(LAYER | {name: v}), rngs=nnx.Rngs(0)),
        [0, -1],
        name=option,
    )
for option, values in {
    "recipe": ["fp8", None, "COAT"],
    "scaling": ["never", None],
    "norm": ["batch", None],
    "gate": ["relu", None],
}.items():
    refused(
        lambda v, name=option: DecoderLayer(**LAYER, **{name: v}, rngs=nnx.Rngs(0)),
        values,
        name=f"{option} of a layer",
    )
    refused(
        lambda v, name=option: llama.LlamaConfig(**SIZES, **{name: v}),
        values,
        name=f"{option} of a Llama",
    )
refused(
    lambda v: llama.LlamaConfig(**SIZES, recipe=v, scaling="delayed"),
    ["bf16", "te"],
    name="delayed scaling",
)
for option in ("vocab_size", "num_layers", "num_heads"):
    refused(
        lambda v, name=option: llama.LlamaConfig(**(SIZES | {name: v})),
        [0, -2],
        name=option,
    )
refused(
    lambda v: llama.LlamaConfig(**SIZES, dtype=v),
    [jnp.int32, "int8"],
    name="dtype of a Llama",
    contains="dtype must be floating",
)

# Kernels.
for function in (pk.quantize_groups, pk.quantize_rows, pk.maxima):
    refused(function, [INTEGERS, X > 0], name=function.__name__, contains="must be")
refused(
    lambda v: pk.quantize_groups(X, group=v),
    [0, -1, 1.5, True, None],
    name="group of a kernel",
)
refused(
    lambda v: pk.quantize_groups(X, dtype=v),
    ["float32", "int8", "float8_e4m3b11fnuz"],
    name="dtype of a kernel",
    contains="codes must be",
)
refused(
    lambda v: pk.quantize_tensor(X, v),
    [None, "one", jnp.ones(3), [1.0, 2.0]],
    name="scale of a kernel",
    contains="scale must be a scalar",
)
refused(
    lambda v: pk.quantize_tensor(X, ONE, copies=v),
    ["none", None, 2],
    name="copies",
)
refused(
    lambda v: pk.quantize_groups(X, implementation=v),
    ["cuda", "Mosaic", 1, True],
    name="implementation",
)
refused(lambda v: pk.norm(X, kind=v), ["batch", None], name="kind of a norm")
refused(
    lambda v: pk.norm(X, scale=v), ["tensor", jnp.ones(2)], name="scale of a norm",
    contains="scale",
)  # fmt: skip
refused(
    lambda v: pk.norm(X, jnp.ones(v)), [3, (4, 256)], name="weight", contains="shape"
)
refused(
    lambda v: pk.gated(jnp.ones((4, 2, 16)), activation=v),
    ["relu", None],
    name="activation",
)
refused(lambda v: pk.gated(jnp.ones(v)), [(16,), (4, 3, 16)], name="gate and up")
refused(
    lambda v: pk.matmul(CODES, CODES.astype(v)), ["float32", "bfloat16", "int8"],
    name="operand",
)  # fmt: skip
refused(lambda v: pk.matmul(CODES, CODES, promote=v), [64, "yes"], name="promote")
refused(
    lambda v: pk.matmul(CODES, CODES, out_dtype=v), ["float16", "int32"],
    name="out_dtype",
)  # fmt: skip
refused(lambda v: pk.matmul(CODES, CODES, jnp.ones(v)), [(3,), (16, 2)], name="scales")
_CRYPTIC = ("has no attribute", "not subscriptable", "unhashable")


CONFIG = llama.LlamaConfig(**SIZES)
MESH = jax.sharding.AbstractMesh((2,), ("fsdp",))


def estimated(**changes):
    return coat.estimate_memory(CONFIG, **{"batch": 2, "sequence": 8} | changes)


refused(
    lambda v: coat.estimate_memory(v, batch=2, sequence=8), [None, "llama2-7b", SIZES]
)
for size in ("batch", "sequence"):
    refused(lambda v, name=size: estimated(**{name: v}), [0, -1, 1.5, None, True])
refused(lambda v: estimated(mesh=v), [{"fsdp": 2}, "fsdp=2", 2], name="mesh")
refused(
    lambda v: estimated(mesh=jax.sharding.AbstractMesh((2,), (v,))),
    ["context", "pipeline"],
    name="axis of a mesh",
)
refused(lambda v: estimated(mesh=MESH, batch=v), [3], name="batch on a mesh")
refused(
    lambda v: estimated(mesh=jax.sharding.AbstractMesh((v,), ("tensor",))),
    [3],
    name="tensor axis",
)
refused(
    lambda v: estimated(batch=v, mesh=jax.sharding.AbstractMesh((v,), ("fsdp",))),
    [3],
    name="fsdp axis",
    contains="must divide",
)
refused(lambda v: estimated(recipe=v), ["fp4", 8], name="recipe")
refused(
    lambda v: estimated(mesh=MESH, shardings=v),
    [{"w": None}],
    name="shardings",
    contains="structure",
)
refused(lambda v: estimated(shardings=v), [{}], name="no mesh", contains="mesh=None")
refused(
    lambda v: coat.largest_batch(CONFIG, memory_gib=v, sequence=8),
    [0, -1.0, np.nan, np.inf, "80", None],
    name="memory_gib",
)
refused(lambda v: coat.health_report(PARAMS, role=v), ["weight", None, 3], name="role")
refused(
    lambda v: coat.health_report(v),
    [{}, None, {"w": INTEGERS}, "x"],
    name="health_report",
    contains="floating array",
)
refused(lambda v: coat.health_report(PARAMS, stacked=v), [("layers",)], name="stacked")
refused(
    lambda v: coat.health_report({"s": jnp.ones(())}, stacked=v),
    ["s"],
    name="stacked scalar",
)
refused(lambda v: coat.health_report(PARAMS, amax=v), [1.0], name="amax")


@pytest.mark.parametrize("entry", TABLE)
def test_bad_input_is_refused_by_name(entry):
    call, contains = TABLE[entry]
    with pytest.raises((ValueError, TypeError)) as error:
        call()
    message = str(error.value)
    assert contains.strip("'\"") in message
    assert not any(words in message for words in _CRYPTIC)


def test_the_table_is_long():
    assert len(TABLE) >= 200


@pytest.mark.parametrize("expand", [True, np.True_])
@pytest.mark.parametrize("size", [16, np.int64(16)])
def test_numbers_of_numpy_are_numbers(size, expand):
    q = coat.quantize(X, granularity=coat.PerGroup(size), expand=expand)
    assert q.scale.shape == q.exponent.shape == (4, 16)
    assert type(q.granularity.size) is int


def test_python_numbers_are_parameters_and_gradients():
    params, grads = {"b": 1.0}, {"b": 0.5}
    expected, _ = optax.adamw(1e-3).update(
        grads, optax.adamw(1e-3).init(params), params
    )
    updates, state = TX.update(grads, TX.init(params), params)
    np.testing.assert_allclose(updates["b"], expected["b"])
    after, _ = coat.fused_update(TX, grads, state, params)
    assert after["b"] < 1.0
    lion = coat.with_quantized_state(optax.lion(1e-3))
    updates, _ = lion.update(grads, lion.init(params), params)
    np.testing.assert_allclose(updates["b"], -1e-3 * (1 + 1e-3), rtol=1e-5)


def test_mu_dtype_is_that_of_moments_that_are_not_quantized():
    params = {"w": jnp.ones((64, 256)), "b": jnp.ones(8)}
    tx = coat.fp8_adamw(1e-3, mu_dtype=jnp.bfloat16)
    state = tx.init(params)
    for _ in range(2):
        _, state = tx.update(params, state, params)
    assert state[0].mu["w"].codes.dtype == jnp.float8_e4m3fn
    assert (state[0].mu["b"].dtype, state[0].nu["b"].dtype) == (
        jnp.bfloat16,
        jnp.float32,
    )


def test_quantize_has_no_gradient():
    with pytest.raises(NotImplementedError, match="stop_gradient"):
        jax.grad(lambda x: coat.dequantize(coat.quantize(x)).sum())(X)


def test_a_dense_layer_hands_its_keywords_on():
    layer = nn.Dense(8, dot_general=coat.fp8_dot_general, precision="highest")
    params = layer.init(KEY, X)
    assert layer.apply(params, X).shape == (4, 8)
