"""Parameters, specs and a step that tests of sharded optimizers share."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import coat_jax as coat
from helpers.optimizers import assert_same_bits
from pallas_kernels.dispatch import array_types, operations

# Shapes and specs of parameters on a mesh of ("data", "model"), both of size 4 or less.
LAYOUT = {
    "fsdp": ((16, 512), P("data")),
    "tensor": ((16, 1024), P(None, "model")),
    "both": ((16, 1024), P("data", "model")),
    "last": ((16, 1024), P(None, ("data", "model"))),
    "vector": ((8192,), P("data")),
    "stacked": ((2, 16, 512), P(None, "data", "model")),
    "short": ((48, 200), P("data")),
    "whole": ((64, 128), P()),
    "small": ((16, 8), P("data")),
}
COLLECTIVES = "all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all"


def as_kernels(monkeypatch):
    """Makes operations choose kernels on meshes, as with Hopper GPUs.

    An operation is partitioned like its kernel. Its definition in jnp then runs in
    place of the kernel on each device's shards, and on one device.
    """

    def against(arrays):
        if array_types.mesh_of(arrays) is None:
            return ["no GPU"]
        return [*filter(None, [array_types.obstacle(arrays)])]

    monkeypatch.setattr(operations, "_against_kernels", against)
    jax.clear_caches()


def random_tree(seed: int, layout=LAYOUT):
    rng = np.random.default_rng(seed)

    def values(name, shape):
        size = np.exp2(rng.uniform(-6, 0, shape))
        dtype = jnp.float32 if name in ("both", "small") else jnp.bfloat16
        return jnp.asarray(rng.standard_normal(shape) * size, dtype)

    return {name: values(name, shape) for name, (shape, _) in layout.items()}


def shardings(mesh, layout=LAYOUT):
    return {name: NamedSharding(mesh, spec) for name, (_, spec) in layout.items()}


def fused(tx):
    def step(grads, state, params, key):
        return coat.fused_update(tx, grads, state, params, key=key)

    return step


def chained(tx):
    def step(grads, state, params, key):
        del key
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def placed(tx, mesh, layout=LAYOUT):
    """Returns gradients, optimizer state and parameters, sharded over a mesh."""
    params, grads = random_tree(1, layout), random_tree(2, layout)
    where = shardings(mesh, layout)
    states = coat.opt_state_sharding(tx, params, where)
    params, grads = jax.device_put((params, grads), (where, where))
    return grads, jax.jit(tx.init, out_shardings=states)(params), params


def check_steps(tx, step, mesh, layout, **options) -> str:
    """Checks that two steps on a mesh have one device's bits.

    Also checks that the state and the parameters keep their shardings and are donated.
    Returns the text of the compiled program.
    """
    key, arrays = jax.random.key(7), placed(tx, mesh, layout)
    jitted = jax.jit(step, donate_argnums=(1, 2), compiler_options=options)
    compiled = jitted.lower(*arrays, key).compile()
    alone = jax.jit(step, compiler_options=options)
    grads, state, params = jax.device_get(arrays)
    placements = jax.tree.map(lambda x: x.sharding, (arrays[2], arrays[1]))
    for _ in range(2):
        after = compiled(*arrays, key)
        arrays = (arrays[0], after[1], after[0])
        params, state = alone(grads, state, params, key)
    assert_same_bits(jax.device_get(after), jax.device_get((params, state)))
    for x, sharding in zip(
        jax.tree.leaves(after), jax.tree.leaves(placements), strict=True
    ):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
    local = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(after))
    assert compiled.memory_analysis().alias_size_in_bytes == local
    return compiled.as_text()


def collectives(program: str) -> set[str]:
    return set(re.findall(COLLECTIVES, program))
