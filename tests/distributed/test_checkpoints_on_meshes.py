"""Tests that states saved on one mesh of eight virtual devices resume on others."""

import os
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from helpers.optimizers import assert_same_bits, gradients
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import coat_jax as coat

pytestmark = pytest.mark.distributed


def test_a_run_goes_on_bit_for_bit_on_another_mesh(tmp_path):
    """Saves from 4 x 2 devices; resumes on 4 x 2, 2 x 4, 8 x 1 and one device."""
    shape = (64, 1024)
    tx = optax.chain(optax.clip_by_global_norm(1e3), coat.fp8_adamw(1e-2))
    abstract = {"w": jax.ShapeDtypeStruct(shape, jnp.bfloat16)}
    grads = [{"w": gradients(i, shape)} for i in range(4)]

    def place(rows: int, columns: int) -> dict:
        devices = np.array(jax.devices()[: rows * columns]).reshape(rows, columns)
        spec = NamedSharding(Mesh(devices, ("data", "model")), P("data", "model"))
        params = {"w": spec}
        opt_state = coat.opt_state_sharding(tx, abstract, params)
        return {"params": params, "opt_state": opt_state}

    def go_on(state: dict, grads: list) -> dict:
        for g in grads:
            updates, opt_state = jax.jit(tx.update)(
                g, state["opt_state"], state["params"]
            )
            params = optax.apply_updates(state["params"], updates)
            state = {"params": params, "opt_state": opt_state}
        return state

    def start() -> dict:
        params = {"w": jnp.ones(shape, jnp.bfloat16)}
        return {"params": params, "opt_state": tx.init(params)}

    state = go_on(jax.device_put(start(), place(4, 2)), grads[:2])
    assert len(state["opt_state"][1][0].nu["w"].scale.sharding.device_set) == 8
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        expected = jax.device_get(go_on(state, grads[2:]))
        for mesh in ((4, 2), (2, 4), (8, 1), (1, 1)):
            like = jax.tree.map(
                lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
                jax.eval_shape(start),
                place(*mesh),
            )
            restored = checkpointer.restore(tmp_path / "state", like)
            codes = restored["opt_state"][1][0].mu["w"].codes
            assert codes.sharding.mesh.devices.shape == mesh
            assert_same_bits(jax.device_get(restored), jax.device_get(state))
            assert_same_bits(jax.device_get(go_on(restored, grads[2:])), expected)


_OF_A_PROCESS = """
import dataclasses
import sys

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
import coat_jax as coat
from coat_jax.optimizers.checkpoint import check_restored

mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
where = NamedSharding(mesh, P("data"))
tx = coat.scale_by_fp8_adam()
params = jax.jit(lambda: jnp.ones((128, 128)), out_shardings=where)()
shardings = coat.opt_state_sharding(tx, params, where)
state = jax.jit(tx.init, out_shardings=shardings)(params)
check_restored(state, state)


@jax.jit
def damaged(state):
    scale = state.mu.scale.at[0].set(-1.0)  # The first process has this row.
    return state.version + 256, jax.lax.with_sharding_constraint(scale, where)


version, scale = damaged(state)
mu = dataclasses.replace(state.mu, scale=scale)
wrong = state._replace(inner_state=state.inner_state._replace(mu=mu))
for wrong in (state._replace(version=version), wrong):
    try:
        check_restored(wrong, state)
        print("passed")
    except ValueError as error:
        print(str(error).split(" must")[0])
"""


def test_each_process_checks_the_values_that_it_has():
    with socket.socket() as server:
        server.bind(("localhost", 0))
        address = f"localhost:{server.getsockname()[1]}"
    command = [sys.executable, "-c", _OF_A_PROCESS, address]
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    options = {"env": environment, "text": True, "stdout": subprocess.PIPE}
    running = [subprocess.Popen([*command, str(i)], **options) for i in range(2)]
    first, second = (process.communicate(timeout=100)[0] for process in running)
    assert first.split("\n")[:2] == ["state.version", "state.inner_state.mu.scale"]
    assert second.split("\n")[:2] == ["state.version", "passed"]
