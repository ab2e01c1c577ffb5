"""Checks that the step of each parameter reads no other parameter's arrays."""

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from coat_jax.optimizers.fused import NotFusedError, fused_update
from coat_jax.optimizers.places import fields_of
from coat_jax.programs.graph import dependences, written_out
from coat_jax.programs.primitives import all_eqns, bodies_of, is_elementwise, is_layout
from coat_jax.release.members import is_large
from coat_jax.release.parts import Optimizer, Parameters, masks_explained
from pallas_kernels import versions
from pallas_kernels.dispatch import operations, stand_ins

_Indices = frozenset[int]
_NONE: _Indices = frozenset()


def check_axes() -> None:
    """Raises ValueError if JAX does not sum gradients over a mesh axis in context.

    JAX sums the gradients of a replicated parameter over mesh axes by itself only where
    it records the axes over which each array varies.
    """
    for axis in jax.sharding.get_abstract_mesh().manual_axes:
        if axis not in versions.varying_axes(lax.axis_index(axis)):
            raise ValueError(
                f"within jax.pmap or jax.shard_map(check_vma=False) over {axis!r} "
                "coat.value_and_update would step each device's parameters by the "
                "gradient of this device alone. Use jax.shard_map with check_vma=True, "
                "or jax.jit with shardings"
            )


def is_fused(
    tx: optax.GradientTransformation, whole: Parameters, state: optax.OptState
) -> bool:
    """Returns whether `coat.fused_update` can compute a step of `tx`.

    Raises:
      ValueError: If the step of a parameter, or a state, depends on the gradient, the
        values or the state of another parameter, or on random numbers; or if `tx`
        contains `optax.MultiSteps`, or needs further arguments, such as the loss.
    """
    if any(kind == "MultiStepsState" for _, kind in fields_of((state,))):
        raise ValueError(
            "optax.MultiSteps keeps the sum of all gradients, which takes the memory "
            "that coat.value_and_update saves. Use a larger batch in its place, or "
            "jax.value_and_grad"
        )

    try:
        _check_own_gradients(partial(fused_update, tx), whole, state)
        return True
    except NotFusedError:
        _check_own_gradients(tx.update, whole, state)
        return False


def _check_own_gradients(update: Callable, whole: Parameters, state: Any) -> None:
    """Raises ValueError if the step of a parameter reads another parameter's arrays.

    It follows gradients, parameters and states through the jaxpr of a step.
    """
    like, nodes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)),
        (whole.leaves, state),
    )

    def step(grads, params, state):
        tree = whole.treedef.unflatten
        params, state = update(tree(grads), state, tree(params))
        states = whole.states_after(state, range(len(grads)))
        return jax.tree.leaves(params), states, whole.shared_after(state)

    # Programs for a GPU do not join small arrays; joins would look like dependences.
    with stand_ins.for_hopper():
        try:
            program, after = jax.make_jaxpr(step, return_shape=True)(like, like, nodes)
        except TypeError as error:
            if "required" not in str(error):
                raise
            raise ValueError(
                "coat.value_and_update gives the optimizer gradients, state and "
                f"parameters alone, but {error}. Use jax.value_and_grad, and give "
                "tx.update this argument"
            ) from error
    _check_draws(program.jaxpr)
    count = len(like)
    owners = [*range(2 * count)]  # Gradients, parameters.
    owners += [None if j is None else count + j for j in whole.owners()]
    operands = [_NONE if j is None else frozenset({j}) for j in owners]
    results = iter(dependences(program.jaxpr, operands))
    _, states, shared = after
    for j in range(count):
        _check_reads(whole, next(results), j, f"the step of {whole.names[j]}")
    for j, nodes in states.items():
        for _ in jax.tree.leaves(nodes):
            _check_reads(whole, next(results), j, f"the state of {whole.names[j]}")
    for _ in jax.tree.leaves(shared):
        _check_reads(whole, next(results), None, "a state of no single parameter")


def _check_reads(
    whole: Parameters, reads: _Indices, own: int | None, what: str
) -> None:
    count = len(whole.names)
    others = sorted({j for j in reads if j % count != own})
    if not others:
        return
    kind = "gradient" if others[0] < count else "values or the state"
    number = len({j % count for j in others}) - 1
    more = f" and of {number} others" if number else ""
    raise ValueError(
        f"{what} depends on the {kind} of {whole.names[others[0] % count]}{more}. "
        "coat.value_and_update needs steps of each parameter alone: clip with its "
        "max_norm, skip with its skip_not_finite, or use jax.value_and_grad"
    )


def _check_draws(program: Jaxpr) -> None:
    names = {eqn.primitive.name for eqn in all_eqns(program.eqns)}
    if names & {"random_bits", "threefry2x32", "rng_bit_generator"}:
        raise ValueError(
            "the optimizer draws random numbers, as optax.add_noise does, which depend "
            "on the number of parameters that step together. Use jax.value_and_grad"
        )


def warn_of_scans(loss: Callable, params: Parameters, updated: Collection[int]) -> None:
    """Warns about the first large parameter that `jax.lax.scan` takes as a stack.

    Args:
      loss: A function of the parameters.
      params: The parameters.
      updated: The indices of the parameters that are in `coat.scan_layers`.
    """
    shapes = [jnp.shape(x) for x in params.leaves]
    columns = enumerate(zip(shapes, params.leaves, strict=True))
    large = {j for j, (shape, leaf) in columns if len(shape) > 2 and is_large(leaf)}
    # The loss is traced again only if a large stack may be under another scan.
    if not (large := large.difference(updated)):
        return
    with operations.unexplained():
        program = jax.make_jaxpr(lambda leaves: loss(params.treedef.unflatten(leaves)))
        program = program(params.leaves).jaxpr
    stacks = _scanned(program, [frozenset({j}) for j in range(len(shapes))], shapes)
    for j in sorted(stacks.intersection(large)):
        warnings.warn(
            f"all gradients of {params.names[j]} {list(shapes[j])} exist at once, "
            "because its layers are under jax.lax.scan, flax.nnx.scan or "
            "flax.linen.scan, or under coat.scan_layers within jax.jit, "
            "jax.checkpoint, jax.lax.cond or coat.apply_layer. Call coat.scan_layers "
            "from the loss itself with the parameters unchanged, which steps one layer "
            "at a time",
            stacklevel=4,
        )
        return


def _scanned(
    program: Jaxpr, operands: Sequence[_Indices], shapes: Sequence[tuple[int, ...]]
) -> set[int]:
    """Returns the indices of the parameters that a scan slices, at any depth.

    Stacks that a program computes from parameters count as these parameters; see
    `_stacks_after`.

    Args:
      program: The program.
      operands: The indices of the parameters that each argument stands for.
      shapes: The shape of each parameter.
    """
    program = written_out(program)
    index = dict(zip(program.invars, operands, strict=True))
    scanned: set[int] = set()
    for eqn in program.eqns:
        values = [
            _NONE if isinstance(x, Literal) else index.get(x, _NONE) for x in eqn.invars
        ]
        for result in eqn.outvars:
            index[result] = _stacks_after(eqn, result, values, shapes)
        is_scan = eqn.primitive.name == "scan"
        for body in bodies_of(eqn):
            # The first operand of `cond` says which of its programs runs.
            inputs = values[-len(body.invars) :] if body.invars else []
            if is_scan:
                for x, stack, stands in zip(
                    body.invars, eqn.invars, inputs, strict=True
                ):
                    if stands and x.aval.shape == stack.aval.shape[1:]:
                        scanned |= stands
            elif eqn.primitive.name != "while":
                scanned |= _scanned(body, inputs, shapes)
    return scanned


def _stacks_after(
    eqn: JaxprEqn,
    result: Var,
    operands: Sequence[_Indices],
    shapes: Sequence[tuple[int, ...]],
) -> _Indices:
    """Returns the indices of the parameters that a result stands for.

    A result stands for a parameter that an operation moves, converts or cuts, or from
    which it computes an array of the parameter's shape. Elementwise operations may also
    compute an array of the operand's shape. Arrays without gradients, as after
    `jax.lax.stop_gradient`, stand for no parameter, and neither do larger arrays.
    """
    dtype = getattr(result.aval, "dtype", jnp.bool_)  # Tokens have none.
    is_differentiable = jnp.issubdtype(dtype, jnp.inexact)
    if eqn.primitive.name == "stop_gradient" or not is_differentiable:
        return _NONE
    shape, stands = result.aval.shape, set()
    for x, indices in zip(eqn.invars, operands, strict=True):
        is_moved = is_layout(eqn) and result.aval.size <= x.aval.size
        is_changed = is_elementwise(eqn) and shape == x.aval.shape
        stands |= {j for j in indices if is_moved or is_changed or shape == shapes[j]}
    return frozenset(stands)


def check_layers(optimizer: Optimizer, stacked: Collection[int]) -> None:
    """Checks that a layer's step is the same by itself as within a stack of layers.

    The types in a program do not show whether norms mix layers. So a step of small
    random arrays is computed in both ways.

    Args:
      optimizer: The optimizer with the parameters of the whole step.
      stacked: The indices of the parameters that are stacks of layers.

    Raises:
      ValueError: If the step of a layer depends on other layers of its stack.
    """
    if not stacked:
        return
    params = optimizer.params
    shapes = [[min(n, 2) for n in jnp.shape(x)] for x in params.leaves]

    @jax.jit
    def both(leaves, first, grads, steps):
        """Computes the updates of the stacks, and the updates of each layer by itself.

        `first` are the gradients of a first step, and `grads` of the step to compare.
        `steps` is added to the optimizer's counts in between.
        """
        tree = params.treedef.unflatten
        small = tree(leaves)
        _, state = optimizer.tx.update(tree(first), optimizer.tx.init(small), small)
        state = jax.tree.map(lambda x: x + steps if _is_count(x) else x, state)
        updates, _ = optimizer.tx.update(tree(grads), state, small)
        part = dataclasses.replace(
            optimizer, params=Parameters(small, state), is_fused=False, clip=None
        )
        layers = [_Layer(part, stacked, j).updates(grads, leaves) for j in range(2)]
        return jax.tree.leaves(updates), layers

    # Some norms take effect above a size, and some after a number of steps.
    for size, steps in itertools.product((1e-1, 1e12), (0, 100, 10**6)):
        with jax.ensure_compile_time_eval():
            updates, layers = both(*_draws(shapes, size), np.int32(steps))
        _check_updates(params, updates, layers)


def _is_count(x: Any) -> bool:
    return x.dtype == jnp.int32 and x.ndim == 0


def _check_updates(params: Parameters, updates: Sequence, layers: Sequence) -> None:
    """Raises ValueError if updates of stacks differ from updates of their layers."""
    for layer, by_index in enumerate(layers):
        for j, update in by_index.items():
            expected = np.asarray(updates[j], np.float32)[layer : layer + 1]
            if not _are_close(np.asarray(update, np.float32), expected):
                raise ValueError(
                    f"the optimizer's step of {params.names[j]} mixes layers, as norms "
                    "of a whole parameter do (lamb, lars, adafactor, muon). Under "
                    "coat.scan_layers a layer steps alone. Unroll the layers, or use "
                    "jax.value_and_grad"
                )


def _draws(shapes: Sequence[Sequence[int]], size: float) -> list[list[np.ndarray]]:
    """Draws small parameters, and gradients of two steps; `size` scales the second.

    Layers differ in magnitude, so that the norm of a stack is not a layer's norm.
    """
    rng, sizes = np.random.default_rng(0), np.float32([1, 8])

    def draw(shape, scale):
        x = np.asarray(rng.standard_normal(shape) * scale, np.float32)
        by_layer = sizes[: shape[0]].reshape(-1, *[1] * (x.ndim - 1)) if shape else 1
        return x * by_layer

    return [[draw(s, scale) for s in shapes] for scale in (1.0, 1e-3, size)]


def _are_close(actual: np.ndarray, expected: np.ndarray) -> bool:
    tolerance = 1e-5 * np.abs(expected).max(initial=1e-30)
    return np.allclose(actual, expected, rtol=1e-3, atol=tolerance, equal_nan=True)


@dataclasses.dataclass(frozen=True)
class _Layer:
    """A layer's part of an optimizer's step, to compare with the step of the stacks.

    Attributes:
      optimizer: The optimizer, with small parameters to try it on.
      stacked: The indices of the parameters that are stacks of layers.
      index: The index of the layer in the stacks.
    """

    optimizer: Optimizer
    stacked: Collection[int]
    index: int

    def updates(self, grads: Sequence, leaves: Sequence) -> dict[int, Any]:
        """Returns the updates of the layer's parameters."""

        def at(x):
            return x[self.index : self.index + 1]

        params = self.optimizer.params
        states = {j: jax.tree.map(at, params.state_of(j)) for j in sorted(self.stacked)}
        with masks_explained():
            updates, _ = self.optimizer.tx.update(
                params.tree({j: at(grads[j]) for j in states}),
                params.part_of_state(states),
                params.tree({j: at(leaves[j]) for j in states}),
            )
        return params.leaves_of(updates, states)
