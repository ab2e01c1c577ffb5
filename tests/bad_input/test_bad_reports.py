"""Tests that estimates and reports refuse bad input with a clear error."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import small_models
from helpers.bad_input import BadInput, assert_refused

import coat_jax as coat

INTEGERS = jnp.ones((4, 256), jnp.int32)
PARAMS = {"w": jnp.ones((64, 256)), "v": jnp.ones((64, 256))}
TABLE = BadInput()
refused = TABLE.refused

CONFIG = small_models.config(recipe="coat")
MESH = jax.sharding.AbstractMesh((2,), ("fsdp",))


def estimated(**changes):
    return coat.estimate_memory(CONFIG, **{"batch": 2, "sequence": 8} | changes)


refused(
    lambda v: coat.estimate_memory(v, batch=2, sequence=8),
    [None, "llama2-7b", {"num_layers": 2}],
)
for size in ("batch", "sequence"):
    refused(lambda v, name=size: estimated(**{name: v}), [0, -1, 1.5, None, True])
refused(lambda v: estimated(released=v), ["yes", None, 1], name="released")
refused(lambda v: estimated(mesh=v), [{"fsdp": 2}, "fsdp=2", 2], name="mesh")
refused(lambda v: estimated(optimizer=v), ["adam", optax.adam], name="optimizer")
refused(
    lambda v: estimated(mesh=jax.sharding.AbstractMesh((2,), (v,))),
    ["sequence", "pipeline"],
    name="axis of a mesh",
)
refused(lambda v: estimated(mesh=MESH, batch=v), [3], name="batch on a mesh")
refused(
    lambda v: estimated(mesh=jax.sharding.AbstractMesh((v,), ("tensor",))),
    [3],
    name="tensor axis",
)
refused(
    lambda v: estimated(mesh=jax.sharding.AbstractMesh((v,), ("context",))),
    [3],
    name="context axis",
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
refused(
    lambda v: coat.largest_batch(CONFIG, memory_gib=1, sequence=8, batch=v),
    [2],
    name="batch of largest_batch",
    contains="largest_batch returns the batch",
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
refused(coat.residual_report, [None, 3, "f"], name="residual_report")
refused(coat.memory_report, [None, 3, "f"], name="memory_report")
refused(
    coat.moment_report,
    [None, PARAMS, optax.adamw(1e-3).init(PARAMS)],
    name="moment_report",
    contains="moment_report needs a state",
)


for function in (coat.fp8_remat, coat.fp8, coat.residual_report, coat.dequantize):
    refused(
        function,
        [jnp.ones((64, 64)), {"w": jnp.ones((64, 64))}],
        name="large arrays",
        contains="got an object of the type ",
    )


@TABLE.each
def test_sizes_meshes_and_arrays_are_refused_by_name(call, contains):
    assert_refused(call, contains)
