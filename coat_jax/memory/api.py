"""Predicts the memory of a training step on each GPU, without a GPU."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from coat_jax.layers import recipes
from coat_jax.layers.experts.parallel import EXPERT
from coat_jax.memory.kinds import GIB, MemoryEstimate
from coat_jax.memory.shards import (
    axis_sizes,
    batch_parts,
    checked_shardings,
    local_batch_of,
    local_config,
    local_length_of,
    with_local_experts,
)
from coat_jax.memory.step import estimate_step
from coat_jax.models import llama
from coat_jax.models.loss import chunk_of_logits
from coat_jax.optimizers.wrapper import as_transformation
from pallas_kernels.checks import check_flags, is_positive_number, positive_int, summary


def estimate_memory(
    config: llama.LlamaConfig,
    *,
    batch: int,
    sequence: int,
    mesh: Mesh | AbstractMesh | None = None,
    shardings: Any = None,
    recipe: recipes.RecipeName | None = None,
    optimizer: optax.GradientTransformation | None = None,
    released: bool = False,
) -> MemoryEstimate:
    """Predicts the memory of a Llama's training step on Hopper GPUs, by kind.

    No GPU is needed: the step is traced and nothing is computed. Parameters, gradients,
    the optimizer's state and saved activations are exact. The rest follows from a model
    of what XLA writes to memory and when (`coat_jax.remat.liveness`). The model does
    not count gaps between arrays, or memory that libraries allocate for themselves. On
    a mesh XLA gathers the weights of the recipes "bf16" and "te" in buffers that are
    not counted; for "te" it also keeps a transposed copy of the shards of gate and up.
    Measured peaks of these two recipes on meshes are 2% to 6% above the prediction.
    experiments/results/estimate has measured peaks and their predictions.

    The step is `jax.value_and_grad` of `llama.cross_entropy`, followed by an optimizer
    that works in place on donated arrays, such as `coat.fused_update`. `tx.update` with
    FP8 moments needs another 2 bytes or more for each parameter. With `released` the
    step is `coat.value_and_update`.

    Args:
      config: The shape and precision of the model.
      batch: The number of sequences in a step, on all GPUs together.
      sequence: The number of tokens in a sequence.
      mesh: A mesh with any of the axes "data", "fsdp", "expert", "context" and
        "tensor". "data", "fsdp" and "expert" split the batch, and "context" splits
        sequences. "fsdp", "expert" and "context" split the parameters, and "tensor"
        splits heads and the MLP's hidden layer. Layers gather experts over "fsdp" and
        "context", but not over "expert". An `AbstractMesh` needs no devices. None means
        one GPU.
      shardings: The shardings of the parameters: a tree of `NamedSharding` with the
        structure of the model's `nnx.Param` state. By default "fsdp", "expert" and
        "context" split the second-to-last axis of every matrix, or the axis of experts.
      recipe: The recipe, if it is not the configuration's.
      optimizer: The optimizer. By default it is `coat.fp8_adamw` for the recipes
        that have "coat" in their names, and `optax.adamw` with float32 moments for the
        others.
      released: Whether the optimizer steps inside the backward pass, so that the
        gradients of one layer exist at a time.

    Raises:
      TypeError: If `config` is not a `LlamaConfig`, `mesh` is not a mesh, or
        `optimizer` is not an optax transformation.
      ValueError: If a size is not positive, `released` is not a bool, the mesh has
        another axis, an axis does not divide what it splits, or `shardings` do not fit
        the parameters or have no mesh.

    Examples:
      >>> import coat_jax as coat, jax
      >>> from coat_jax.models import llama
      >>> mesh = jax.sharding.AbstractMesh((2,), ("fsdp",))
      >>> found = coat.estimate_memory(
      ...     llama.CONFIGS["llama2-7b"], batch=8, sequence=2048, mesh=mesh)
      >>> found.gpus, found.peak_phase
      (2, 'backward')
    """
    if not isinstance(config, llama.LlamaConfig):
        raise TypeError(f"config must be a LlamaConfig, got {summary(config)}")
    if recipe is not None:
        config = dataclasses.replace(config, recipe=recipe)
    if optimizer is None:
        optimizer = default_optimizer(config.recipe)
    optimizer = as_transformation(optimizer, "optimizer")
    check_flags(released=released)
    sizes = axis_sizes(mesh)
    local_batch = local_batch_of(positive_int("batch", batch), sizes)
    local_length = local_length_of(positive_int("sequence", sequence), sizes)
    params = _params(config)
    if mesh is None and shardings is not None:
        raise ValueError("shardings need the mesh that they are on, got mesh=None")
    places = None
    if mesh is not None:
        places = checked_shardings(shardings, params, mesh)
    loss, local, histories = _loss_of(local_config(config, sizes))
    step = partial(
        estimate_step,
        loss,
        with_local_experts(local, config, sizes),
        histories,
        jax.ShapeDtypeStruct((local_batch, local_length + 1), jnp.int32),
        optimizer=optimizer,
        logits=chunk_of_logits(local_batch * local_length, config.vocab_size),
        whole=None if places is None else (params, places),
        gpus=math.prod(sizes.values()),
        layers=_layers(params) if released else None,
    )
    return _within_axis(EXPERT, sizes.get(EXPERT, 1), step)


def largest_batch(
    config: llama.LlamaConfig,
    *,
    memory_gib: float,
    sequence: int,
    mesh: Mesh | AbstractMesh | None = None,
    **options: Any,
) -> int:
    """Returns the largest batch that fits into the memory of each GPU, or 0.

    The batch is the number of sequences of all GPUs together. It is a multiple of the
    number of parts into which the mesh splits it.

    Args:
      config: The shape and precision of the model.
      memory_gib: The GiB of each GPU that the program can use. JAX takes three quarters
        of a GPU's memory unless XLA_CLIENT_MEM_FRACTION says otherwise.
      sequence: The number of tokens in a sequence.
      mesh: The mesh; see `estimate_memory`.
      **options: Further arguments of `estimate_memory`.

    Raises:
      TypeError: If `batch` is among the arguments.
      ValueError: If `memory_gib` is not a positive number.

    Examples:
      >>> import coat_jax as coat
      >>> from coat_jax.models import llama
      >>> config = llama.CONFIGS["llama2-7b"]
      >>> coat.largest_batch(config, memory_gib=40, sequence=2048, recipe="bf16")
      0
    """
    if not is_positive_number(memory_gib):
        raise ValueError(f"memory_gib must be a positive number, got {memory_gib!r}")
    if "batch" in options:
        raise TypeError("largest_batch returns the batch, so it takes none")
    parts = batch_parts(axis_sizes(mesh))

    def fits(count: int) -> bool:
        estimate = estimate_memory(
            config, batch=count * parts, sequence=sequence, mesh=mesh, **options
        )
        return estimate.peak_bytes <= memory_gib * GIB

    most = 1
    while fits(most):
        most *= 2
    fewest = most // 2
    while most - fewest > 1:
        middle = (fewest + most) // 2
        fewest, most = (middle, most) if fits(middle) else (fewest, middle)
    return fewest * parts


def _within_axis[Result](name: str, size: int, fn: Callable[[], Result]) -> Result:
    """Returns `fn()`, called within a mesh axis `name` of `size` devices."""
    results = []

    def call() -> tuple[()]:
        results.append(fn())
        return ()

    jax.make_jaxpr(call, axis_env=[(name, size)] if size > 1 else None)()
    return results[0]


def default_optimizer(recipe: recipes.RecipeName) -> optax.GradientTransformation:
    """Returns a recipe's optimizer, with moments in float32 or in FP8."""
    tx = recipes.RECIPES[recipe].optimizer(1e-3)
    if recipes.RECIPES[recipe].optimizer is not optax.adamw:
        return tx

    def init(params):
        return tx.init(jax.tree.map(lambda p: p.astype(jnp.float32), params))

    return optax.GradientTransformation(init, tx.update)


def _abstract(config: llama.LlamaConfig) -> llama.Llama:
    return nnx.eval_shape(lambda: llama.Llama(config, rngs=nnx.Rngs(0)))


def _params(config: llama.LlamaConfig) -> nnx.State:
    return nnx.state(_abstract(config), nnx.Param)


def _layers(params: nnx.State) -> list[int]:
    """Returns the number of layers in each parameter: 1 unless it is a stack."""
    return [
        param.shape[0] if "layers" in jax.tree_util.keystr(path) else 1
        for path, param in jax.tree_util.tree_leaves_with_path(params)
    ]


def _loss_of(config: llama.LlamaConfig) -> tuple[Callable, nnx.State, nnx.State]:
    """Returns a model's loss function, abstract parameters, and amax histories."""
    graph, params, histories = nnx.split(_abstract(config), nnx.Param, ...)

    def loss(params, histories, tokens):
        model = nnx.merge(graph, params, histories)
        return llama.training_loss(model, tokens[:, :-1], tokens[:, 1:])[0]

    return loss, params, histories
