"""Predicts the memory of a training step on each GPU, without a GPU."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from coat_jax.layers import recipes
from coat_jax.models import llama
from coat_jax.models.loss import chunk_of_logits
from coat_jax.optimizers.sharding import opt_state_sharding
from coat_jax.remat.liveness import Held, Moment, liveness, peak, total_bytes
from pallas_kernels.checks import is_positive_number, positive_int

GIB = 2**30
Phase = Literal["forward", "loss", "backward", "update"]
# Mesh axes by what they split: the batch, the parameters and the batch, and the heads
# and the MLP's hidden layer.
_AXES = ("data", "fsdp", "tensor")
# The weights whose inputs, not outputs, are split over the axis "tensor".
_SPLIT_BY_INPUTS = ("out", "down")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kinds:
    """Bytes on one GPU at one time, by kind.

    Attributes:
      parameters: The GPU's shards of the parameters.
      gradients: The GPU's shards of their gradients, as far as they exist.
      optimizer: The GPU's shards of the optimizer's state.
      saved: Activations that are saved for the backward pass.
      workspace: All other arrays of the layers: inputs and results of matmuls and
        kernels, codes of gradients, copies of one layer's saved activations.
      gathered: Weights in the form that matmuls read: FP8 codes, casts to the dtype of
        the computation, slices of stacks. On a mesh they are gathered, and whole.
      logits: The logits of a chunk of tokens, and their gradients.
    """

    parameters: int
    gradients: int = 0
    optimizer: int
    saved: int = 0
    workspace: int = 0
    gathered: int = 0
    logits: int = 0

    @property
    def total(self) -> int:
        """The sum over all kinds."""
        return sum(dataclasses.asdict(self).values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """The memory of a training step on each GPU; prints as a table.

    A step has four phases. The loss is computed with its gradient with respect to the
    last layer's output. The optimizer works in place.

    Attributes:
      forward: The bytes at the peak of the forward pass.
      loss: The bytes at the peak of the loss.
      backward: The bytes at the peak of the backward pass.
      update: The bytes during the optimizer's step.
      saved_bytes: All activations that the forward pass saves.
      gpus: The number of GPUs.
    """

    forward: Kinds
    loss: Kinds
    backward: Kinds
    update: Kinds
    saved_bytes: int
    gpus: int

    @property
    def phases(self) -> dict[Phase, Kinds]:
        """The bytes of each phase."""
        names: tuple[Phase, ...] = ("forward", "loss", "backward", "update")
        return {name: getattr(self, name) for name in names}

    @property
    def peak_phase(self) -> Phase:
        """The phase that takes the most memory."""
        return max(self.phases, key=lambda name: self.phases[name].total)

    @property
    def peak(self) -> Kinds:
        """The bytes at the peak of the step."""
        return self.phases[self.peak_phase]

    @property
    def peak_bytes(self) -> int:
        """The most bytes that a GPU needs."""
        return self.peak.total

    def __str__(self) -> str:
        lines = [f"{'GiB a GPU':12}" + "".join(f"{name:>10}" for name in self.phases)]
        for field in (*(f.name for f in dataclasses.fields(Kinds)), "total"):
            cells = (getattr(kinds, field) / GIB for kinds in self.phases.values())
            lines.append(f"{field:12}" + "".join(f"{cell:10.3f}" for cell in cells))
        return "\n".join(lines)


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
    of what XLA writes to memory and when (`coat_jax.remat.liveness`). It does not know
    gaps between arrays, and not what libraries allocate for themselves. On a mesh XLA
    gathers the weights of "bf16" and "te", with buffers that are not counted; for "te"
    it also keeps a transposed copy of the shards of gate and up. Peaks of these are 2%
    to 6% higher. Measured ones are in experiments/results/estimate beside predictions.

    The step is `jax.value_and_grad` of `llama.cross_entropy` and an optimizer in place
    on donated arrays, such as `coat.fused_update`. `tx.update` with FP8 moments needs
    another 2 bytes or more for each parameter. With `released` it is the step of
    `coat.value_and_update`.

    Args:
      config: The shape and precision of the model.
      batch: The number of sequences in a step, on all GPUs together.
      sequence: The number of tokens in a sequence.
      mesh: A mesh with axes named "data", "fsdp" and "tensor", any of them. "data" and
        "fsdp" split the batch, "fsdp" the parameters, and "tensor" heads and the MLP's
        hidden layer. An `AbstractMesh` needs no devices. None is one GPU.
      shardings: The shardings of the parameters: a tree of `NamedSharding` with the
        structure of the model's `nnx.Param` state. By default "fsdp" splits the last
        axis but one of every matrix.
      recipe: The recipe, if not that of `config`.
      optimizer: The optimizer. By default it is `coat.fp8_adamw` for the recipes "coat"
        and "coat_max", and `optax.adamw` with float32 moments for the others.
      released: Whether the optimizer steps inside the backward pass, so that the
        gradients of one layer exist at a time.

    Raises:
      TypeError: If `config` is no `LlamaConfig` or `mesh` no mesh.
      ValueError: If a size is not positive, the mesh has another axis, an axis does not
        divide what it splits, or `shardings` do not fit the parameters.

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
        raise TypeError(f"config must be a LlamaConfig, got {config!r}")
    if recipe is not None:
        config = dataclasses.replace(config, recipe=recipe)
    if optimizer is None:
        optimizer = default_optimizer(config.recipe)
    sizes = _sizes(mesh)
    local_batch = _local_batch(positive_int("batch", batch), sizes)
    positive_int("sequence", sequence)
    params = _params(config)
    if mesh is None and shardings is not None:
        raise ValueError("shardings need the mesh that they are on, got mesh=None")
    places = None
    if mesh is not None:
        places = _checked(shardings, params, mesh)
    loss, *state = _loss_of(_local(config, sizes))
    return estimate_step(
        loss,
        *state,
        jax.ShapeDtypeStruct((local_batch, sequence + 1), jnp.int32),
        optimizer=optimizer,
        logits=chunk_of_logits(local_batch * sequence, config.vocab_size),
        whole=None if places is None else (params, places),
        gpus=math.prod(sizes.values()),
        layers=_layers(params) if released else None,
    )


def estimate_step(
    loss: Callable[..., Any],
    params: Any,
    *args: Any,
    optimizer: optax.GradientTransformation,
    logits: tuple[int, int],
    whole: tuple[Any, Any] | None = None,
    gpus: int = 1,
    layers: Sequence[int] | None = None,
) -> MemoryEstimate:
    """Predicts the memory of a step whose loss is `loss(params, *args)`.

    Args:
      loss: The loss of one GPU's tokens.
      params: The parameters that one GPU computes with: a pytree of arrays or of
        `jax.ShapeDtypeStruct`.
      *args: The other arguments of the loss.
      optimizer: The optimizer.
      logits: The shape of the logits that exist at a time; see `chunk_of_logits`.
      whole: The parameters of the model and their shardings, on a mesh.
      gpus: The number of GPUs.
      layers: For a step of `coat.value_and_update`, the number of layers in each
        parameter, which is 1 unless the parameter is under `coat.scan_layers`. None is
        for a step after the backward pass.
    """
    live = liveness(loss, params, *args)
    state = jax.eval_shape(optimizer.init, params)
    shards = [_nbytes(p) for p in jax.tree.leaves(params)]
    resident = {"parameters": sum(shards), "optimizer": _tree_bytes(state)}
    gathered = 0
    if whole is not None:
        shards = list(_shard_bytes(*whole))
        places = opt_state_sharding(optimizer, *whole)
        moments = _shard_bytes(jax.eval_shape(optimizer.init, whole[0]), places)
        resident = {"parameters": sum(shards), "optimizer": sum(moments)}
        gathered = _head_bytes(*whole)
    layers = layers or [1] * len(shards)
    gradients = [size // count for size, count in zip(shards, layers, strict=True)]
    of_a_layer = sum(g for g, count in zip(gradients, layers, strict=True) if count > 1)

    def kinds(moments: Iterable[Moment], gathered: int = 0) -> Kinds:
        sizes = dict.fromkeys(("gradients", "saved", "workspace", "logits"), 0)
        sizes["gathered"] = gathered
        for array in peak(map(without_stacks, moments)):
            kind = _kind(array, logits)
            split = kind == "gradients" and array.index < len(shards)
            sizes[kind] += gradients[array.index] if split else array.nbytes
        return Kinds(**resident, **sizes)

    def without_stacks(moment: Moment) -> Moment:
        return tuple(array for array in moment if not is_stack(array))

    def is_stack(array: Held) -> bool:
        """Returns whether only a layer of a stack of gradients exists at a time."""
        is_gradient = _kind(array, logits) == "gradients" and array.index < len(layers)
        return is_gradient and layers[array.index] > 1

    def in_loss(moment: Moment) -> bool:
        return any(_kind(array, logits) == "logits" for array in moment)

    def with_layer(sizes: Kinds) -> Kinds:
        return dataclasses.replace(sizes, gradients=sizes.gradients + of_a_layer)

    return MemoryEstimate(
        forward=kinds(m for m in live.forward if not in_loss(m)),
        loss=kinds(filter(in_loss, live.forward), gathered),
        backward=with_layer(kinds(live.backward)),
        update=Kinds(**resident, gradients=sum(gradients)),
        saved_bytes=total_bytes(live.saved),
        gpus=gpus,
    )


def largest_batch(
    config: llama.LlamaConfig,
    *,
    memory_gib: float,
    sequence: int,
    mesh: Mesh | AbstractMesh | None = None,
    **options: Any,
) -> int:
    """Returns the largest batch whose step fits into the memory of each GPU, or 0.

    The batch is that of all GPUs together, a multiple of the parts that the mesh splits
    it into.

    Args:
      config: The shape and precision of the model.
      memory_gib: The memory that a GPU has for the program. JAX takes three quarters of
        a GPU's unless XLA_CLIENT_MEM_FRACTION says otherwise.
      sequence: The number of tokens in a sequence.
      mesh: The mesh; see `estimate_memory`.
      **options: Further arguments of `estimate_memory`.

    Raises:
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
    parts = _batch_parts(_sizes(mesh))

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


def default_optimizer(recipe: recipes.RecipeName) -> optax.GradientTransformation:
    """Returns the optimizer of a recipe; float32 moments unless they are FP8."""
    tx = recipes.RECIPES[recipe].optimizer(1e-3)
    if recipes.RECIPES[recipe].optimizer is not optax.adamw:
        return tx

    def init(params):
        return tx.init(jax.tree.map(lambda p: p.astype(jnp.float32), params))

    return optax.GradientTransformation(init, tx.update)


def _kind(array: Held, logits: tuple[int, int]) -> str:
    if array.role == "copy":
        return "gathered"
    if array.role == "saved":
        return "saved"
    if array.role == "output":
        return "gradients"
    # FP8 codes may have this shape, too.
    is_logits = array.shape == logits and array.dtype.itemsize > 1
    return "logits" if is_logits else "workspace"


def _sizes(mesh: Mesh | AbstractMesh | None) -> dict[str, int]:
    """Returns the sizes of the mesh's axes."""
    if mesh is None:
        return {}
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {mesh!r}")
    if unknown := [name for name in mesh.axis_names if name not in _AXES]:
        known = ", ".join(_AXES)
        raise ValueError(f"axes of the mesh must be among {known}, got {unknown[0]!r}")
    return dict(mesh.shape)


def _batch_parts(sizes: dict[str, int]) -> int:
    return sizes.get("data", 1) * sizes.get("fsdp", 1)


def _local_batch(batch: int, sizes: dict[str, int]) -> int:
    if batch % (parts := _batch_parts(sizes)):
        raise ValueError(
            f"batch must be a multiple of {parts}, the size of the axes data and fsdp "
            f"together, got {batch}"
        )
    return batch // parts


def _local(config: llama.LlamaConfig, sizes: dict[str, int]) -> llama.LlamaConfig:
    """Returns the configuration of one GPU's part of each layer."""
    parts = sizes.get("tensor", 1)
    split = ("num_heads", "num_kv_heads", "intermediate_size")
    for name in split:
        if getattr(config, name) % parts:
            raise ValueError(
                f"the axis tensor must divide {name} {getattr(config, name)}, got "
                f"{parts}"
            )
    local = {name: getattr(config, name) // parts for name in split}
    head_dim = config.head_dim or config.hidden_size // config.num_heads
    return dataclasses.replace(config, head_dim=head_dim, **local)


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
    """Returns the loss, and its abstract parameters and histories."""
    graph, params, histories = nnx.split(_abstract(config), nnx.Param, ...)

    def loss(params, histories, tokens):
        model = nnx.merge(graph, params, histories)
        return llama.training_loss(model, tokens[:, :-1], tokens[:, 1:])[0]

    return loss, params, histories


def _checked(shardings: Any, params: nnx.State, mesh: Mesh | AbstractMesh) -> Any:
    """Returns the parameters' shardings, by default those of FSDP."""
    if shardings is None:
        return jax.tree_util.tree_map_with_path(
            lambda path, p: NamedSharding(mesh, _spec(path, p, mesh)), params
        )
    if (structure := jax.tree.structure(shardings)) != jax.tree.structure(params):
        raise ValueError(
            f"shardings must have the structure of params, got {structure}"
        )
    for sharding in jax.tree.leaves(shardings):
        if not isinstance(sharding, NamedSharding):
            raise ValueError(f"shardings must be NamedSharding, got {sharding!r}")
    return shardings


def default_shardings(params: nnx.State, mesh: Mesh | AbstractMesh) -> Any:
    """Returns the shardings of parameters: those of FSDP, as far as axes divide them.

    "fsdp" splits the last axis but one of every matrix, and "tensor" heads and the
    MLP's hidden layer. An axis of the parameter is whole if the mesh does not divide
    it.
    """

    def sharding(path: Any, param: Any) -> NamedSharding:
        spec = _spec(path, param, mesh)
        parts = (
            name if param.shape[i] % _size(name, mesh) == 0 else None
            for i, name in enumerate(spec)
        )
        return NamedSharding(mesh, P(*parts))

    return jax.tree_util.tree_map_with_path(sharding, params)


def _size(names: Any, mesh: Mesh | AbstractMesh) -> int:
    """Returns the number of parts into which mesh axes split an array's axis."""
    names = names if isinstance(names, tuple) else (names,)
    return math.prod(mesh.shape[name] for name in names if name is not None)


def _spec(path: Any, param: Any, mesh: Mesh | AbstractMesh) -> P:
    """Returns the spec that splits a matrix over the axes "fsdp" and "tensor"."""
    names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    fsdp, tensor = (name in mesh.axis_names for name in ("fsdp", "tensor"))
    in_layer = "layers" in names
    vector = "norm" in "/".join(names) or "qkv_bias" in names
    if vector or param.ndim < 2:
        return P()
    spec: list[Any] = [None] * param.ndim
    outputs = ("fsdp",) if fsdp else ()
    if tensor and in_layer:
        if any(name in names for name in _SPLIT_BY_INPUTS):
            spec[-1] = "tensor"
        else:
            outputs = (*outputs, "tensor")
    spec[-2] = outputs or None
    return P(*spec)


def _shard_bytes(tree: Any, shardings: Any) -> Iterator[int]:
    """Yields the bytes of each array's part on one GPU."""
    arrays, places = jax.tree.leaves(tree), jax.tree.leaves(shardings)
    for x, place in zip(arrays, places, strict=True):
        try:
            shape = place.shard_shape(x.shape)
        except ValueError as error:
            raise ValueError(
                f"{place.spec} must divide a parameter of shape {x.shape}"
            ) from error
        yield math.prod(shape) * x.dtype.itemsize


def _head_bytes(params: nnx.State, places: Any) -> int:
    """Returns the bytes of the head, which the loss gathers if it is split."""
    name = "embedding" if params.get("head") is None else "head"
    [param], [place] = jax.tree.leaves(params[name]), jax.tree.leaves(places[name])
    return 0 if place.is_fully_replicated else _nbytes(param)


def _nbytes(x: Any) -> int:
    return x.size * x.dtype.itemsize


def _tree_bytes(tree: Any) -> int:
    return sum(map(_nbytes, jax.tree.leaves(tree)))
