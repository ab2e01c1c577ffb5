"""Tests that `coat.fp8_remat` refuses bad options with a clear error."""

import jax
import jax.numpy as jnp
from helpers.bad_input import BadInput, assert_refused

import coat_jax as coat

KEY = jax.random.key(0)
TABLE = BadInput()
refused = TABLE.refused

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
    lambda v: coat.fp8_remat(FN, key=KEY, format=v),
    [coat.DE8],
    name="format with a key",
    contains="key is for floating formats",
)
refused(
    lambda v: coat.fp8_remat(FN, params_argnums=v)(jnp.ones((8, 8)), jnp.ones((8, 8))),
    [2, (0, 3)],
    name="missing argument",
    contains="argument",
)


@TABLE.each
def test_functions_and_options_are_refused_by_name(call, contains):
    assert_refused(call, contains)
