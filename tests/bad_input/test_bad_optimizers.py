"""Tests that optimizers refuse bad options, gradients and states with a clear error."""

from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers.bad_input import BadInput, assert_refused

import coat_jax as coat

X = jnp.ones((4, 256))
BF16, F32 = jnp.bfloat16, jnp.float32
PARAMS = {"w": jnp.ones((64, 256)), "v": jnp.ones((64, 256))}
TABLE = BadInput()
refused = TABLE.refused


def wrapped(_, **options):
    return coat.with_quantized_state(optax.lion(1e-3), **options)


def of_adam(_, **options):
    return coat.scale_by_fp8_adam(**options)


for factory in (coat.fp8_adamw, of_adam, wrapped):
    refused(
        lambda v, make=factory: make(1e-3, granularity=v).init(PARAMS),
        [128, None, coat.PerTensor(), coat.PerBlock(2, 8)],
        name="granularity of moments",
        contains="granularity must be coat.PerGroup",
    )
    refused(
        lambda v, make=factory: make(1e-3, rounding=v),
        [None, "up", True, 0],
        name="rounding",
    )
for factory in (coat.fp8_adamw, of_adam):
    for option in ("mu_format", "nu_format"):
        refused(
            lambda v, make=factory, name=option: make(1e-3, **{name: v}),
            [None, "E4M3", jnp.float8_e4m3fn],
            name=option,
        )
    for option in ("nesterov", "normalize_mu"):
        refused(
            lambda v, make=factory, name=option: make(1e-3, **{name: v}),
            ["no", None, 1],
            name=option,
        )
    refused(
        lambda v, make=factory: make(1e-3, mu_format=v),
        [coat.UE4M4, coat.LOG8],
        name="mu_format without a sign",
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
    contains="quantize_mask has nothing for params['",
)
refused(
    lambda v: coat.fp8_adamw(1e-3, quantize_mask=v).init(PARAMS),
    [{"w": True, "v": True, "u": True}],
    name="quantize_mask with too much",
    contains="quantize_mask has ['u'], and params has not",
)
refused(
    lambda v: coat.opt_state_sharding(coat.fp8_adamw(1e-3), PARAMS, v),
    [None, {"w": jax.sharding.SingleDeviceSharding(jax.devices()[0])}],
    name="params_sharding of another structure",
    contains="params_sharding has nothing for params['v']",
)
refused(
    lambda v: coat.with_quantized_state(optax.lion(1e-3), moments=v),
    [["mu"], "mu", coat.Moment()],
    name="moments",
    contains="moments must be a dict from names of fields to coat.Moment",
)
for option in ("has_aux", "skip_not_finite", "return_norms"):
    refused(
        lambda v, name=option: coat.value_and_update(sum, TX, max_norm=1, **{name: v}),
        ["no", None, 1],
        name=option,
    )
for key in (0, "key", jax.random.split(jax.random.key(0))):
    refused(
        lambda v: coat.fused_update(TX, PARAMS, STATE, PARAMS, key=v),
        [key],
        name="key of a step",
        contains="key must be one jax.random.key",
    )
    refused(
        lambda v: coat.value_and_update(lambda p: p["w"].sum(), TX)(
            PARAMS, STATE, key=v
        ),
        [key],
        name="key of a step in backward",
        contains="key must be one jax.random.key",
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
    "extra": (PARAMS | {"u": X}, "the tree of gradients has ['u'], which mu has not"),
    "container": (OrderedDict(PARAMS), "must have the structure PyTreeDef({'v': *"),
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
    lambda v: TX.update(PARAMS, v, PARAMS),
    [jax.tree.map(lambda x: x.astype(BF16) if x.dtype == F32 else x, STATE)],
    name="a state with scales in bfloat16",
    contains="the scales of mu['v'] must be float32, got bfloat16",
)
refused(
    lambda v: optax.adamw(1e-3).update(PARAMS, v, PARAMS),
    [STATE],
    name="a state for optax",
    contains="coat.to_optax_state",
)
refused(
    lambda v: jax.eval_shape(
        lambda params: coat.fused_update(v, params, v.init(params), params), PARAMS
    ),
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


@TABLE.each
def test_options_gradients_and_states_are_refused_by_name(call, contains):
    assert_refused(call, contains)


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
        _, state = jax.eval_shape(tx.update, params, state, params)
    assert state[0].mu["w"].codes.dtype == jnp.float8_e4m3fn
    assert (state[0].mu["b"].dtype, state[0].nu["b"].dtype) == (
        jnp.bfloat16,
        jnp.float32,
    )
