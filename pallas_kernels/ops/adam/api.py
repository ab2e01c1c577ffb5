"""Adam's step on FP8 moments, for arrays of any shape."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.checks import WIDE, check_shape
from pallas_kernels.dispatch import array_types, operations
from pallas_kernels.dispatch.axes import WHOLE, Axes, grouped, tokens
from pallas_kernels.ops.adam import kernel as adam_kernel
from pallas_kernels.ops.adam import reference
from pallas_kernels.ops.adam.kernel import Tuning
from pallas_kernels.ops.adam.reference import GROUP, AdamScalars, Moments
from pallas_kernels.ops.adam.tile import TILE, UNIT, Step, factors, merged
from pallas_kernels.rounding import random_words, row_major

_STORED = {
    "mu": jnp.float8_e4m3fn,
    "mu_scale": jnp.float32,
    "nu": jnp.float8_e4m3fn,
    "nu_scale": jnp.float32,
    "nu_exponent": jnp.uint8,
}
_VECTOR = 8  # Elements of a vector load. Its address must be a multiple of its size.
_ALIGNED = 16  # A layer begins at a multiple of this many exponents, of a byte each.


def adam(
    scalars: AdamScalars,
    grads: Float[Array, "... n"],
    moments: Moments,
    seed: UInt32[Array, ""],
    stream: UInt32[Array, ""],
    params: Float[Array, "... n"] | None = None,
    salt: UInt32[Array, ""] | None = None,
    *,
    strides: tuple[int, ...] | None = None,
    layer: Int[Array, ""] | None = None,
    implementation: operations.Implementation | None = None,
    tuning: Tuning | None = None,
) -> tuple[Float[Array, "... n"], Moments]:
    """Computes Adam's step of one parameter in float32; `AdamScalars` has the formula.

    Args:
      scalars: The factors of the step.
      grads: Gradients, bfloat16 or float32.
      moments: The moments before the step.
      seed: A random number. It must be new in every step, or averages stall: moments
        are rounded with a hash of `seed`, `stream` and the group's position.
      stream: A number that is different for each parameter.
      params: Parameters, bfloat16 or float32; None returns Adam's update instead.
      salt: A number from which the random bits for bfloat16 parameters are made, so
        that these are rounded stochastically. None rounds parameters to nearest.
      strides: The distance between the positions of neighbouring groups along each
        axis, for a part of an array; see `pallas_kernels.rounding.random_words`.
      layer: The index of the layer to step in stacks of layers. `params` and `moments`
        are then stacks [layers, ... n], of which this layer alone is read and written,
        in place under donation or in a loop. Gradients are the layer's, [1, ... n].
        Random bits are as for an array of one layer; `stream` tells layers apart.
      implementation: The implementation; None means the kernel where it can run.
      tuning: Settings of the kernel; None means the default.

    Returns:
      The parameters after the step, or without `params` the update, in the gradients'
      dtype; and the moments after the step. The kernel's updates have a relative error
      of up to 1.3e-4.

    Raises:
      ValueError: If the shapes do not match, or the kernel was named and cannot run.
    """
    _check(grads, moments, params, strides, layer)
    groups = (*grads.shape[:-1], -(-grads.shape[-1] // GROUP))
    strides = strides or row_major(groups)
    # Python numbers, such as a decay of 0, stay constants that the kernel can use.
    known = tuple(s if isinstance(s, int | float) else None for s in scalars)
    traced = [jnp.float32(s) for s, k in zip(scalars, known, strict=True) if k is None]
    places = []
    if array_types.mesh_of((grads, moments, params)) is not None:
        # The position of a group is the sum of its entries in `places`, one per axis.
        # They are split like the groups, so a part's first entries give the position of
        # its first group.
        places = [
            jnp.arange(length, dtype=jnp.uint32) * jnp.uint32(stride & 0xFFFFFFFF)
            for length, stride in zip(groups, strides, strict=True)
        ]
    operation = _Adam(known=known, strides=strides, tuning=tuning or Tuning())
    arrays = moments, grads, params, traced, (seed, stream, salt), places, layer
    return operation(*arrays, implementation=implementation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Adam(operations.Operation):
    """The operation of `adam`. Scalars that are Python numbers are compiled constants.

    Attributes:
      known: The scalars that are Python numbers, with None for each other scalar.
      strides: The distance between the positions of neighbouring groups.
      tuning: Settings of the kernel.
    """

    known: tuple[float | None, ...]
    strides: tuple[int, ...]
    tuning: Tuning
    name = "adam"

    def obstacle(self, moments, grads, params, *others) -> str | None:
        return _obstacle(grads, moments, params)

    def reference(self, moments, grads, params, traced, seeds, places, layer) -> tuple:
        seeds, scalars = self._seeds(seeds, places), self._scalars(traced)

        def step(params, moments):
            groups = moments.mu_scale.shape
            words = random_words(seeds.seed, seeds.stream, groups, seeds.strides)
            return reference.adam(scalars, grads, moments, words, params, seeds.salt)

        return _on_layer(step, params, moments, layer)

    def axes(self, moments, grads, params, traced, seeds, places, layer) -> tuple:
        elements, groups = grouped(grads.ndim - 1, grads.shape[-1], GROUP)
        if layer is not None:  # Stacks and gradients differ in their first axes.
            first = tokens(1)
            elements, groups = (
                dataclasses.replace(axes, names=axes.names.replace(first, "_", 1))
                for axes in (elements, groups)
            )
        split = Moments(elements, groups, elements, groups, groups)
        places = [Axes(*names) for names in groups.merged]
        operands = split, elements, elements, WHOLE, WHOLE, places, WHOLE
        return operands, (elements, split)

    def kernel(self, moments, grads, params, traced, seeds, places, layer) -> tuple:
        seeds, scalars = self._seeds(seeds, places), self._scalars(traced)
        if layer is not None and _reads_stacks(grads, params):
            arrays = scalars, grads, moments, params, seeds, self.tuning
            return _whole_groups(*arrays, view=(-1, GROUP), layer=layer)

        def step(params, moments):
            return _mosaic(scalars, grads, moments, params, seeds, self.tuning)

        return _on_layer(step, params, moments, layer)

    def _scalars(self, traced: list[Array]) -> AdamScalars:
        rest = iter(traced)
        return AdamScalars(*(next(rest) if s is None else s for s in self.known))

    def _seeds(self, seeds: tuple, places: list[Array]) -> "_Seeds":
        seed, stream, salt = seeds
        # Only `seed + stream` counts. Every parameter has another stream, but all
        # parameters of one shape have the same seed here, which XLA computes once.
        first = sum(place[0] for place in places)
        return _Seeds(seed + first, stream, salt, self.strides)


class _Seeds(NamedTuple):
    """The seed, stream, salt and strides of random bits; see `adam`."""

    seed: Array
    stream: Array
    salt: Array | None
    strides: tuple[int, ...]

    def of_last_group(self, count: int) -> "_Seeds":
        """Returns the seeds for arrays that begin at the last of `count` groups."""
        first = jnp.uint32((count - 1) * self.strides[-1] & 0xFFFFFFFF)
        return self._replace(stream=self.stream + first)


def _reads_stacks(grads: Array, params: Array | None) -> bool:
    """Returns whether the kernel can read and write a layer within stacks of layers.

    The copy engine needs addresses that are multiples of 16 bytes, also for exponents.
    """
    if params is None:
        return False
    return grads.shape[-1] % GROUP == 0 and grads.size // GROUP % _ALIGNED == 0


def _on_layer(step: Callable, params: Array | None, moments: Moments, layer) -> tuple:
    """Computes `step(params, moments)`, of one layer if `layer` is its index.

    With `layer` the arrays are stacks with a leading axis of layers: the layer is
    sliced from them, and its results are written back into them.
    """
    if layer is None:
        return step(params, moments)
    stacks = params, moments
    at = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, layer, 1), stacks)
    result, after = step(*at)

    def put(stack, part):
        return lax.dynamic_update_slice_in_dim(stack, part, layer, axis=0)

    result = result if params is None else put(params, result)
    return result, jax.tree.map(put, moments, after)


def _check(grads, moments, params, strides, layer) -> None:
    if not grads.ndim:
        raise ValueError("gradients need an axis, got a scalar")
    shape = grads.shape
    if layer is not None:
        if grads.ndim < 2 or shape[0] != 1:
            raise ValueError(
                f"gradients of a layer must have the shape [1, ..., n], got {shape}"
            )
        shape = (*moments.mu.shape[:1], *shape[1:])
    groups = (*shape[:-1], -(-shape[-1] // GROUP))
    of_elements = {"params": params, "mu": moments.mu, "nu": moments.nu}
    of_groups = {f: getattr(moments, f) for f in _STORED if f not in of_elements}
    for name, x in of_elements.items():
        check_shape(name, x, shape)
    for name, x in of_groups.items():
        check_shape(name, x, groups)
    if strides is not None and len(strides) != grads.ndim:
        raise ValueError(f"strides must be {grads.ndim}, one an axis, got {strides}")


def _obstacle(grads: Array, moments: Moments, params: Array | None) -> str | None:
    """Returns the reason why the kernel cannot run, or None."""
    for name, x in (("gradients", grads), ("parameters", params)):
        if x is not None and x.dtype not in WIDE:
            return f"{name} must be bfloat16 or float32, got {x.dtype}"
    for name, dtype in _STORED.items():
        if (x := getattr(moments, name)).dtype != dtype:
            return f"{name} must be {jnp.dtype(dtype)}, got {x.dtype}"
    if grads.size < TILE * GROUP:
        return f"it takes {TILE * GROUP} elements or more, got {grads.size}"
    return None


def _is_zero(x: Array | float) -> bool:
    return isinstance(x, int | float) and x == 0


def _mosaic(scalars, grads, moments, params, seeds, tuning):
    n = grads.shape[-1]
    rows, whole = grads.size // n, n // GROUP * GROUP
    # If rows end with a short group, the kernel first takes all whole groups.
    if n > whole and whole and n % _VECTOR == 0 and rows >= TILE:
        arguments = scalars, grads, moments, params, seeds, tuning
        result, moments = _whole_groups(*arguments, view=(rows, n))
        # The step is in place: `result` has the old parameters of the last groups.
        params = None if params is None else result
        arguments = scalars, grads, moments, params, seeds, tuning
        return _with_last_group(*arguments, result=result)
    # Otherwise the last axis is padded.
    short = -n % (GROUP if whole else UNIT)
    if short:

        def padded(x):
            return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, short)])

        moments = moments._replace(mu=padded(moments.mu), nu=padded(moments.nu))
        params = None if params is None else padded(params)
        grads = padded(grads)
    arguments = scalars, grads, moments, params, seeds, tuning
    result, moments = _whole_groups(*arguments, view=(-1, min(n + short, GROUP)))
    moments = moments._replace(mu=moments.mu[..., :n], nu=moments.nu[..., :n])
    return result[..., :n], moments


def _whole_groups(scalars, grads, moments, params, seeds, tuning, view, layer=None):
    """Computes the step of all complete groups, on arrays reshaped to `view`.

    Args:
      scalars: The factors of the step.
      grads: The gradients.
      moments: The moments.
      params: The parameters, or None.
      seeds: The `_Seeds` of random bits.
      tuning: Settings of the kernel.
      view: The shape: [groups, width], or rows [rows, n] of several groups.
      layer: The index of the layer, if parameters and moments are stacks of layers.

    Returns:
      The parameters or the update, and the moments. In rows [rows, n] a short last
      group is left unchanged.
    """
    groups, strides = moments.mu_scale.shape, seeds.strides
    groups, per_group = (*grads.shape[:1], *groups[1:]), (-1,)
    if view[1] > GROUP:
        per_group, groups, strides = (view[0], -1), groups[:-1], strides[:-1]
    step = Step(
        nesterov=not _is_zero(scalars.grad_weight),
        eps_root=not _is_zero(scalars.eps_root),
        with_params=params is not None,
        stochastic=seeds.salt is not None and params.dtype == jnp.bfloat16,
        rows=merged(groups, strides),
        column=seeds.strides[-1],
    )
    state = adam_kernel.run(
        step,
        None if params is None else params.reshape(view),
        Moments(
            mu=moments.mu.reshape(view),
            mu_scale=moments.mu_scale.reshape(per_group),
            nu=moments.nu.reshape(view),
            nu_scale=moments.nu_scale.reshape(per_group),
            nu_exponent=moments.nu_exponent.reshape(per_group),
        ),
        grads.reshape(view),
        (seeds.seed, seeds.stream, seeds.salt if step.stochastic else None),
        None if layer is None else layer.astype(jnp.int32) * (grads.size // GROUP),
        factors(scalars, step.with_params),
        tuning,
    )
    after = {
        f: getattr(state, f).reshape(x.shape) for f, x in moments._asdict().items()
    }
    like = grads if params is None else params
    return state.result.reshape(like.shape), Moments(**after)


def _with_last_group(scalars, grads, moments, params, seeds, tuning, result):
    """Computes the step of the short last group of each row, after all others.

    Args:
      scalars: The factors of the step.
      grads: The gradients.
      moments: The moments, after the step of all complete groups.
      params: The parameters, or None.
      seeds: The `_Seeds` of random bits.
      tuning: Settings of the kernel.
      result: The parameters or the update, after the step of all complete groups.

    Returns:
      `result` and `moments` with the last groups' step.
    """
    start = grads.shape[-1] // GROUP * GROUP
    starts = Moments(start, start // GROUP, start, start // GROUP, start // GROUP)
    last = Moments(*(x[..., j:] for x, j in zip(moments, starts, strict=True)))
    last_result, last = _mosaic(
        scalars,
        grads[..., start:],
        last,
        None if params is None else params[..., start:],
        seeds.of_last_group(moments.mu_scale.shape[-1]),
        tuning,
    )
    put = lax.dynamic_update_slice_in_dim
    moments = [put(*x, axis=-1) for x in zip(moments, last, starts, strict=True)]
    return put(result, last_result, start, axis=-1), Moments(*moments)
