"""Turns matmuls of a program's parameters into FP8 matmuls."""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from coat_jax.convert.forms import (
    dimensions,
    fp8_form,
    is_in_jax,
    is_ragged,
    ragged_obstacle,
)
from coat_jax.convert.record import (
    ACTIVATIONS,
    FP8_ALREADY,
    PARAMETERS,
    Log,
    Matmul,
    ModelRecord,
    Shapes,
    new_log,
)
from coat_jax.convert.rules import Rules, chooser, path_of
from coat_jax.fp8.dot_general import fp8_dot_p
from coat_jax.fp8.ragged_dot import fp8_ragged_dot_p
from coat_jax.fusion.operation import fused_p
from coat_jax.programs.graph import inlined, is_plain_call
from coat_jax.programs.primitives import size_of, variables
from coat_jax.programs.shard_maps import (
    is_over_all_axes,
    is_shard_map,
    program_of,
    with_program,
)
from pallas_kernels import versions
from pallas_kernels.dispatch.array_types import is_partial

# The default rule chooses matmuls with at least `_LEAST` inputs and outputs, in
# multiples of `_MULTIPLE`, which kernels need. Smaller matmuls gain nothing.
_LEAST, _MULTIPLE = 128, 16
# Operations that choose among numbers, and the most numbers that a router chooses from.
# Rounding errors of FP8 would change the choice itself.
_CHOICES = {"top_k", "approx_top_k", "argmax", "sort"}
_MOST_CHOICES = 1024
# The number of keys that come before a parameter's path in the path of an argument: for
# functions and methods, and for functions that `linen_method` wraps.
OF_FUNCTION, OF_LINEN = 2, 5
# The matmuls that are in FP8 already.
_IN_FP8 = {fp8_dot_p, fp8_ragged_dot_p, fused_p}
# The paths of all parameters that a variable depends on. A variable that depends on
# anything else, other than constants, has no entry.
Sources = dict[core.Var, frozenset[str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversion:
    """The rewrite of a program in which matmuls of parameters become FP8 matmuls.

    Attributes:
      depth: The number of keys in an argument's path that come before the path of a
        parameter within the model.
      chosen: The paths of the parameters that FP8 matmuls may read. None means all
        parameters with matmuls that are large enough.
      model: The record of the model that has the function as a block, or None.
      where: The path of the block, for reports and warnings.
      log: The log of a call's matmuls; None unless a report is being made.
    """

    depth: int
    chosen: Callable[[str], bool] | frozenset[str] | None
    model: ModelRecord | None
    where: str = dataclasses.field(compare=False)
    log: Log | None = None

    @classmethod
    def of_block(
        cls, rules: Rules, model: ModelRecord, block: str, shapes: Shapes, depth: int
    ) -> "Conversion":
        """Returns the conversion of a block with parameters of these shapes.

        `block` is the path of the block. `depth` is the attribute of this class.
        """
        chosen = None
        if rules.matmuls is not None:
            rule = chooser("matmuls", rules.matmuls)
            names = (path for path in shapes if rule(f"{block}/{path}".lstrip("/")))
            chosen = frozenset(names)
        return cls(depth=depth, chosen=chosen, model=model, where=block)

    def logged(self) -> "Conversion":
        """Returns this conversion for one call, with a log if a report is made."""
        log = new_log(self.where)
        return self if log is None else dataclasses.replace(self, log=log)

    def __call__(
        self, program: core.Jaxpr, keys: Sequence[Any], is_param: Sequence[bool]
    ) -> core.Jaxpr:
        """Returns the program with FP8 matmuls.

        Args:
          program: The program of the function.
          keys: The path of each argument.
          is_param: True for each argument that is a parameter.

        Raises:
          ValueError: If no block of the model has an FP8 matmul.
        """
        program = inlined(program, _is_plain_call)
        marked = zip(program.invars, keys, is_param, strict=True)
        paths = {v: path_of(key[self.depth :]) for v, key, param in marked if param}
        sources = _sources(program, {v: frozenset({p}) for v, p in paths.items()})
        eqns, matmuls = self._converted(program, sources, _choosing(program))
        if self.log is not None:
            self.log.matmuls = tuple(matmuls)
        elif self.model is not None:
            shapes = {path: var.aval.shape for var, path in paths.items()}
            if self.model.finish(self.where, shapes, matmuls):
                for eqn in program.eqns:
                    self._check(eqn, sources)
        return program.replace(eqns=eqns)

    def _converted(
        self, program: core.Jaxpr, sources: Sources, choosing: set[core.Var]
    ) -> tuple[list[core.JaxprEqn], list[Matmul]]:
        """Returns a program's operations with FP8 matmuls, and all of its matmuls.

        `choosing` has the variables that choices depend on; see `_choosing`.
        """
        eqns, matmuls = [], []
        for eqn in program.eqns:
            if _is_matmul(eqn):
                side, reason = self._choice(eqn, sources, choosing)
                row = self._row(eqn, sources, reason)
                matmuls.append(row)
                # Under `vmap` it would have the rows of one example with gradients, and
                # of all without, so it is an FP8 matmul in neither case.
                eqns.extend(fp8_form(eqn, side) if row.runs_in_fp8 else [eqn])
            elif _is_convertible(eqn):
                new, inner = self._of_devices(eqn, sources, choosing)
                matmuls += inner
                eqns += new
            else:
                matmuls += self._within(eqn, sources)
                eqns.append(eqn)
        return eqns, matmuls

    def _of_devices(
        self, eqn: core.JaxprEqn, sources: Sources, choosing: set[core.Var]
    ) -> tuple[list[core.JaxprEqn], list[Matmul]]:
        """Returns the operations of a `shard_map` with FP8 matmuls, and its matmuls.

        The matmuls have the shapes that they have on one device.
        """
        body, inner = _within_shard_map(eqn, sources)
        matmuls: list[Matmul] = []
        results = zip(body.outvars, eqn.outvars, strict=True)
        chosen = {v for v, out in results if _is_var(v) and out in choosing}

        def of_device(*arrays):
            converted = self._converted(body, inner, _choosing(body, chosen))
            matmuls[:] = converted[1]
            program = body.replace(eqns=converted[0])
            return core.jaxpr_as_fun(core.ClosedJaxpr(program, ()))(*arrays)

        return with_program(eqn, of_device), matmuls

    def _choice(
        self, eqn: core.JaxprEqn, sources: Sources, choosing: set[core.Var]
    ) -> tuple[int, str]:
        """Returns the weight's index, and why the matmul is not converted, or ""."""
        if eqn.primitive in _IN_FP8:
            return 0, FP8_ALREADY
        operands = eqn.invars[:2]
        parameters = [_followed(v, sources) for v in operands]
        weights = [i for i, paths in enumerate(parameters) if paths]
        activations = [i for i, paths in enumerate(parameters) if paths is None]
        if len(weights) != 1 or len(activations) != 1:
            return 0, _operands(len(weights), len(activations))
        types = [v.aval for v in (*operands, *eqn.outvars)]
        if not all(map(_is_wide_float, types)):
            return 0, f"a matmul of {types[0].dtype} and {types[1].dtype}"
        if any(is_partial(aval.sharding) for aval in types):
            return 0, "devices' parts are added up later"
        (side,) = weights
        if is_ragged(eqn) and (obstacle := ragged_obstacle(eqn)):
            return 0, obstacle
        if side == 0 and is_ragged(eqn):
            return 0, "its rows in groups are a parameter"
        if self.chosen is None:
            return side, _too_small(eqn, side) or _router(eqn, choosing)
        paths = sources[eqn.invars[side]]
        chosen = any(map(self._is_chosen, paths))
        return side, "" if chosen else "not chosen by matmuls="

    def _is_chosen(self, path: str) -> bool:
        chosen = self.chosen
        return path in chosen if isinstance(chosen, frozenset) else chosen(path)

    def _row(self, eqn: core.JaxprEqn, sources: Sources, reason: str) -> Matmul:
        lhs, rhs, *_ = eqn.invars
        parameters = [_followed(v, sources) or frozenset() for v in eqn.invars]
        if eqn.primitive is fused_p:  # It may have several weights, scales and biases.
            operands = zip(eqn.invars[1:], parameters[1:], strict=True)
            weights = (v for v, paths in operands if paths)
            rhs = max(weights, key=lambda v: size_of(v.aval), default=rhs)
        return Matmul(
            block=self.where,
            parameter=", ".join(sorted(frozenset().union(*parameters))),
            left=lhs.aval.shape,
            right=rhs.aval.shape,
            rows=_rows(eqn, sources),
            reason=reason,
        )

    def _within(self, outer: core.JaxprEqn, sources: Sources) -> list[Matmul]:
        """Returns the matmuls within a loop, or another operation that is kept."""
        matmuls = []
        for body in versions.bodies_in_params(outer.params):
            inner = _sources_within(body, outer, sources)
            reason = f"within {outer.primitive.name}"
            for eqn in body.eqns:
                if _is_matmul(eqn):
                    why = FP8_ALREADY if eqn.primitive in _IN_FP8 else reason
                    matmuls.append(self._row(eqn, inner, why))
                else:
                    below = self._within(eqn, inner)
                    is_call = eqn.primitive.name == "jit"
                    matmuls += [
                        dataclasses.replace(m, reason=reason)
                        if is_call and m.reason != FP8_ALREADY
                        else m
                        for m in below
                    ]
        return matmuls

    def _check(self, eqn: core.JaxprEqn, sources: Sources) -> None:
        """Warns of matmuls that are not converted because a loop or call has them."""
        if _is_convertible(eqn):
            body, inner = _within_shard_map(eqn, sources)
            for each in body.eqns:
                self._check(each, inner)
            return
        inside = self._within(eqn, sources)
        if not any(m.parameter and m.reason != FP8_ALREADY for m in inside):
            return
        paths = set().union(*(sources.get(v, ()) for v in variables(eqn.invars)))
        if self.chosen is not None:
            paths = {*filter(self._is_chosen, paths)}
        if paths:
            self.model.warn(
                f"matmuls within {eqn.primitive.name} in {self.where or 'the model'} "
                f"do not become FP8 matmuls: {', '.join(sorted(paths))}; convert what "
                "the loop or the call contains instead"
            )


def _sources(program: core.Jaxpr, params: Sources) -> Sources:
    """Returns the parameters that each variable depends on; see `Sources`.

    Variables that depend on anything else are left out. `params` has the entries of the
    program's inputs.
    """
    sources = dict.fromkeys(program.constvars, frozenset()) | params
    for eqn in program.eqns:
        operands = variables(eqn.invars)
        if operands <= sources.keys():
            union = frozenset().union(*(sources[v] for v in operands))
            sources |= dict.fromkeys(eqn.outvars, union)
    return sources


def _within_shard_map(
    eqn: core.JaxprEqn, sources: Sources
) -> tuple[core.Jaxpr, Sources]:
    """Returns the program within a `shard_map`, and the `Sources` of its variables."""
    body = inlined(program_of(eqn), _is_plain_call)
    return body, _sources_within(body, eqn, sources)


def _sources_within(
    body: core.Jaxpr, outer: core.JaxprEqn, sources: Sources
) -> Sources:
    """Returns the `Sources` of the variables in a program within an operation."""
    # The index of a cond, and constants of a loop's condition, come first.
    pairs = zip(reversed(body.invars), reversed(outer.invars), strict=False)
    inner = {v: sources[x] for v, x in pairs if _is_var(x) and x in sources}
    return _sources(body, inner)


def _choosing(program: core.Jaxpr, outside: Collection[core.Var] = ()) -> set[core.Var]:
    """Returns the variables on which a choice depends without a matmul in between.

    A choice is an operation such as `top_k`. `outside` has the results of the program
    that choices outside of it depend on.
    """
    choosing = set(outside)
    for eqn in reversed(program.eqns):
        decides = not choosing.isdisjoint(eqn.outvars) and not _is_matmul(eqn)
        if decides or _chooses(eqn):
            choosing |= variables(eqn.invars)
    return choosing


def _chooses(eqn: core.JaxprEqn) -> bool:
    """Returns whether an operation, or one within it, is a choice."""
    if eqn.primitive.name in _CHOICES:
        return True
    bodies = versions.bodies_in_params(eqn.params)
    return any(_chooses(inner) for body in bodies for inner in body.eqns)


def _router(eqn: core.JaxprEqn, choosing: set[core.Var]) -> str:
    """Returns why a router's matmul is not converted, or "" for other matmuls."""
    (y,) = eqn.outvars
    if y not in choosing or y.aval.shape[-1] > _MOST_CHOICES:
        return ""
    return "its results choose, as a router's do"


def _followed(
    operand: core.Var | core.Literal, sources: Sources
) -> frozenset[str] | None:
    """Returns the parameters that an operand depends on; None for activations."""
    return sources.get(operand) if _is_var(operand) else frozenset()


def _rows(eqn: core.JaxprEqn, sources: Sources) -> int:
    """Returns the number of rows of the operand that is not a parameter."""
    if eqn.primitive in _IN_FP8:
        return eqn.invars[0].aval.shape[-2]
    side = 1 if _followed(eqn.invars[0], sources) else 0
    contracted, batch = (dims[side] for dims in dimensions(eqn))
    shape = eqn.invars[side].aval.shape
    free = set(range(len(shape))) - {*contracted, *batch}
    return math.prod(shape[i] for i in free)


def _operands(weights: int, activations: int) -> str:
    """Returns why a matmul's operands are not one activation and one parameter.

    `weights` and `activations` are the numbers of operands of each kind.
    """
    if activations == 2:
        return ACTIVATIONS
    if weights == 2:
        return PARAMETERS
    if not weights:
        return "no operand is a parameter"
    return "an operand is a constant or closed over; give it as an argument"


def _is_var(x: Any) -> bool:
    return isinstance(x, core.Var)


def _is_plain_call(eqn: core.JaxprEqn) -> bool:
    """Returns whether an operation is a jitted function that contains matmuls."""
    return is_plain_call(eqn) and _has_matmul(eqn)


def _is_convertible(eqn: core.JaxprEqn) -> bool:
    """Returns whether an operation is a `shard_map` over all axes, with matmuls."""
    return is_shard_map(eqn) and is_over_all_axes(eqn) and _has_matmul(eqn)


def _is_matmul(eqn: core.JaxprEqn) -> bool:
    return is_in_jax(eqn) or eqn.primitive in _IN_FP8


def _has_matmul(eqn: core.JaxprEqn) -> bool:
    if is_in_jax(eqn):
        return True
    return any(map(_has_matmul, _eqns_within(eqn)))


def _eqns_within(eqn: core.JaxprEqn) -> Iterator[core.JaxprEqn]:
    # FP8 matmuls of other libraries are custom derivatives.
    if not eqn.primitive.name.startswith("custom_vjp_call"):
        for body in versions.bodies_in_params(eqn.params):
            yield from body.eqns


def _is_wide_float(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.floating) and aval.dtype.itemsize > 1


def _too_small(eqn: core.JaxprEqn, side: int) -> str:
    """Returns why a matmul is too small to gain from FP8, or ""."""
    contracted, batch = (dims[side] for dims in dimensions(eqn))
    shape = eqn.invars[side].aval.shape
    inputs = math.prod(shape[i] for i in contracted)
    outputs = math.prod(shape) // math.prod(shape[i] for i in batch) // max(inputs, 1)
    for size, name in ((inputs, "inputs"), (outputs, "outputs")):
        if size < _LEAST:
            return f"{size} {name} are fewer than {_LEAST}"
        if size % _MULTIPLE:
            return f"{size} {name} are no multiple of {_MULTIPLE}"
    return ""
