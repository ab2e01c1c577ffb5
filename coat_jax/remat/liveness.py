"""A model of the memory that XLA takes for a traced function, without compiling it.

The model follows the arrays of a program from the operation that writes them to the
last one that reads them:

- Matmuls, kernels, reductions, gathers, scatters and loops write arrays. Every other
  operation is fused with its readers, and its result is written only if a matmul, a
  kernel or a loop reads it. Reshapes and transposes are views.
- Operations run in the program's order, except in the body of a loop: there XLA runs
  the operations that the next iteration needs first. In a backward pass the matmuls
  of weights' gradients come last.
- The stacked results of a loop exist before it starts. Slices of its stacked operands
  are copied, unless they are fused with their readers.
- A matmul writes its result in 16 bits if its only reader rounds it to 16 bits.
- A fused operation, or a loop, writes to the memory of an operand of the same size that
  nothing reads later.

Arguments are not counted. The sum of the sizes of all arrays that exist at a time is
what an allocator without gaps would need.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend import core

from coat_jax.programs.primitives import (
    Kind,
    bodies_of,
    does_work,
    kind_of,
    makes_codes,
)
from coat_jax.remat.trace import Linearized, linearize
from pallas_kernels.dispatch import stand_ins

# The role of an array. Inputs are arguments that are not parameters. Copies are
# computed from parameters alone, such as FP8 codes of a weight. Saved arrays pass from
# forward to backward, and outputs are gradients.
Role = Literal["parameter", "input", "copy", "saved", "output", "temporary"]


@dataclasses.dataclass(eq=False, kw_only=True)
class Held:
    """An array in the device's memory.

    Attributes:
      shape: The shape.
      dtype: The dtype.
      nbytes: The size in bytes; 0 for arguments, which are not counted.
      role: What the array is for in a step, such as "saved" for the backward pass.
      index: The index of an output among all gradients; None for other arrays.
    """

    shape: tuple[int, ...]
    dtype: Any
    nbytes: int
    role: Role = "temporary"
    index: int | None = None


# The arrays that exist at one time.
Moment = tuple[Held, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Liveness:
    """The arrays that exist during each operation of a function and its gradient.

    A loop is one operation, with the arrays at the peak of its body.

    Attributes:
      forward: The arrays during each operation of the forward pass.
      backward: The arrays during each operation of the backward pass.
      saved: All arrays that the forward pass saves for the backward pass.
    """

    forward: tuple[Moment, ...]
    backward: tuple[Moment, ...]
    saved: Moment


def liveness(fn: Callable, params: Any, *args: Any) -> Liveness:
    """Returns the arrays that exist while `fn` and its gradient run on a Hopper GPU.

    Args:
      fn: The function that is differentiated, such as a loss.
      params: Its first argument, a pytree of arrays or of `jax.ShapeDtypeStruct`.
      *args: Its other arguments.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from coat_jax.remat.liveness import liveness, peak, total_bytes
      >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
      >>> total_bytes(peak(liveness(lambda x: jnp.sin(x) @ x, x).forward))
      768
    """
    with stand_ins.for_hopper():
        traced = linearize(fn, params, *args)
    parameters = traced.forward.jaxpr.invars[: len(jax.tree.leaves(params))]
    roles: dict[core.Var, Role] = dict.fromkeys(parameters, "parameter")
    backward, saved = _backward(traced, roles)
    return Liveness(forward=_forward(traced, roles), backward=backward, saved=saved)


def peak(moments: Iterable[Moment]) -> Moment:
    """Returns the arrays of the moment with the most bytes."""
    return max(moments, key=total_bytes, default=())


def total_bytes(arrays: Iterable[Held]) -> int:
    """Returns the sum of the sizes of arrays in bytes."""
    return sum(array.nbytes for array in arrays)


def _forward(traced: Linearized, roles: dict[core.Var, Role]) -> tuple[Moment, ...]:
    program, jaxpr = _Program(), traced.forward.jaxpr
    for var, role in roles.items():
        program.values[var] = _Value.of(var, role)
    program.run(jaxpr)
    ends = [program.written(var) for var in jaxpr.outvars]
    for array in ends[traced.num_outputs :]:
        array.role = "saved" if array.role in ("temporary", "copy") else array.role
    return program.moments(ends)


def _backward(
    traced: Linearized, roles: dict[core.Var, Role]
) -> tuple[tuple[Moment, ...], Moment]:
    """Returns the moments of the backward pass, and all saved arrays."""
    program, jaxpr = _Program(), traced.backward.jaxpr
    saved: dict[Any, _Value] = {}
    for index, residual in enumerate(traced.residuals):
        var, role = jaxpr.invars[index], "saved"
        if traced.is_argument(residual):
            saved_as = isinstance(residual, core.Var) and roles.get(residual)
            role = saved_as or "input"
        # An array that is saved twice exists once.
        key = residual if isinstance(residual, core.Var) else index
        program.values[var] = saved.setdefault(key, _Value.of(var, role))
    program.run(jaxpr)
    ends: list[Held] = []
    for index, var in enumerate(jaxpr.outvars):
        value = program.value(var)
        if value.held is None:
            # The gradient is not written, because XLA fuses it with the optimizer.
            ends += value.reads
        else:
            ends.append(value.held)
            if value.held.role == "temporary":
                value.held.role, value.held.index = "output", index
    start = tuple(v.held for v in saved.values() if v.held and v.held.role == "saved")
    return program.moments(ends, start), start


@dataclasses.dataclass(eq=False)
class _Value:
    """The value of a variable. A view shares the value of the array that it views.

    Attributes:
      aval: The type.
      reads: The arrays that it is computed from, while it is not written.
      held: The array in memory, once the value is written.
    """

    aval: Any
    reads: frozenset[Held] = frozenset()
    held: Held | None = None

    @classmethod
    def of(cls, var: Any, role: Role) -> "_Value":
        """Returns the value of a variable that is an array in memory."""
        return cls(var.aval, held=_held(var.aval, role))

    @property
    def sources(self) -> frozenset[Held]:
        return self.reads if self.held is None else frozenset([self.held])


def _held(aval: Any, role: Role = "temporary") -> Held:
    nbytes = 0 if role in ("parameter", "input") else aval.size * aval.dtype.itemsize
    return Held(shape=aval.shape, dtype=aval.dtype, nbytes=nbytes, role=role)


@dataclasses.dataclass(eq=False, kw_only=True)
class _Step:
    """An operation that writes arrays.

    Attributes:
      reads: The arrays that it reads.
      writes: The arrays that it writes.
      in_place: The written arrays that may reuse the memory of arrays that it reads.
      inside: The arrays of a loop's body at its peak.
    """

    reads: frozenset[Held]
    writes: Sequence[Held]
    in_place: Sequence[Held] = ()
    inside: Moment = ()


class _Program:
    """The steps of a program, and the values of its variables."""

    def __init__(self) -> None:
        self.values: dict[Any, _Value] = {}
        self.steps: list[_Step] = []
        self._readers: dict[core.Var, int] = {}
        # The results of matmuls that have one reader.
        self._products: set[Held] = set()

    def value(self, var: Any) -> _Value:
        if isinstance(var, core.Literal) or var not in self.values:
            return _Value.of(var, "input")
        return self.values[var]

    def written(self, var: Any) -> Held:
        """Returns the array of a variable; adds a step that writes it if needed."""
        value = self.value(var)
        if value.held is None:
            value.held = _held(value.aval, _role(value.reads))
            writes = [value.held]
            self.steps.append(_Step(reads=value.reads, writes=writes, in_place=writes))
        return value.held

    def run(self, jaxpr: core.Jaxpr) -> None:
        read = [var for eqn in jaxpr.eqns for var in eqn.invars] + jaxpr.outvars
        # A function that is called again has the same variables.
        self._readers |= Counter(var for var in read if isinstance(var, core.Var))
        self._keep_products(jaxpr.invars)
        for eqn in jaxpr.eqns:
            name, kind = eqn.primitive.name, kind_of(eqn)
            if name == "scan":
                self._loop(eqn)
            elif self._rounds_a_product(eqn):
                self._round(eqn)
            elif (body := _inlined(eqn)) is not None:
                self._call(body, eqn)
            elif kind is Kind.MARK or (kind is Kind.VIEW and name != "rev"):
                self._view(eqn)
            elif kind is Kind.REDUCTION:
                self._write(eqn, self._sources(eqn))
            elif kind is Kind.WRITE or does_work(eqn) or makes_codes(eqn):
                self._write(eqn, frozenset(map(self.written, eqn.invars)))
                if name == "dot_general":
                    self._products.add(self.written(eqn.outvars[0]))
                    self._keep_products(eqn.outvars)
            else:
                reads = self._sources(eqn)
                for var in eqn.outvars:
                    self.values[var] = _Value(var.aval, reads)

    def _sources(self, eqn: core.JaxprEqn) -> frozenset[Held]:
        return frozenset().union(*(self.value(var).sources for var in eqn.invars))

    def _call(self, body: core.Jaxpr, eqn: core.JaxprEqn) -> None:
        for inner, outer in zip(body.invars, eqn.invars, strict=True):
            self.values[inner] = self.value(outer)
        self.run(body)
        for inner, outer in zip(body.outvars, eqn.outvars, strict=True):
            self.values[outer] = self.value(inner)
        self._keep_products(eqn.outvars)

    def _keep_products(self, variables: Sequence[core.Var]) -> None:
        """Marks matmul results with several readers as written in their own dtype."""
        for var in variables:
            if self._readers.get(var, 0) > 1 and var in self.values:
                self._products.discard(self.values[var].held)

    def _rounds_a_product(self, eqn: core.JaxprEqn) -> bool:
        """Returns whether an operation rounds a matmul's result and alone reads it."""
        if eqn.primitive.name != "convert_element_type":
            return False
        is_product = self.value(eqn.invars[0]).held in self._products
        return is_product and eqn.params["new_dtype"] in (jnp.bfloat16, jnp.float16)

    def _round(self, eqn: core.JaxprEqn) -> None:
        """Lets the matmul itself write the rounded result."""
        [operand], [result] = eqn.invars, eqn.outvars
        array = self.written(operand)
        array.dtype = result.aval.dtype
        array.nbytes = result.aval.size * result.aval.dtype.itemsize
        self.values[result] = _Value(result.aval, held=array)

    def _view(self, eqn: core.JaxprEqn) -> None:
        for operand, result in zip(eqn.invars, eqn.outvars, strict=True):
            if eqn.primitive.name == "optimization_barrier":
                self.written(operand)
            self.values[result] = self.value(operand)
        self._keep_products(eqn.outvars)

    def _write(
        self,
        eqn: core.JaxprEqn,
        reads: frozenset[Held],
        inside: Moment = (),
        carries: int = 0,
    ) -> None:
        writes = [_held(var.aval, _role(reads)) for var in eqn.outvars]
        self.steps.append(
            _Step(reads=reads, writes=writes, in_place=writes[:carries], inside=inside)
        )
        for var, array in zip(eqn.outvars, writes, strict=True):
            self.values[var] = _Value(var.aval, held=array)

    def _loop(self, eqn: core.JaxprEqn) -> None:
        [body] = bodies_of(eqn)
        inner = _Program()
        for var, operand in zip(body.invars, eqn.invars, strict=True):
            # The operand itself counts outside of the loop.
            is_copy = _role(self.value(operand).sources) == "copy"
            source = _held(var.aval, "parameter" if is_copy else "input")
            inner.values[var] = _Value(var.aval, frozenset([source]))
            if not _is_stacked(operand, var):
                inner.values[var].held = source
        inner.run(body)
        carries, ends = 0, []
        for result, var in zip(eqn.outvars, body.outvars, strict=True):
            if _is_stacked(result, var):
                # A fused operation writes to the stack itself.
                if (value := inner.value(var)).held is None:
                    inner.steps.append(_Step(reads=value.reads, writes=()))
            else:
                carries += 1
                ends.append(inner.written(var))
        inner.postpone(ends)
        reads = frozenset(map(self.written, eqn.invars))
        self._write(eqn, reads, peak(inner.moments(ends)), carries)

    def postpone(self, ends: Iterable[Held]) -> None:
        """Moves the steps that `ends` do not depend on after all other steps."""
        needed, first = set(ends), []
        for step in reversed(self.steps):
            if needed.intersection(step.writes):
                needed |= step.reads
                first.append(step)
        chosen = set(map(id, first))
        self.steps = first[::-1] + [s for s in self.steps if id(s) not in chosen]

    def moments(
        self, ends: Iterable[Held], start: Iterable[Held] = ()
    ) -> tuple[Moment, ...]:
        """Returns the arrays that exist at the start, and then during each step.

        Args:
          ends: The results, which exist until the end.
          start: Arrays that exist at the start.
        """
        last: dict[Held, int] = {}
        for number, step in enumerate(self.steps):
            last |= dict.fromkeys((*step.reads, *step.writes), number)
        last |= dict.fromkeys(ends, len(self.steps))
        live = dict.fromkeys(array for array in start if array in last)
        moments = [tuple(live)]
        for number, step in enumerate(self.steps):
            dying = [h for h in step.reads if last[h] == number and h in live]
            replaced = _replaced(step, dying)
            now = dict.fromkeys((*live, *step.writes, *step.inside))
            moments.append(tuple(array for array in now if array not in replaced))
            live |= dict.fromkeys(step.writes)
            live = dict.fromkeys(array for array in live if last[array] > number)
        return tuple(moments)


def _replaced(step: _Step, dying: Sequence[Held]) -> set[Held]:
    """Returns the arrays among `dying` that a step overwrites with its results.

    `dying` are the arrays that the step reads and no later step reads.
    """
    replaced: set[Held] = set()
    for array in step.in_place:
        fitting = (h for h in dying if h.nbytes == array.nbytes and h not in replaced)
        replaced.update(list(fitting)[:1])
    return replaced


def _role(reads: Iterable[Held]) -> Role:
    """Returns the role of an array that is computed from others."""
    roles = {array.role for array in reads}
    return "copy" if roles and roles <= {"parameter", "copy"} else "temporary"


def _inlined(eqn: core.JaxprEqn) -> core.Jaxpr | None:
    """Returns the program of an operation that only calls it, such as jit, or None."""
    bodies = [] if kind_of(eqn) is Kind.WRITE else bodies_of(eqn)
    fits = [
        body
        for body in bodies
        if len(body.invars) == len(eqn.invars) and len(body.outvars) == len(eqn.outvars)
    ]
    return fits[0] if fits else None


def _is_stacked(outer: Any, inner: Any) -> bool:
    """Returns whether a loop slices, or stacks, an array along its first axis."""
    return outer.aval.ndim > inner.aval.ndim
