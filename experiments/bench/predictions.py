"""Predicts the memory that a measured step takes."""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

import coat_jax as coat
from coat_jax.memory.api import default_optimizer
from coat_jax.memory.kinds import MemoryEstimate
from coat_jax.memory.step import estimate_step
from coat_jax.models.loss import chunk_of_logits
from experiments.bench.model_step import RELEASED, ModelSize, loss_function
from experiments.common import meshes
from experiments.common.layer_cases import CASES


def estimate(case: str, model: ModelSize, batch: int, gpus: int = 1) -> MemoryEstimate:
    """Predicts the memory of a case's step with `batch` sequences on each GPU."""
    mesh = None
    if gpus > 1:
        sizes = tuple(gpus if axis == "fsdp" else 1 for axis in meshes.AXES)
        mesh = AbstractMesh(sizes, meshes.AXES)
    if case.endswith(RELEASED):
        return coat.estimate_memory(
            model.config(CASES[case.removesuffix(RELEASED)]),
            batch=batch * gpus,
            sequence=model.seq,
            mesh=mesh,
            released=True,
        )
    loss, state = loss_function(case, model)
    tokens = jax.ShapeDtypeStruct((batch, model.seq + 1), jnp.int32)
    replicated = None
    if mesh is not None:
        replicated = state.params, meshes.param_shardings(state.params, mesh)
    return estimate_step(
        loss,
        *state,
        tokens,
        optimizer=default_optimizer(CASES[case].recipe),
        logits=chunk_of_logits(batch * model.seq, model.vocab),
        whole=replicated,
        gpus=gpus,
    )
