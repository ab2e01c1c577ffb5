"""Layers that step their parameters in the backward pass, one layer at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.core import meta
from jax import lax

from coat_jax.optimizers.trees import unboxed
from coat_jax.release import taps
from coat_jax.release.members import TappedArrays, in_order
from coat_jax.release.parts import as_floats
from coat_jax.release.scan import Scan, first_layer


def apply_layer[X](fn: Callable[[Any, X], X], x: X, params: Any) -> X:
    """Computes `fn(params, x)`, and steps `params` at once in the backward pass.

    Within the loss of `coat.value_and_update`, the backward pass computes the gradients
    of this layer, steps its parameters, and only then goes on to the layers before it.
    So the gradients of one layer exist at a time. Elsewhere this is `fn(params, x)`.

    Use `coat.scan_layers` for layers of equal shapes that are stacked.

    Args:
      fn: A layer, a function of its parameters and of its input.
      x: The input, a pytree of arrays.
      params: The parameters: a part of the tree that the loss was given, unchanged.
        Other arrays, such as parameters after a cast, have ordinary gradients.

    Raises:
      ValueError: In the backward pass, if a parameter is also read elsewhere.

    Warns:
      UserWarning: If another transformation of JAX within the loss, such as `jax.vmap`
        or `jax.lax.scan`, surrounds the call, or if large arrays are computed from
        parameters, as by a cast. Gradients are ordinary ones then.

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
    owned = TappedArrays.among(release, params)
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
            sums, cotangents = in_order(sums, cotangents)
            return None, None, sums, *cotangents
        # The step waits until all gradients are computed, because these read the
        # parameters. The layers before this one wait for the step.
        grads, cotangents = in_order(grads, cotangents)
        leaves, states = owned.step(grads, leaves, owned.stored(states))
        leaves, cotangents = in_order(leaves, cotangents)
        return leaves, as_floats(states), None, *cotangents

    run.defvjp(fwd, bwd)
    extras = owned.extras(params)
    return run(owned.leaves, owned.states, release.sums, extras, shared, x)


def scan_layers[X](fn: Callable[[Any, X], X], x: X, stacked: Any) -> X:
    """Computes `x = fn(stacked[l], x)` for all l; its backward pass steps the layers.

    Within the loss of `coat.value_and_update`, the backward pass is a loop over layers,
    the last one first. It computes the gradients of one layer, steps the layer's
    parameters in their stacks, in place, and goes on to the layer before it. So the
    gradients of one layer exist at a time. Elsewhere this is `jax.lax.scan`.

    The residuals of a layer are saved as by `jax.lax.scan`. If `fn` is wrapped in
    `coat.fp8_remat` or `jax.checkpoint`, this wrapper decides which arrays are saved.

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
      ValueError: If axes of layers differ in length, or an array of the optimizer's
        state lacks this axis; in the backward pass, if a parameter is also read
        elsewhere.

    Warns:
      UserWarning: If another transformation of JAX within the loss, such as `jax.vmap`
        or `jax.lax.scan`, surrounds the call, or if large arrays are computed from
        parameters, as by a cast. Gradients are ordinary ones then.

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
    owned = TappedArrays.among(release, stacked, axes=2)
    if owned is None or not depth:
        return lax.scan(lambda x, params: (fn(params, x), None), x, stacked)[0]
    owned.check_states(depth)
    layer, shared = _converted(fn, jax.tree.map(first_layer, stacked), x)
    release.stacked.update(owned.indices)
    scan = Scan(release=release, owned=owned, layer=layer, depth=depth)

    @jax.custom_vjp
    def run(leaves, states, sums, extras, shared, x):
        del states, sums

        def body(x, arrays):
            return layer(owned.merged(*arrays), x, shared), None

        return lax.scan(body, x, (leaves, extras))[0]

    run.defvjp(scan.forward, scan.backward)
    extras = owned.extras(stacked)
    return run(owned.leaves, owned.states, release.sums, extras, shared, x)


def _converted(fn: Callable, params: Any, x: Any) -> tuple[Callable, list]:
    """Returns `fn` with its closed-over arrays as an argument, and these arrays."""
    closed, shared = jax.closure_convert(fn, params, x)
    return lambda params, x, shared: closed(params, x, *shared), list(shared)


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
    """Takes arrays out of Linen's boxes, which name axes that a slice lacks."""

    def is_box(x):
        return isinstance(x, meta.AxisMetadata)

    if any(map(is_box, jax.tree.leaves(stacked, is_leaf=is_box))):
        return unboxed(stacked)
    return stacked
