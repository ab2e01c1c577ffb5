"""A scan over layers with a backward pass that steps each layer in its stacks."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from coat_jax.optimizers.noise import layer_of_stacks
from coat_jax.optimizers.step import Stacks
from coat_jax.release.members import TappedArrays, in_order, is_real
from coat_jax.release.parts import as_floats
from coat_jax.release.taps import Release, trace_of


@dataclasses.dataclass(frozen=True)
class SavedArrays:
    """The origins of a layer's residuals.

    A vjp function is a pytree of residuals. Residuals that are the layer's parameters
    are read from the stacks again, and residuals that are the same for all layers are
    saved once. All other residuals are saved for each layer.

    Attributes:
      treedef: The structure of the vjp function.
      of: The kind of each residual and its index among the arrays of this kind.
    """

    treedef: Any
    of: Sequence[tuple[str, int]]

    @classmethod
    def among(
        cls, vjp: Any, params: Any, carry: Any
    ) -> "tuple[SavedArrays, list[Array], list[Array]]":
        """Sorts the residuals of a layer.

        Args:
          vjp: The vjp function of the layer.
          params: The layer's parameters and other arrays.
          carry: The layer's input, which differs between layers.

        Returns:
          The origins, the residuals to save for each layer, and the residuals that are
          the same for all layers.
        """
        arrays, treedef = jax.tree.flatten(vjp)
        index_of = {id(x): k for k, x in enumerate(jax.tree.leaves(params))}
        trace = next((t for t in map(trace_of, jax.tree.leaves(carry)) if t), None)
        origins: list[tuple[str, int]] = []
        by_layer: list[Array] = []
        constants: list[Array] = []
        for x in arrays:
            if id(x) in index_of:
                origins.append(("params", index_of[id(x)]))
                continue
            varies = trace_of(x) is trace
            kind, saved = ("by_layer", by_layer) if varies else ("constants", constants)
            same = next((k for k, y in enumerate(saved) if y is x), None)
            origins.append((kind, len(saved) if same is None else same))
            if same is None:
                saved.append(x)
        return cls(treedef, origins), by_layer, constants

    def vjp(self, params: Any, by_layer: Sequence[Array], constants: Sequence) -> Any:
        """Returns the vjp function of a layer, assembled from its residuals.

        Args:
          params: The layer's parameters and other arrays.
          by_layer: The layer's slices of the residuals that are saved for each layer.
          constants: The residuals that are the same for all layers.
        """
        arrays = {
            "params": jax.tree.leaves(params),
            "by_layer": by_layer,
            "constants": constants,
        }
        return self.treedef.unflatten([arrays[kind][k] for kind, k in self.of])


@dataclasses.dataclass(kw_only=True)
class Scan:
    """The forward and the backward pass of `scan_layers`.

    Attributes:
      release: The step that is being traced.
      owned: The parameters among the stacks.
      layer: The layer, a function of its arrays, its input and the shared arrays.
      depth: The number of layers.
      saved: The origins of a layer's residuals; None until the forward pass is traced.
    """

    release: Release
    owned: TappedArrays
    layer: Callable
    depth: int
    saved: SavedArrays | None = None

    def forward(self, leaves, states, sums, extras, shared, x):
        """Returns the last layer's output, and the residuals."""
        del sums
        constants: list[Array] = []

        def body(x, arrays):
            def plain(leaves, extras, shared, x):
                return self.layer(self.owned.merged(leaves, extras), x, shared)

            y, vjp = jax.vjp(plain, *arrays, shared, x)
            self.saved, by_layer, constants[:] = SavedArrays.among(vjp, arrays, x)
            return y, by_layer

        y, by_layer = lax.scan(body, x, (leaves, extras))
        return y, (leaves, states, extras, shared, by_layer, constants)

    def backward(self, residuals, dy):
        """Runs the layers backward; returns a cotangent for each argument of `forward`.

        In place of the cotangents of parameters and states it returns the stacks after
        the step. In the mode "norm" it returns None there, and the sums of squared
        gradients as the cotangent of `sums`.
        """
        leaves, states, extras, shared, by_layer, constants = residuals
        self.release.claim(self.owned.indices, "a coat.scan_layers")
        norm = self.release.mode == "norm"
        states = self.owned.stored(states)

        def body(carry, layer):
            stepped, sums, dshared, dy = carry
            index, other, saved = layer
            stacks = (leaves, states) if norm else stepped
            slices = jax.tree.map(
                lambda x: lax.dynamic_slice_in_dim(x, index, 1), stacks
            )
            params = jax.tree.map(first_layer, slices[0])
            vjp = self.saved.vjp((params, other), saved, constants)
            grads, dother, dshare, dx = vjp(dy)
            # The step changes parameters in place, so it waits for their readers.
            grads, (dother, dshare, dx) = in_order(grads, (dother, dshare, dx))
            dshared = jax.tree.map(jnp.add, dshared, _differentiable(dshare))
            if norm:
                sums = sums + self.release.squares(self.owned.indices, grads)
            else:
                stepped = self._stepped(index, grads, slices, stacks)
            return (stepped, sums, dshared, dx), _differentiable(dother)

        stepped = () if norm else (leaves, states)
        carry = (stepped, self.release.no_squares(), _zeros(shared), dy)
        layers = jnp.arange(self.depth), extras, by_layer
        carry, dothers = lax.scan(body, carry, layers, reverse=True)
        stepped, sums, dshared, dx = carry
        dothers, dshared = _filled(dothers, extras), _filled(dshared, shared)
        if norm:
            return None, None, sums, dothers, dshared, dx
        return stepped[0], as_floats(stepped[1]), None, dothers, dshared, dx

    def _stepped(self, index: Int[Array, ""], grads, slices, stacks) -> tuple:
        """Returns the stacks of parameters and states after the step of a layer.

        Args:
          index: The index of the layer.
          grads: The gradients of the layer's parameters.
          slices: The layer's parameters and states, as slices [1, ...] of the stacks.
          stacks: The stacks of parameters and states.
        """
        grads = jax.tree.map(lambda g: g[None], grads)
        with layer_of_stacks(index):
            layer = Stacks(index, slices, stacks)
            after = self.owned.step(grads, *slices, stacks=layer)

        def put(stack, array):
            # A kernel that reads and writes stacks returns a whole stack.
            if array.shape == stack.shape and self.depth > 1:
                return array
            return lax.dynamic_update_slice_in_dim(stack, array, index, 0)

        return jax.tree.map(put, stacks, after)


def _zeros(arrays: Sequence[Any]) -> list:
    """Returns a zero cotangent for each of the arrays that are floating."""
    floating = (x for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact))
    return list(map(jnp.zeros_like, floating))


def _differentiable(cotangents: Sequence[Any]) -> list:
    """Returns the cotangents of floating arrays alone."""
    return [x for x in cotangents if is_real(x)]


def _filled(cotangents: Sequence[Any], arrays: Sequence[Any]) -> list:
    """Returns a cotangent for each of `arrays`; None if the array is not floating."""
    real: Iterator = iter(cotangents)
    inexact = (jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays)
    return [next(real) if is_inexact else None for is_inexact in inexact]


def first_layer(x: Any) -> Any:
    """Returns the first layer of a stack."""
    return x[0]
