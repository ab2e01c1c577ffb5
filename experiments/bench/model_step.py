"""A training step of a Llama model, for each of the compared cases.

On several GPUs, jit partitions the work by the shardings of parameters and batch. The
additional case `BY_HAND` is BF16 with explicit communication: under `shard_map` a loop
gathers each layer's weights, and scatters their gradients.

`measure` should run in its own process. The device memory that it reports then belongs
to the step alone, and running out of memory affects nothing else.
"""

import dataclasses
import math
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Float32, Int32

import coat_jax as coat
from coat_jax.models import llama
from coat_jax.remat.report import peak_bytes
from experiments.bench.optimizer import chain_step, fused_step, optax_adamw
from experiments.common import meshes
from experiments.common.layer_cases import (
    CASES,
    Apply,
    LayerCase,
    LayerState,
    first_histories,
    random_params,
)
from experiments.common.memory import is_out_of_memory, tree_bytes
from experiments.common.optimizers import COAT_RECIPES
from experiments.common.timing import OPTIONS

GIB = 2**30
Row = dict[str, Any]
_WARM_UP = 2
BY_HAND = "bf16, shard_map"
# The suffix of names of cases with the optimizer inside the backward pass.
RELEASED = ", released"
# The share of the device's memory that JAX may take; JAX's default is three quarters.
MEMORY_SHARE = "0.95"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The sizes of a model and the length of its sequences; by default Llama-2-7B's."""

    hidden: int = 4096
    intermediate: int = 11_008
    layers: int = 32
    heads: int = 32
    kv_heads: int = 32
    vocab: int = 32_000
    seq: int = 2048

    @classmethod
    def of(cls, preset: str, seq: int = 2048) -> "ModelSize":
        """Returns the sizes of a preset of `coat_jax.models.llama`."""
        config = llama.CONFIGS[preset]
        return cls(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            layers=config.num_layers,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            vocab=config.vocab_size,
            seq=seq,
        )

    @classmethod
    def of_row(cls, row: Row) -> "ModelSize":
        """Returns the sizes in a row of results."""
        return cls(**{field.name: row[field.name] for field in dataclasses.fields(cls)})

    @property
    def preset(self) -> str | None:
        """The preset that differs at most in layers and sequence length, or None."""
        differs = {"layers": self.layers, "seq": self.seq}
        for preset in llama.CONFIGS:
            if dataclasses.replace(ModelSize.of(preset), **differs) == self:
                return preset
        return None

    @property
    def name(self) -> str:
        """The name of the preset with the sizes that differ from it.

        If no preset has these sizes, the name has the number of layers and the hidden
        size. A sequence length other than 2048 is added.
        """
        preset = self.preset
        if preset is None:
            title = f"{self.layers} layers of {self.hidden}"
        elif self.layers == ModelSize.of(preset).layers:
            title = preset
        else:
            title = f"{preset}, {self.layers} layers"
        return title if self.seq == ModelSize.seq else f"{title}, sequence {self.seq:,}"

    def config(
        self, case: LayerCase, mesh: Mesh | None = None, buffer: float | None = None
    ) -> llama.LlamaConfig:
        """Returns the configuration of a case, with parameters in BF16.

        Args:
          case: The recipe and scaling of the layers.
          mesh: The mesh, or None for one device.
          buffer: The option `buffer` of experts; see `Spread`. The model has experts if
            the preset with these sizes has them.
        """
        options: dict[str, Any] = {"recipe": case.recipe, "scaling": case.scaling}
        options |= {"num_layers": self.layers, "param_dtype": jnp.bfloat16}
        if mesh is not None:
            context = meshes.context_of(mesh)
            options |= {"batch_axes": meshes.BATCH_AXES, "context": context}
        preset = llama.CONFIGS.get(self.preset or "")
        if preset is not None and preset.experts is not None:
            experts = dataclasses.replace(preset.experts, buffer=buffer)
            return dataclasses.replace(preset, experts=experts, **options)
        return llama.LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            **options,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
    """The GPUs of a measurement, and the sizes of the axes that they are divided into.

    Parameters, moments and the batch are sharded over all GPUs.

    Attributes:
      gpus: The number of GPUs.
      context: The number of GPUs that each sequence is sharded over.
      expert: The number of GPUs that the experts are sharded over.
      buffer: The relative size of buffers for rows that one GPU sends to another, or
        None; see `llama.Experts`.
    """

    gpus: int = 1
    context: int = 1
    expert: int = 1
    buffer: float | None = None

    @property
    def groups(self) -> int:
        """The number of groups of GPUs that hold different sequences."""
        return self.gpus // self.context

    def mesh(self, model: ModelSize) -> Mesh | None:
        """Returns the mesh, or None for one GPU.

        Raises:
          ValueError: If `context * expert` does not divide the number of GPUs, or the
            mesh the length of sequences.
        """
        split = self.context * self.expert
        if self.gpus % split:
            raise ValueError(f"{self.gpus} GPUs cannot be split into groups of {split}")
        axes = {"context": self.context, "expert": self.expert}
        mesh = meshes.make({"fsdp": self.gpus // split, **axes}, devices=self.gpus)
        meshes.check_length("--seq", model.seq, mesh)
        return mesh


ONE_GPU = Spread()


class _Wrapped(nnx.Module):
    """Applies layers with the wrapper of a case, which sets their differentiation."""

    def __init__(self, layers: nnx.Module, wrap: Callable[[Apply, bool], Apply]):
        self.layers = layers
        self.wrap = wrap

    def __call__(self, x: Float[Array, "b s h"]) -> Float[Array, "b s h"]:
        graph, params = nnx.split(self.layers)
        apply = self.wrap(lambda params, x: nnx.merge(graph, params)(x), True)
        return apply(params, x)


def loss_function(
    case: str, model: ModelSize, mesh: Mesh | None = None, buffer: float | None = None
) -> tuple[Callable, LayerState]:
    """Returns the loss function of a case, and its abstract parameters and histories.

    The loss function takes parameters, histories and tokens [b, s + 1].

    Args:
      case: The name of the case.
      model: The model's sizes.
      mesh: The mesh, or None for one device.
      buffer: An option of experts; see `Spread`.
    """
    if case == BY_HAND:
        return _loss_by_hand(model, mesh)
    case = case.removesuffix(RELEASED)
    config = model.config(CASES[case], mesh, buffer)
    meshes.check_experts(config, mesh)
    graph, state = _abstract(config, CASES[case].wrap)

    def loss(params, histories, tokens: Int32[Array, "b s+1"]) -> Float32[Array, ""]:
        merged = nnx.merge(graph, params, histories)
        return llama.cross_entropy(merged, tokens[:, :-1], tokens[:, 1:])

    return loss, state


def _abstract(
    config: llama.LlamaConfig, wrap: Callable[[Apply, bool], Apply]
) -> tuple[nnx.GraphDef, LayerState]:
    """Returns the graph and the abstract state of a model with wrapped layers."""

    def build():
        model = llama.Llama(config, rngs=nnx.Rngs(0))
        model.layers = _Wrapped(model.layers, wrap)
        return model

    graph, *state = nnx.split(nnx.eval_shape(build), nnx.Param, ...)
    return graph, LayerState(*state)


def _loss_by_hand(model: ModelSize, mesh: Mesh | None) -> tuple[Callable, LayerState]:
    """Returns the loss function and the abstract state of the case `BY_HAND`.

    Raises:
      ValueError: If there is no mesh.
    """
    if mesh is None:
        raise ValueError(f"{BY_HAND} needs several devices, got one")
    names = mesh.axis_names

    def whole(shard: Array, axis: int) -> Array:
        # Backward gathers again instead of keeping all layers' weights.
        gathered = lax.all_gather(shard, names, axis=axis, tiled=True)
        return checkpoint_name(gathered, "gathered")

    def wrap(apply, in_scan):
        def weight(shard):
            # Every weight of a layer is split along its outputs, norms are not split.
            return shard if shard.ndim < 2 else whole(shard, shard.ndim - 2)

        def gathering(shards, x):
            return apply(jax.tree.map(weight, shards), x)

        return jax.checkpoint(
            gathering,
            policy=jax.checkpoint_policies.save_anything_except_these_names("gathered"),
            prevent_cse=not in_scan,
        )

    graph, (params, histories) = _abstract(model.config(CASES["bf16"]), wrap)
    specs = jax.tree.map(lambda s: s.spec, meshes.param_shardings(params, mesh))
    placed = {"in_specs": (specs, PartitionSpec(names)), "out_specs": PartitionSpec()}

    @partial(jax.shard_map, mesh=mesh, **placed, check_vma=False)
    def mean(params, tokens):
        merged = nnx.merge(graph, params, histories)
        for weight in (merged.embedding, merged.head):
            weight.set_value(whole(weight[...], 0))
        loss = llama.cross_entropy(merged, tokens[:, :-1], tokens[:, 1:])
        return lax.pmean(loss, names)

    def loss(params, histories, tokens: Int32[Array, "b s+1"]) -> Float32[Array, ""]:
        return mean(params, tokens)

    return loss, LayerState(params, histories)


def measure_alone(
    case: str,
    model: ModelSize,
    batch: int,
    steps: int,
    spread: Spread,
    share: str = MEMORY_SHARE,
) -> Row:
    """Runs `measure`, with `share` as the share of the devices' memory that JAX takes.

    JAX must not have been used in this process yet.
    """
    take_memory(at_once=True, share=share)
    return measure(case, model, batch, steps, spread)


def take_memory(*, at_once: bool, share: str = MEMORY_SHARE) -> None:
    """Makes JAX reserve a share of the devices' memory: at once, or as it is needed.

    JAX must not have been used in this process yet.
    """
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = str(at_once).lower()
    # This is the older name of the variable below.
    os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)
    os.environ["XLA_CLIENT_MEM_FRACTION"] = share


def measure(
    case: str, model: ModelSize, batch: int, steps: int, spread: Spread = ONE_GPU
) -> Row:
    """Measures the time and memory of a case's training step.

    Sizes in the row are per GPU. The row has an error if memory does not suffice.

    Args:
      case: A name in `CASES`, with `RELEASED` at its end for `coat.value_and_update`,
        or `BY_HAND` on several GPUs.
      model: The model's sizes.
      batch: The number of sequences in a step on each GPU, or on each group of GPUs
        that share sequences.
      steps: The number of timed steps.
      spread: The GPUs, and how they share sequences and experts.

    Raises:
      ValueError: If the model cannot be sharded in this way, if a loss is not finite,
        or if `spread` shards sequences or experts with the case `BY_HAND`.
    """
    if case == BY_HAND and spread != Spread(gpus=spread.gpus):
        raise ValueError(f"{case} splits the batch alone, got {spread}")
    mesh, gpus, groups = spread.mesh(model), spread.gpus, spread.groups
    row: Row = {"case": case, "batch": batch} | dataclasses.asdict(model)
    row |= dataclasses.asdict(spread) | {"mesh": meshes.name_of(mesh)}
    loss, (params, histories) = loss_function(case, model, mesh, spread.buffer)
    tx, step = step_of(case, loss)

    carry = (params, jax.eval_shape(tx.init, params)), histories
    *of_state, of_histories = meshes.state_shardings(tx, *carry[0], histories, mesh)
    placements = tuple(of_state), of_histories
    batch_there = meshes.whole(None) if mesh is None else meshes.batch_sharding(mesh)
    abstract = meshes.placed(carry, placements)
    shape = groups * batch, model.seq + 1
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_there)
    (placed_params, _), placed_histories = abstract
    saved = coat.residual_report(loss, placed_params, placed_histories, tokens)
    row |= {
        "parameters_gib": tree_bytes(params) / gpus / GIB,
        "optimizer_gib": tree_bytes(abstract[0][1]) / gpus / GIB,
        "activations_gib": saved.nbytes / gpus / GIB,
    }
    try:
        started = time.perf_counter()
        placed = placements, meshes.whole(mesh)
        jitted = jax.jit(step, donate_argnums=0, out_shardings=placed)
        compiled = jitted.lower(abstract, tokens).compile(OPTIONS)
        row["compile_s"] = time.perf_counter() - started
        row["peak_gib"] = peak_bytes(compiled) / GIB
        params = random_params(abstract[0][0])
        opt_state = jax.jit(tx.init, out_shardings=placements[0][1])(params)
        histories = jax.device_put(first_histories(histories), placements[1])
        tokens = jax.device_put(_random_tokens(model, groups * batch), batch_there)
        row |= _timed(compiled, ((params, opt_state), histories), tokens, steps)
        row["tokens_per_s_per_gpu"] = row["tokens_per_s"] / gpus
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        row["error"] = "out of memory"
    return row


def step_of(case: str, loss: Callable) -> tuple[optax.GradientTransformation, Callable]:
    """Returns the optimizer and the training step of a case with a loss function."""
    recipe = case.removesuffix(RELEASED)
    fused = case != BY_HAND and CASES[recipe].recipe in COAT_RECIPES
    tx, update = fused_step() if fused else chain_step(optax_adamw())

    def step(carry, tokens):
        (params, opt_state), histories = carry
        value, (grads, histories) = jax.value_and_grad(loss, (0, 1))(
            params, histories, tokens
        )
        return (update((params, opt_state), grads), histories), value

    def released(carry, tokens):
        (params, opt_state), histories = carry
        step = coat.value_and_update(loss, tx)
        value, *state = step(params, opt_state, histories, tokens)
        return (tuple(state), histories), value

    return tx, step if recipe == case else released


def _timed(compiled, carry: Any, tokens: Int32[Array, "b s+1"], steps: int) -> Row:
    """Times steps that run one after another on the same tokens, and returns a row."""
    for _ in range(_WARM_UP):
        carry, loss = compiled(carry, tokens)
    first = float(loss)
    started = time.perf_counter()
    for _ in range(steps):
        carry, loss = compiled(carry, tokens)
    jax.block_until_ready(carry)
    seconds = (time.perf_counter() - started) / steps
    if not math.isfinite(first + float(loss)):
        raise ValueError(f"losses must be finite, got {first} and {loss}")
    stats = jax.devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    return {
        "device_peak_gib": peak and peak / GIB,
        "ms_per_step": 1e3 * seconds,
        "tokens_per_s": tokens.shape[0] * (tokens.shape[1] - 1) / seconds,
        "first_loss": first,
        "last_loss": float(loss),
    }


def _random_tokens(model: ModelSize, batch: int) -> Int32[Array, "b s+1"]:
    shape = batch, model.seq + 1
    return jax.random.randint(jax.random.key(0), shape, 0, model.vocab)
