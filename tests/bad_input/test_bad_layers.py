"""Tests that matmuls, layers and models refuse bad input with a clear error."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from helpers.bad_input import BadInput, assert_refused

import coat_jax as coat
from coat_jax.fp8.matmul import linear
from coat_jax.layers.decoder import DecoderLayer
from coat_jax.models import hf, llama

X = jnp.ones((4, 256))
INTEGERS = jnp.ones((4, 256), jnp.int32)
KEY = jax.random.key(0)
SIZES = dict(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_layers=1, num_heads=4,
    num_kv_heads=2,
)  # fmt: skip
LAYER = dict(
    hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, head_dim=16
)
TABLE = BadInput()
refused = TABLE.refused

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
for option in ("vocab_size", "num_layers", "num_heads", "num_kv_heads", "hidden_size"):
    refused(
        lambda v, name=option: llama.LlamaConfig(**(SIZES | {name: v})),
        [0, -2, "64", 64.0, None],
        name=option,
    )
for option in ("dtype", "param_dtype"):
    refused(
        lambda v, name=option: llama.LlamaConfig(**SIZES, **{name: v}),
        [jnp.int32, "int8", "bf16", 3],
        name=f"{option} of a Llama",
        contains=f"{option} must be a floating dtype",
    )
for option in ("qkv_bias", "tie_embeddings"):
    refused(
        lambda v, name=option: llama.LlamaConfig(**SIZES, **{name: v}),
        ["no", None, 1],
        name=option,
    )
refused(
    lambda v: llama.LlamaConfig(**SIZES, rope_theta=v),
    [0.0, -1, "x"],
    name="rope_theta",
)
refused(lambda v: llama.LlamaConfig(**SIZES, experts=v), [8, "x"], name="experts")
refused(
    lambda v: hf.save(v, "model"),
    ["model", llama.LlamaConfig(**SIZES)],
    name="model to save",
    contains="model must be a Llama, got ",
)
refused(
    lambda v: hf.load("model", mesh=v), ["fsdp", {"fsdp": 2}], name="mesh of a model"
)
refused(
    lambda v: llama.Llama(llama.LlamaConfig(**SIZES), rngs=nnx.Rngs(0))(v),
    [[[1, 2]], jnp.ones((1, 8)), jnp.ones(8, jnp.int32), jnp.ones((0, 8), jnp.int32)],
    name="tokens",
    contains="tokens must ",
)


@TABLE.each
def test_operands_and_sizes_are_refused_by_name(call, contains):
    assert_refused(call, contains)


def test_a_dense_layer_hands_its_keywords_on():
    layer = nn.Dense(8, dot_general=coat.fp8_dot_general, precision="highest")
    params = layer.init(KEY, X)
    assert layer.apply(params, X).shape == (4, 8)
