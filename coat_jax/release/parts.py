"""An optimizer's step for a part of the parameters.

A part's step is the optimizer's own step on the whole tree, with `optax.MaskedNode` in
place of all other parameters and of their state. So masks, labels, schedules and the
paths on which random bits depend are the same as for the whole tree.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr
from jaxtyping import Array, Float, Key

from coat_jax.optimizers.batch import as_dtype
from coat_jax.optimizers.fused import FusedRequest, requested_update
from coat_jax.optimizers.places import Path, fields_of, owner_of
from coat_jax.optimizers.sharding import on_mesh_of
from coat_jax.optimizers.step import Stacks
from coat_jax.optimizers.trees import by_path, is_quantized, unboxed

MASKED = optax.MaskedNode()
# Cotangents must be floating, so integers of a state are bitcast to floats as wide.
_FLOATS = {1: jnp.float8_e4m3fn, 2: jnp.bfloat16, 4: jnp.float32, 8: jnp.float64}

# The arrays of one parameter's state, in a list for each node of the state. A moment in
# FP8 is one node with two or three arrays.
Nodes = list[list[Array]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clip:
    """Clipping by the global norm, as `optax.clip_by_global_norm` does it.

    Attributes:
      norm: The global norm of all gradients.
      limit: The largest norm.
    """

    norm: Float[Array, ""]
    limit: float

    def __call__(self, grad: Array) -> Array:
        """Returns the gradient, times limit / norm if the norm reaches the limit."""
        scaled = (grad / self.norm.astype(grad.dtype)) * self.limit
        return jnp.where(self.norm < self.limit, grad, scaled)


class Parameters:
    """The parameters of a step, and the optimizer's state of each of them.

    Args:
      params: Parameters.
      state: The optimizer's state.

    Attributes:
      leaves: The parameters as a list.
      treedef: The structure of the tree of parameters.
      names: The paths of the parameters, as text.
    """

    def __init__(self, params: optax.Params, state: optax.OptState):
        self.leaves, self.treedef = jax.tree.flatten(params)
        # Paths do not include boxes, because some transformations return arrays without
        # boxes for boxed parameters.
        self._paths = list(by_path(unboxed(params)))
        self.names = [f"params{keystr(path)}" for path in self._paths]
        nodes, self._state_def = jax.tree.flatten(state, is_leaf=is_quantized)
        owners = list(_owners(params, state))
        self._places = [path for path, _ in owners]
        self._owners = [owner for _, owner in owners]
        self._nodes = [
            node if owner is None else on_mesh_of(self.leaves[owner], node)
            for node, owner in zip(nodes, self._owners, strict=True)
        ]

    def state_of(self, index: int) -> Nodes:
        """Returns the arrays of a parameter's state, a list for each node."""
        owned = zip(self._nodes, self._owners, strict=True)
        return [jax.tree.leaves(node) for node, owner in owned if owner == index]

    def stored(self, index: int, floats: Nodes) -> Nodes:
        """Returns a parameter's state in its own dtypes; inverts `as_floats`."""
        return jax.tree.map(_as_dtype, floats, self._dtypes_of(index))

    def tree(self, leaves: Mapping[int, Any]) -> Any:
        """Returns the tree of parameters `leaves`, with `MaskedNode` for all others."""
        count = range(len(self.leaves))
        return self.treedef.unflatten([leaves.get(j, MASKED) for j in count])

    def part_of_state(self, states: Mapping[int, Nodes]) -> optax.OptState:
        """Returns some parameters' state, with `MaskedNode` for all other parameters.

        `states` has the states of these parameters by index. Nodes that belong to no
        parameter, such as counts, are as before the step.
        """
        queues = {j: iter(nodes) for j, nodes in states.items()}
        nodes = []
        for node, owner in zip(self._nodes, self._owners, strict=True):
            if owner is None:
                nodes.append(node)
            elif owner in queues:
                nodes.append(_like(node, next(queues[owner])))
            else:
                nodes.append(MASKED)
        return self._state_def.unflatten(nodes)

    def states_after(self, state: optax.OptState, indices: Sequence[int]) -> dict:
        """Returns the states of some parameters after a step, by index; see `state_of`.

        Raises:
          ValueError: If the step changed a dtype.
        """
        states: dict[int, Nodes] = {j: [] for j in indices}
        after = by_path(unboxed(state), is_leaf=is_quantized)
        columns = (self._nodes, self._places, self._owners)
        for node, path, owner in zip(*columns, strict=True):
            if owner in states:
                arrays = jax.tree.leaves(after[path])
                self._check_dtypes(owner, jax.tree.leaves(node), arrays)
                states[owner].append(arrays)
        return states

    def shared_after(self, state: optax.OptState) -> list[Any]:
        """Returns the nodes of a state that belong to no parameter, after a step."""
        after = by_path(unboxed(state), is_leaf=is_quantized)
        columns = (self._nodes, self._places, self._owners)
        return [
            _like(node, jax.tree.leaves(after[path]))
            for node, path, owner in zip(*columns, strict=True)
            if owner is None
        ]

    def leaves_of(self, params: optax.Params, indices: Iterable[int]) -> dict[int, Any]:
        """Returns some parameters by index, from a tree with `MaskedNode`s."""
        leaves = by_path(unboxed(params))
        return {j: leaves[self._paths[j]] for j in indices}

    def whole_state(
        self, states: Sequence[Nodes], shared: Sequence[Any]
    ) -> optax.OptState:
        """Assembles the optimizer's state from parameters' states and shared nodes."""
        queues, common = [iter(nodes) for nodes in states], iter(shared)
        nodes = [
            next(common) if owner is None else _like(node, next(queues[owner]))
            for node, owner in zip(self._nodes, self._owners, strict=True)
        ]
        return self._state_def.unflatten(nodes)

    def shared(self) -> list[Any]:
        """Returns the nodes of the state that belong to no parameter."""
        owned = zip(self._nodes, self._owners, strict=True)
        return [node for node, owner in owned if owner is None]

    def owners(self) -> list[int | None]:
        """Returns the index of the parameter that each array of the state belongs to.

        The index is None for arrays that belong to no parameter.
        """
        pairs = zip(self._nodes, self._owners, strict=True)
        return [owner for node, owner in pairs for _ in jax.tree.leaves(node)]

    def _dtypes_of(self, index: int) -> list[list[Any]]:
        return jax.tree.map(lambda x: x.dtype, self.state_of(index))

    def _check_dtypes(self, owner: int, old: list, after: list) -> None:
        dtypes = [x.dtype for x in old], [x.dtype for x in after]
        if dtypes[0] != dtypes[1]:
            raise ValueError(
                f"the optimizer's step changes the state of {self.names[owner]} from "
                f"{_listed(dtypes[0])} to {_listed(dtypes[1])}, so that it cannot be "
                "written in place. Call init with float32 parameters, or set mu_dtype"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An optimizer that can step a part of the parameters.

    Attributes:
      tx: The optimizer.
      params: The parameters and their state before the step.
      is_fused: Whether `coat.fused_update` computes the step.
      key: The key of stochastic rounding, for `coat.fused_update`.
      clip: Clipping by the global norm, or None.
    """

    tx: optax.GradientTransformation
    params: Parameters
    is_fused: bool
    key: Key[Array, ""] | None = None
    clip: Clip | None = None

    def step(
        self,
        grads: Mapping[int, Array],
        params: Mapping[int, Array],
        states: Mapping[int, Nodes],
        stacks: Stacks | None = None,
    ) -> tuple[dict[int, Array], optax.OptState]:
        """Steps some parameters.

        Args:
          grads: Gradients by the parameters' indices.
          params: Parameters by index, which may be slices of stacks.
          states: The parameters' states by index, slices of stacks if the parameters
            are.
          stacks: The stacks that the parameters and states are slices of, or None.

        Returns:
          The parameters after the step by index, and the optimizer's state with
          `MaskedNode` for all other parameters.
        """
        if self.clip is not None:
            grads = {j: self.clip(g) for j, g in grads.items()}
        state = self.params.part_of_state(states)
        arguments = self.params.tree(grads), state, self.params.tree(params)
        if self.is_fused:
            request = FusedRequest(key=self.key, stacks=stacks, is_part=True)
            with masks_explained():
                new, state = requested_update(self.tx, *arguments, request)
        else:
            with masks_explained():
                updates, state = self.tx.update(*arguments)
            new = optax.apply_updates(arguments[2], updates)
        return self.params.leaves_of(new, grads), state


@contextlib.contextmanager
def masks_explained() -> Iterator[None]:
    """Raises ValueError in this context if a mask or label function fails on a part.

    Functions of Flax see `MaskedNode`, while `jax.tree.map` passes over it.
    """
    try:
        yield
    except AttributeError as error:
        if "MaskedNode" not in str(error):
            raise
        raise ValueError(
            "coat.value_and_update steps some parameters at a time, with "
            "optax.MaskedNode in place of the others, and a mask or a label function "
            f"of the optimizer fails on it: {error}. Give a tree in place of the "
            "function, mask=function(params), or let the function use jax.tree.map, "
            "which passes over MaskedNode"
        ) from error


def _owners(
    params: optax.Params, state: optax.OptState
) -> Iterator[tuple[Path, int | None]]:
    """Yields each node's path in a state, and the index of its parameter.

    The index is None for nodes that belong to no parameter.
    """
    params, state = unboxed(params), unboxed(state)
    leaves = by_path(params)
    index = {path: j for j, path in enumerate(leaves)}
    fields = dict(fields_of(state)), dict(fields_of(params))
    for path, node in by_path(state, is_leaf=is_quantized).items():
        owner = owner_of(path, index, *fields)
        is_count = owner is not None and _is_count(node, path, owner, leaves[owner])
        yield path, None if is_count else index.get(owner)


def _is_count(node: Any, path: Path, owner: Path, param: Any) -> bool:
    """Returns whether a node is a count that has the path of a moment.

    Paths do not tell counts from moments if the parameters are a single array, or if
    the state is a container like the parameters' container.
    """
    if is_quantized(node) or owner not in ((), path):
        return False
    is_integer = jnp.issubdtype(jnp.result_type(node), jnp.integer)
    return is_integer or (owner == path and jnp.shape(node) != jnp.shape(param))


def _like(node: Any, arrays: Sequence[Array]) -> Any:
    """Returns a node with the structure of `node` that holds `arrays`."""
    return jax.tree.unflatten(jax.tree.structure(node), arrays)


def as_floats(states: Any) -> Any:
    """Converts the arrays of states to floating dtypes, as cotangents must have.

    Integers are bitcast, and bools are cast.
    """

    def as_float(x):
        if x.dtype == bool:  # A bool cannot be bitcast.
            return x.astype(jnp.float32)
        if jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return as_dtype(x, _FLOATS[x.dtype.itemsize])

    return jax.tree.map(as_float, states)


def _as_dtype(x: Array, dtype: Any) -> Array:
    if jnp.issubdtype(dtype, jnp.bool_):
        return x.astype(bool)
    return as_dtype(x, dtype)


def _listed(dtypes: Sequence[Any]) -> str:
    return ", ".join(map(str, dtypes))
