"""Turns matmuls of a program's parameters into FP8 matmuls."""

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from coat_jax.convert.rules import path_of
from coat_jax.fp8.dot_general import fp8_dot_general
from coat_jax.programs.graph import embedded, inlined
from coat_jax.programs.primitives import variables

# The default rule chooses matmuls with so many inputs and outputs, in multiples of
# `_MULTIPLE`, which kernels need. Smaller ones, such as routers, gain nothing.
_LEAST, _MULTIPLE = 128, 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversion:
    """The matmuls of a function that become FP8 matmuls.

    Attributes:
      depth: The number of keys in the path of an argument of the function that are not
        part of a parameter's path.
      chosen: The paths of the parameters whose matmuls are chosen; None means all whose
        matmuls are large enough.
      where: The path of the module, for warnings.
    """

    depth: int
    chosen: Callable[[str], bool] | frozenset[str] | None
    where: str = dataclasses.field(compare=False)

    def __call__(
        self, program: core.Jaxpr, keys: Sequence[Any], is_param: Sequence[bool]
    ) -> core.Jaxpr:
        """Returns the program with FP8 matmuls.

        Args:
          program: The program of the function.
          keys: The path of each argument.
          is_param: True for each argument that is a parameter.
        """
        program = inlined(program, _is_plain_call)
        sources = self._sources(program, keys, is_param)
        eqns = []
        for eqn in program.eqns:
            side = self._side(eqn, sources)
            if side is None:
                self._check(eqn, sources)
                eqns.append(eqn)
            else:
                eqns.extend(_fp8(eqn, side))
        return program.replace(eqns=eqns)

    def _sources(
        self, program: core.Jaxpr, keys: Sequence[Any], is_param: Sequence[bool]
    ) -> dict[core.Var, frozenset[str]]:
        """Returns the parameters that each variable follows from, and nothing else."""
        found = dict.fromkeys(program.constvars, frozenset())
        for var, key, marked in zip(program.invars, keys, is_param, strict=True):
            if marked:
                found[var] = frozenset({path_of(key[self.depth :])})
        for eqn in program.eqns:
            operands = variables(eqn.invars)
            if operands <= found.keys():
                union = frozenset().union(*(found[v] for v in operands))
                found |= dict.fromkeys(eqn.outvars, union)
        return found

    def _side(self, eqn: core.JaxprEqn, sources: dict) -> int | None:
        """Returns the operand of a chosen matmul that is a weight, 0 or 1, or None."""
        if eqn.primitive.name != "dot_general":
            return None
        if not all(_is_wide_float(v.aval) for v in (*eqn.invars, *eqn.outvars)):
            return None
        weights = [i for i, v in enumerate(eqn.invars) if sources.get(v)]
        others = [i for i, v in enumerate(eqn.invars) if v not in sources]
        if len(weights) != 1 or len(others) != 1:
            return None
        (side,) = weights
        if self.chosen is None:
            return side if _is_large(eqn, side) else None
        paths = sources[eqn.invars[side]]
        return side if any(map(self._is_chosen, paths)) else None

    def _is_chosen(self, path: str) -> bool:
        chosen = self.chosen
        return path in chosen if isinstance(chosen, frozenset) else chosen(path)

    def _check(self, eqn: core.JaxprEqn, sources: dict) -> None:
        """Warns of matmuls that stay as they are because they lie in a loop."""
        inside = (e for body in core.jaxprs_in_params(eqn.params) for e in body.eqns)
        if not any(map(_has_matmul, inside)):
            return
        paths = set().union(*(sources.get(v, ()) for v in variables(eqn.invars)))
        if self.chosen is not None:
            paths = {*filter(self._is_chosen, paths)}
        if paths:
            warnings.warn(
                f"matmuls within {eqn.primitive.name} in {self.where or 'the model'} "
                f"do not become FP8 matmuls: {', '.join(sorted(paths))}; convert what "
                "the loop or the call contains instead",
                stacklevel=2,
            )


def _is_plain_call(eqn: core.JaxprEqn) -> bool:
    """Returns whether an operation is a jitted function that contains matmuls."""
    return eqn.primitive.name == "jit" and _has_matmul(eqn)


def _has_matmul(eqn: core.JaxprEqn) -> bool:
    if eqn.primitive.name == "dot_general":
        return True
    return any(map(_has_matmul, _within(eqn)))


def _within(eqn: core.JaxprEqn) -> Iterator[core.JaxprEqn]:
    # FP8 matmuls, of this library or others, are custom derivatives.
    if not eqn.primitive.name.startswith("custom_vjp_call"):
        for body in core.jaxprs_in_params(eqn.params):
            yield from body.eqns


def _is_wide_float(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.floating) and aval.dtype.itemsize > 1


def _is_large(eqn: core.JaxprEqn, side: int) -> bool:
    """Returns whether a matmul is worth the quantization of its operands."""
    contracted, batch = (dims[side] for dims in eqn.params["dimension_numbers"])
    shape = eqn.invars[side].aval.shape
    inputs = math.prod(shape[i] for i in contracted)
    outputs = math.prod(shape) // math.prod(shape[i] for i in batch) // max(inputs, 1)
    return all(n >= _LEAST and n % _MULTIPLE == 0 for n in (inputs, outputs))


def _fp8(eqn: core.JaxprEqn, side: int) -> list[core.JaxprEqn]:
    """Returns an FP8 matmul in place of one whose operand `side` is the weight."""
    matmul = partial(_matmul, eqn=eqn, side=side)
    closed = jax.make_jaxpr(matmul)(*(v.aval for v in eqn.invars))
    made, _ = embedded(closed.jaxpr, eqn.invars, eqn.outvars)
    return [each.replace(source_info=eqn.source_info) for each in made]


def _matmul(*operands: jax.Array, eqn: core.JaxprEqn, side: int) -> jax.Array:
    contract, batch = eqn.params["dimension_numbers"]
    dtype, sharding = eqn.outvars[0].aval.dtype, eqn.params.get("out_sharding")
    if side == 1:
        return fp8_dot_general(
            *operands,
            (contract, batch),
            preferred_element_type=dtype,
            out_sharding=sharding,
        )
    # The activations come first, and the axes of the result in their own order again.
    first = operands[0].ndim - len(contract[0]) - len(batch[0])
    y = fp8_dot_general(
        *operands[::-1], (contract[::-1], batch[::-1]), preferred_element_type=dtype
    )
    batches = len(batch[0])
    back = y.ndim - first
    order = *range(batches), *range(back, y.ndim), *range(batches, back)
    y = lax.transpose(y, order)
    return y if sharding is None else jax.sharding.reshard(y, sharding)
