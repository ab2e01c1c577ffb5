"""The parameters among a layer's arrays."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from coat_jax.release import taps
from coat_jax.release.taps import Release


@dataclasses.dataclass(frozen=True, kw_only=True)
class TappedArrays:
    """The parameters among the arrays of a layer or of a stack of layers.

    An array is recognized as a parameter if it is the result of a tap; see
    `coat_jax.release.taps`.

    Attributes:
      release: The step of `coat.value_and_update` that is being traced.
      treedef: The structure of the tree of all arrays.
      of: The index of each array among all parameters, or None for arrays that
        are not parameters, or have too few axes.
    """

    release: Release
    treedef: Any
    of: Sequence[int | None]

    @classmethod
    def among(
        cls, release: Release | None, tree: Any, axes: int = 0
    ) -> "TappedArrays | None":
        """Finds the parameters in a tree that have at least `axes` axes.

        It returns None if there are no such parameters, if `release` is None, or, with
        a warning, within another transformation of JAX. It also warns of large arrays
        that the loss computes from parameters.
        """
        if release is None:
            return None
        arrays, treedef = jax.tree.flatten(tree)
        indices = release.indices(arrays)
        if computed := _computed(release, arrays, indices):
            release.warn(
                taps.COMPUTED.format(", ".join(str(jax.typeof(x)) for x in computed))
            )
        of = [
            j if jnp.ndim(x) >= axes else None
            for j, x in zip(indices, arrays, strict=True)
        ]
        if all(j is None for j in of):
            return None
        if not release.is_traced_here():
            release.warn(taps.WITHIN)
            return None
        return cls(release=release, treedef=treedef, of=of)

    @property
    def indices(self) -> list[int]:
        """The indices of the parameters."""
        return [j for j in self.of if j is not None]

    @property
    def leaves(self) -> list[Array]:
        """The parameters, as arguments of the differentiated loss."""
        return [self.release.leaves[j] for j in self.indices]

    @property
    def states(self) -> list:
        """The parameters' states, as `as_floats` returns them."""
        return [self.release.states[j] for j in self.indices]

    def extras(self, tree: Any) -> list[Any]:
        """Returns the arrays of the tree that are not these parameters."""
        pairs = zip(jax.tree.leaves(tree), self.of, strict=True)
        return [x for x, j in pairs if j is None]

    def stored(self, floats: Sequence) -> list:
        """Returns the parameters' states in their own dtypes; inverts `as_floats`."""
        pairs = zip(self.indices, floats, strict=True)
        return [self.release.params.stored(j, state) for j, state in pairs]

    def merged(self, leaves: Sequence[Any], extras: Sequence[Any]) -> Any:
        """Returns the tree with these parameters and other arrays as its leaves."""
        leaves, extras = iter(leaves), iter(extras)
        arrays = [next(extras if j is None else leaves) for j in self.of]
        return self.treedef.unflatten(arrays)

    def step(self, grads: Any, leaves: Any, states: Any, **options: Any) -> tuple:
        """Steps the parameters; returns lists of new parameters and of new states."""
        columns = (
            dict(zip(self.indices, x, strict=True)) for x in (grads, leaves, states)
        )
        leaves, states = self.release.step(*columns, **options)
        return [leaves[j] for j in self.indices], [states[j] for j in self.indices]

    def check_states(self, depth: int) -> None:
        """Raises ValueError unless each array of the states has an axis of layers."""
        for j, state in zip(self.indices, self.states, strict=True):
            for array in jax.tree.leaves(state):
                if array.shape[:1] != (depth,):
                    raise ValueError(
                        f"the state of {self.release.params.names[j]} has an array of "
                        f"shape {array.shape}, which has no axis of the {depth} layers"
                    )


def is_large(x: Any) -> bool:
    """Returns whether an array is so large that its gradient is worth a warning."""
    return jnp.size(x) * jnp.result_type(x).itemsize > 2**20


def _computed(
    release: Release, arrays: Sequence[Any], indices: Sequence[int | None]
) -> list[Any]:
    """Returns the large arrays that the loss computes from parameters.

    Next to large parameters, arrays of other shapes count as activations.
    """
    large = [(x, j) for x, j in zip(arrays, indices, strict=True) if is_large(x)]
    computed = [x for x, j in large if j is None and release.differentiates(x)]
    if all(j is None for _, j in large):
        return computed
    shapes = {jnp.shape(leaf) for leaf in release.leaves}
    return [x for x in computed if jnp.shape(x) in shapes]


def in_order(first: Any, then: Any) -> tuple[Any, Any]:
    """Passes two trees through one barrier: each waits until both are computed.

    So XLA computes `first` before any operation that reads the `then` returned here.
    """
    arrays, treedef = jax.tree.flatten((first, then))
    real = [j for j, x in enumerate(arrays) if is_real(x)]
    ordered = lax.optimization_barrier([arrays[j] for j in real])
    for j, x in zip(real, ordered, strict=True):
        arrays[j] = x
    return treedef.unflatten(arrays)


def is_real(x: Any) -> bool:
    """Returns whether a cotangent holds numbers; cotangents of integers are float0."""
    return getattr(x, "dtype", None) != jax.dtypes.float0
