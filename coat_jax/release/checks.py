"""Refusals: optimizers whose step of a parameter reads more than its own gradient."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from coat_jax.optimizers.fused import NotFusedError, fused_update
from coat_jax.release.parts import Optimizer, Parameters
from pallas_kernels import stand_ins

# The calls that pass their operands on to an inner program one by one.
_CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}
_Indices = frozenset[int]
_NONE: _Indices = frozenset()


def is_fused(
    tx: optax.GradientTransformation, params: optax.Params, state: optax.OptState
) -> bool:
    """Returns whether `coat.fused_update` computes a step of `tx`.

    Raises:
      ValueError: If the step of a parameter, or a state, depends on the gradient of
        another parameter.
    """
    if isinstance(state, optax.MultiStepsState):
        raise ValueError(
            "optax.MultiSteps keeps the sum of all gradients, which takes the memory "
            "that coat.value_and_update saves. Use a larger batch in its place, or "
            "jax.value_and_grad"
        )

    def fused(grads, state, params):
        return fused_update(tx, grads, state, params)

    def plain(grads, state, params):
        return tx.update(grads, state, params)

    try:
        _check_own_gradients(fused, params, state)
    except NotFusedError:
        _check_own_gradients(plain, params, state)
        return False
    return True


def _check_own_gradients(update: Any, params: Any, state: Any) -> None:
    """Follows the gradients through the program of a step."""
    whole = Parameters(params, state)
    like = [
        jax.ShapeDtypeStruct(x.shape, x.dtype) for x in map(jnp.asarray, whole.leaves)
    ]
    nodes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), state)

    def step(grads, params, state):
        tree = whole.treedef.unflatten
        params, state = update(tree(grads), state, tree(params))
        states = whole.states_after(state, range(len(grads)))
        return jax.tree.leaves(params), states, whole.shared_after(state)

    # On a GPU small arrays are not joined, which would look like dependences.
    with stand_ins.for_hopper():
        program, after = jax.make_jaxpr(step, return_shape=True)(like, like, nodes)
    count = len(like)
    operands = [
        frozenset({j}) if j < count else _NONE for j in range(len(program.in_avals))
    ]
    results = iter(_dependences(program.jaxpr, operands))
    _, states, shared = after
    for j in range(count):
        _check_reads(whole, next(results), j, f"the step of {whole.names[j]}")
    for j, nodes in states.items():
        for _ in jax.tree.leaves(nodes):
            _check_reads(whole, next(results), j, f"the state of {whole.names[j]}")
    for path, _ in jax.tree_util.tree_leaves_with_path(shared):
        del path
        _check_reads(whole, next(results), None, "a state of no single parameter")


def _check_reads(
    whole: Parameters, reads: _Indices, own: int | None, what: str
) -> None:
    others = sorted(reads - {own})
    if not others:
        return
    more = f" and of {len(others) - 1} others" if len(others) > 1 else ""
    raise ValueError(
        f"{what} depends on the gradient of {whole.names[others[0]]}{more}. "
        "coat.value_and_update needs steps of each parameter alone: clip with its "
        "max_norm, skip with its skip_not_finite, or use jax.value_and_grad"
    )


def _dependences(program: Jaxpr, operands: Sequence[_Indices]) -> list[_Indices]:
    """Returns the gradients on which each result of a program depends."""
    reads = dict(zip(program.invars, operands, strict=True))

    def of(x):
        return _NONE if isinstance(x, Literal) else reads.get(x, _NONE)

    for equation in program.eqns:
        values = [of(x) for x in equation.invars]
        reads.update(zip(equation.outvars, _of_equation(equation, values), strict=True))
    return [of(x) for x in program.outvars]


def _of_equation(equation: Any, operands: list[_Indices]) -> list[_Indices]:
    name, params = equation.primitive.name, equation.params
    if name == "optimization_barrier":
        return operands
    if name == "cond":
        which, *others = operands
        branches = [_dependences(b.jaxpr, others) for b in params["branches"]]
        return [which.union(*reads) for reads in zip(*branches, strict=True)]
    inner = params.get(_CALLS.get(name))
    if inner is not None:
        inner = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
        if len(inner.invars) == len(operands):
            return _dependences(inner, operands)
    return [_NONE.union(*operands)] * len(equation.outvars)


def check_layers(optimizer: Optimizer, stacked: Collection[int]) -> None:
    """Checks that the step of a stack's layer is the layer of the stack's step.

    Nothing in a program's types tells whether norms mix layers. So a step of small
    random arrays is computed both ways.

    Args:
      optimizer: The optimizer.
      stacked: The indices of the parameters that are stacks of layers.

    Raises:
      ValueError: If layers mix.
    """
    if not stacked:
        return
    params, rng = optimizer.params, np.random.default_rng(0)
    shapes = [[min(n, 2) for n in jnp.shape(x)] for x in params.leaves]

    def draw(scale):
        # Layers differ in size, so that a norm of both is not that of one.
        return [
            np.asarray(rng.standard_normal(s) * scale, np.float32)
            * (np.float32([1, 8])[: s[0]].reshape(-1, *[1] * (len(s) - 1)) if s else 1)
            for s in shapes
        ]

    def both(leaves, first, grads):
        tree = params.treedef.unflatten
        tiny = tree(leaves)
        _, state = optimizer.tx.update(tree(first), optimizer.tx.init(tiny), tiny)
        updates, _ = optimizer.tx.update(tree(grads), state, tiny)
        part = dataclasses.replace(
            optimizer, params=Parameters(tiny, state), is_fused=False, clip=None
        )
        slices = []
        for layer in range(2):
            at = _Layer(part, stacked, layer)
            slices.append(at.updates(grads, leaves))
        return jax.tree.leaves(updates), slices

    with jax.ensure_compile_time_eval():
        arrays = draw(1.0), draw(1e-3), draw(1e-1)
        updates, slices = jax.jit(both)(*arrays)
    for layer, found in enumerate(slices):
        for j, update in found.items():
            expected = np.asarray(updates[j], np.float32)[layer : layer + 1]
            tolerance = 1e-5 * np.abs(expected).max(initial=1e-30)
            close = np.allclose(update, expected, rtol=1e-3, atol=tolerance)
            if np.isfinite(expected).all() and not close:
                raise ValueError(
                    f"the optimizer's step of {params.names[j]} mixes layers, as norms "
                    "of a whole parameter do (lamb, lars, adafactor, muon). Under "
                    "coat.scan_layers a layer steps alone. Unroll the layers, or use "
                    "jax.value_and_grad"
                )


@dataclasses.dataclass(frozen=True)
class _Layer:
    """The step of one layer of the stacks among small parameters.

    Attributes:
      optimizer: The optimizer.
      stacked: The indices of the parameters that are stacks.
      index: The layer.
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
        updates, _ = self.optimizer.tx.update(
            params.tree({j: at(grads[j]) for j in states}),
            params.part_of_state(states),
            params.tree({j: at(leaves[j]) for j in states}),
        )
        return params.leaves_of(updates, states)
