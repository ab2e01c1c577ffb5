"""Layers with steps of their parameters in the backward pass, layer by layer."""

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.core import meta
from jax import lax
from jaxtyping import Array, Int

from coat_jax.optimizers.noise import layer_of_stacks
from coat_jax.optimizers.step import Stacks
from coat_jax.optimizers.trees import unboxed
from coat_jax.release import taps
from coat_jax.release.parts import as_floats
from coat_jax.release.taps import Release


def apply_layer[X](fn: Callable[[Any, X], X], x: X, params: Any) -> X:
    """Computes `fn(params, x)`, and steps `params` at once in the backward pass.

    Within the loss of `coat.value_and_update`, backward computes the gradients of this
    layer, steps its parameters, and only then goes on to the layers before it. So the
    gradients of one layer exist at a time. Elsewhere this is `fn(params, x)`.

    Layers of equal shapes that are stacked belong into `coat.scan_layers`.

    Args:
      fn: A layer, a function of its parameters and of its input.
      x: The input, a pytree of arrays.
      params: The parameters: a part of the tree that the loss was given, unchanged.
        Others, such as parameters that were cast before, have ordinary gradients.

    Raises:
      ValueError: In the backward pass, if a parameter is also read elsewhere.

    Warns:
      UserWarning: If another transformation of JAX within the loss, such as `jax.vmap`
        or `jax.lax.scan`, surrounds the call. Gradients are ordinary ones then.

    Examples:
      >>> import coat_jax as coat, jax, jax.numpy as jnp
      >>> params = [{"w": jnp.ones((8, 8))} for _ in range(3)]
      >>> def loss(params, x):
      ...     for layer in params:
      ...         x = coat.apply_layer(lambda p, x: jnp.tanh(x @ p["w"]), x, layer)
      ...     return jnp.mean(x**2)
      >>> tx = coat.fp8_adamw(1e-3)
      >>> step = jax.jit(coat.value_and_update(loss, tx))
      >>> value, params, state = step(params, tx.init(params), jnp.ones((4, 8)))
    """
    release = taps.active.get()
    owned = _Own.among(release, params)
    if owned is None:
        return fn(params, x)
    layer, shared = _converted(fn, params, x)

    @jax.custom_vjp
    def run(leaves, states, sums, extras, shared, x):
        del states, sums
        return layer(owned.merged(leaves, extras), x, shared)

    def fwd(leaves, states, sums, extras, shared, x):
        del sums

        def plain(leaves, extras, shared, x):
            return layer(owned.merged(leaves, extras), x, shared)

        y, vjp = jax.vjp(plain, leaves, extras, shared, x)
        return y, (leaves, states, vjp)

    def bwd(saved, dy):
        leaves, states, vjp = saved
        grads, *cotangents = vjp(dy)
        release.claim(owned.indices, "a coat.apply_layer")
        if release.mode == "norm":
            sums = release.squares(owned.indices, grads)
            sums, cotangents = _in_order(sums, cotangents)
            return None, None, sums, *cotangents
        # Layers before this one wait for the step. So do reads of the parameters.
        grads, cotangents = _in_order(grads, cotangents)
        leaves, states = owned.step(grads, leaves, owned.stored(states))
        leaves, cotangents = _in_order(leaves, cotangents)
        return leaves, as_floats(states), None, *cotangents

    run.defvjp(fwd, bwd)
    return run(owned.leaves, owned.states, release.sums, owned.extras, shared, x)


def scan_layers[X](fn: Callable[[Any, X], X], x: X, stacked: Any) -> X:
    """Computes `x = fn(stacked[l], x)` for all l; its backward pass steps the layers.

    Within the loss of `coat.value_and_update`, the backward pass is a loop over layers,
    the last one first. It computes the gradients of one layer, steps the layer's
    parameters in their stacks, in place, and goes on to the layer before it. So the
    gradients of one layer exist at a time. Elsewhere this is `jax.lax.scan`.

    What backward needs of a layer is saved as by `jax.lax.scan`, according to what `fn`
    saves: with `coat.fp8_remat` or `jax.checkpoint` around `fn`, what these save.

    Args:
      fn: A layer, a function of its parameters and of its input. It may close over
        other arrays.
      x: The input of the first layer, a pytree of arrays. Sums over layers, such as a
        load of experts, can be part of it.
      stacked: Parameters with a leading axis of layers: a part of the tree that the
        loss was given, unchanged. Other arrays with an axis of layers, such as keys of
        dropout, may be part of it and have ordinary gradients.

    Returns:
      The last layer's output, like `x`.

    Raises:
      ValueError: If axes of layers differ in length, or a moment has none; in the
        backward pass, if a parameter is also read elsewhere.

    Warns:
      UserWarning: If another transformation of JAX within the loss, such as `jax.vmap`
        or `jax.lax.scan`, surrounds the call. Gradients are ordinary ones then.

    Examples:
      >>> import coat_jax as coat, jax, jax.numpy as jnp
      >>> params = {"layers": {"w": jnp.ones((3, 8, 8))}}
      >>> def loss(params, x):
      ...     layer = lambda p, x: jnp.tanh(x @ p["w"])
      ...     return jnp.mean(coat.scan_layers(layer, x, params["layers"]) ** 2)
      >>> tx = coat.fp8_adamw(1e-3)
      >>> step = jax.jit(coat.value_and_update(loss, tx))
      >>> value, params, state = step(params, tx.init(params), jnp.ones((4, 8)))
    """
    stacked = _without_partitions(stacked)
    depth = _depth(stacked)
    release = taps.active.get()
    owned = _Own.among(release, stacked, axes=2)
    if owned is None:
        return lax.scan(lambda x, params: (fn(params, x), None), x, stacked)[0]
    owned.check_states(depth)
    layer, shared = _converted(fn, jax.tree.map(_first, stacked), x)
    release.stacked.update(owned.indices)
    scan = _Scan(release=release, owned=owned, layer=layer, depth=depth)

    @jax.custom_vjp
    def run(leaves, states, sums, extras, shared, x):
        del states, sums

        def body(x, arrays):
            return layer(owned.merged(*arrays), x, shared), None

        return lax.scan(body, x, (leaves, extras))[0]

    run.defvjp(scan.forward, scan.backward)
    return run(owned.leaves, owned.states, release.sums, owned.extras, shared, x)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Own:
    """The parameters among the arrays of a layer or of a stack of layers.

    Attributes:
      release: The step that is traced.
      treedef: The tree of all arrays.
      of: The index of the parameter that each array is, or None.
      extras: The arrays that are no parameters.
    """

    release: Release
    treedef: Any
    of: Sequence[int | None]
    extras: Sequence[Any]

    @classmethod
    def among(cls, release: Release | None, tree: Any, axes: int = 0) -> "_Own | None":
        """Finds parameters of `axes` axes or more in a tree; None if there are none."""
        if release is None:
            return None
        arrays, treedef = jax.tree.flatten(tree)
        indices = release.indices(arrays)
        of = [
            j if jnp.ndim(x) >= axes else None
            for j, x in zip(indices, arrays, strict=True)
        ]
        if all(j is None for j in of):
            return None
        if not release.is_traced_here():
            warnings.warn(taps.WITHIN, stacklevel=3)
            return None
        extras = [x for x, j in zip(arrays, of, strict=True) if j is None]
        return cls(release=release, treedef=treedef, of=of, extras=extras)

    @property
    def indices(self) -> list[int]:
        return [j for j in self.of if j is not None]

    @property
    def leaves(self) -> list[Array]:
        return [self.release.leaves[j] for j in self.indices]

    @property
    def states(self) -> list:
        return [self.release.states[j] for j in self.indices]

    def stored(self, floats: Sequence) -> list:
        """Returns states in their own dtypes."""
        pairs = zip(self.indices, floats, strict=True)
        return [self.release.params.stored(j, state) for j, state in pairs]

    def merged(self, leaves: Sequence[Any], extras: Sequence[Any]) -> Any:
        """Returns the tree of parameters and other arrays."""
        leaves, extras = iter(leaves), iter(extras)
        arrays = [next(extras if j is None else leaves) for j in self.of]
        return self.treedef.unflatten(arrays)

    def step(self, grads: Any, leaves: Any, states: Any, **options: Any) -> tuple:
        """Steps the parameters; returns lists of them and of their states."""
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


class _Saved:
    """The arrays that the backward pass of a layer needs, by where they come from.

    A vjp is a pytree. Its arrays that are the layer's parameters are read from the
    stacks again, and those that are the same for all layers are passed once. The others
    are saved for each layer.
    """

    def __init__(self, vjp: Any, params: Any, carry: Any):
        arrays, self._vjp = jax.tree.flatten(vjp)
        index_of = {id(x): k for k, x in enumerate(jax.tree.leaves(params))}
        trace = next((t for t in map(_trace, jax.tree.leaves(carry)) if t), None)
        self._of: list[tuple[str, int]] = []
        self.by_layer: list[Array] = []
        self.constants: list[Array] = []
        for x in arrays:
            if id(x) in index_of:
                self._of.append(("params", index_of[id(x)]))
                continue
            varies = _trace(x) is trace
            kind, saved = (
                ("by_layer", self.by_layer) if varies else ("constants", self.constants)
            )
            same = next((k for k, y in enumerate(saved) if y is x), None)
            self._of.append((kind, len(saved) if same is None else same))
            if same is None:
                saved.append(x)

    def vjp(self, params: Any, by_layer: Sequence[Array], constants: Sequence) -> Any:
        """Returns the vjp of a layer."""
        arrays = {
            "params": jax.tree.leaves(params),
            "by_layer": by_layer,
            "constants": constants,
        }
        return jax.tree.unflatten(self._vjp, [arrays[kind][k] for kind, k in self._of])


@dataclasses.dataclass(kw_only=True)
class _Scan:
    """The passes of `scan_layers`.

    Attributes:
      release: The step that is traced.
      owned: The parameters among the stacks.
      layer: The layer, a function of its arrays, its input and the shared arrays.
      depth: The number of layers.
      saved: What backward needs of a layer, once the forward pass is traced.
    """

    release: Release
    owned: _Own
    layer: Callable
    depth: int
    saved: _Saved | None = None

    def forward(self, leaves, states, sums, extras, shared, x):
        del sums

        def body(x, arrays):
            def plain(leaves, extras, shared, x):
                return self.layer(self.owned.merged(leaves, extras), x, shared)

            y, vjp = jax.vjp(plain, *arrays, shared, x)
            self.saved = _Saved(vjp, arrays, x)
            return y, self.saved.by_layer

        y, by_layer = lax.scan(body, x, (leaves, extras))
        return y, (leaves, states, extras, shared, by_layer, self.saved.constants)

    def backward(self, residuals, dy):
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
            params = jax.tree.map(_first, slices[0])
            vjp = self.saved.vjp((params, other), saved, constants)
            grads, dother, dshare, dx = vjp(dy)
            # Parameters change in place after everything that reads them.
            grads, (dother, dshare, dx) = _in_order(grads, (dother, dshare, dx))
            dshared = jax.tree.map(jnp.add, dshared, _differentiable(dshare))
            if norm:
                sums = sums + self.release.squares(self.owned.indices, grads)
            else:
                stepped = self._stepped(index, grads, slices, stacks)
            return (stepped, sums, dshared, dx), _differentiable(dother)

        stepped = () if norm else (leaves, states)
        carry = (stepped, jnp.zeros(len(self.release.leaves)), _zeros(shared), dy)
        layers = jnp.arange(self.depth), extras, by_layer
        carry, dothers = lax.scan(body, carry, layers, reverse=True)
        stepped, sums, dshared, dx = carry
        dothers, dshared = _filled(dothers, extras), _filled(dshared, shared)
        if norm:
            return None, None, sums, dothers, dshared, dx
        return stepped[0], as_floats(stepped[1]), None, dothers, dshared, dx

    def _stepped(self, index: Int[Array, ""], grads, slices, stacks) -> tuple:
        """Returns the stacks of parameters and states after the step of a layer."""
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


def _converted(fn: Callable, params: Any, x: Any) -> tuple[Callable, list]:
    """Returns `fn` with what it closes over as its third argument, and these arrays."""
    closed, shared = jax.closure_convert(fn, params, x)
    return lambda params, x, shared: closed(params, x, *shared), list(shared)


def _in_order(first: Any, then: Any) -> tuple[Any, Any]:
    """Makes what reads either of two trees wait for both of them."""
    arrays, treedef = jax.tree.flatten((first, then))
    real = [j for j, x in enumerate(arrays) if _is_real(x)]
    ordered = lax.optimization_barrier([arrays[j] for j in real])
    for j, x in zip(real, ordered, strict=True):
        arrays[j] = x
    return treedef.unflatten(arrays)


def _is_real(x: Any) -> bool:
    return getattr(x, "dtype", None) != jax.dtypes.float0


def _zeros(arrays: Sequence[Any]) -> list:
    """Returns zeros for the cotangents of floating arrays."""
    floating = (x for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact))
    return list(map(jnp.zeros_like, floating))


def _differentiable(cotangents: Sequence[Any]) -> list:
    """Returns the cotangents of floating arrays alone."""
    return [x for x in cotangents if _is_real(x)]


def _filled(cotangents: Sequence[Any], arrays: Sequence[Any]) -> list:
    """Returns a cotangent for each array, None for those that are not floating."""
    real: Iterator = iter(cotangents)
    inexact = (jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays)
    return [next(real) if is_inexact else None for is_inexact in inexact]


def _first(x: Any) -> Any:
    return x[0]


def _trace(x: Any) -> Any:
    return getattr(x, "_trace", None)


def _depth(stacked: Any) -> int:
    """Returns the number of layers of a stack.

    Raises:
      ValueError: If there is no array, or axes of layers differ.
    """
    shapes = [jnp.shape(x) for x in jax.tree.leaves(stacked)]
    depths = {shape[:1] for shape in shapes}
    if len(depths) != 1 or depths == {()}:
        raise ValueError(
            "stacked must have arrays with one leading axis of layers, got the shapes "
            f"{sorted(set(shapes))}"
        )
    [(depth,)] = depths
    return depth


def _without_partitions(stacked: Any) -> Any:
    """Takes arrays out of Linen's boxes: a slice has not the axes that a box names."""

    def is_box(x):
        return isinstance(x, meta.AxisMetadata)

    if any(map(is_box, jax.tree.leaves(stacked, is_leaf=is_box))):
        return unboxed(stacked)
    return stacked
