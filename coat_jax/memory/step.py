"""The memory of a step on one GPU, from the arrays that exist at each operation."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import optax

from coat_jax.memory.kinds import Kinds, MemoryEstimate, kind_of
from coat_jax.memory.shards import head_bytes, nbytes, shard_bytes, tree_bytes
from coat_jax.optimizers.sharding import opt_state_sharding
from coat_jax.remat.liveness import Held, Moment, liveness, peak, total_bytes


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
    """Predicts the memory of a step with the loss `loss(params, *args)`.

    Args:
      loss: The loss of one GPU's tokens.
      params: The parameters that one GPU computes with: a pytree of arrays or of
        `jax.ShapeDtypeStruct`.
      *args: The other arguments of the loss.
      optimizer: The optimizer, which updates its arrays in place.
      logits: The shape of the logits that exist at a time; see `chunk_of_logits`.
      whole: The parameters of the model and their shardings, on a mesh.
      gpus: The number of GPUs.
      layers: For a step of `coat.value_and_update`, the number of layers in each
        parameter, which is 1 unless the parameter is under `coat.scan_layers`. None
        means that the optimizer steps after the backward pass.
    """
    live = liveness(loss, params, *args)
    state = jax.eval_shape(optimizer.init, params)
    shards = [nbytes(p) for p in jax.tree.leaves(params)]
    resident = {"parameters": sum(shards), "optimizer": tree_bytes(state)}
    gathered = 0
    if whole is not None:
        shards = list(shard_bytes(*whole))
        places = opt_state_sharding(optimizer, *whole)
        moments = shard_bytes(jax.eval_shape(optimizer.init, whole[0]), places)
        resident = {"parameters": sum(shards), "optimizer": sum(moments)}
        gathered = head_bytes(*whole)
    layers = layers or [1] * len(shards)
    gradients = [size // count for size, count in zip(shards, layers, strict=True)]
    of_a_layer = sum(g for g, count in zip(gradients, layers, strict=True) if count > 1)

    def kinds(moments: Iterable[Moment], gathered: int = 0) -> Kinds:
        sizes = dict.fromkeys(("gradients", "saved", "workspace", "logits"), 0)
        sizes["gathered"] = gathered
        for array in peak(map(without_stacks, moments)):
            kind = kind_of(array, logits)
            split = kind == "gradients" and array.index < len(shards)
            sizes[kind] += gradients[array.index] if split else array.nbytes
        return Kinds(**resident, **sizes)

    def without_stacks(moment: Moment) -> Moment:
        return tuple(array for array in moment if not is_stack(array))

    def is_stack(array: Held) -> bool:
        """Returns whether an array stacks gradients that never exist all at once."""
        is_gradient = kind_of(array, logits) == "gradients" and array.index < len(
            layers
        )
        return is_gradient and layers[array.index] > 1

    def in_loss(moment: Moment) -> bool:
        return any(kind_of(array, logits) == "logits" for array in moment)

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
