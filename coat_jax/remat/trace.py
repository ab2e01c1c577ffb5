"""Traces `jax.vjp`, to find the arrays it saves and the operations that read them."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import float0
from jax.extend import core

from coat_jax.programs.graph import read_in
from coat_jax.programs.primitives import (
    Kind,
    bodies_of,
    has_pole,
    is_kernel,
    is_layout,
    keeps_parts,
    kind_of,
)
from coat_jax.quantization import array, formats
from coat_jax.remat.notes import Note
from pallas_kernels.dispatch import placement

# Files with code that is not the user's. Stack frames in these files show how an
# operation was traced.
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_NOT_USERS = (
    os.path.dirname(jax.__file__) + os.sep,
    os.path.dirname(flax.__file__) + os.sep,
    functools.__file__,
    contextlib.__file__,
    array.__file__,
    formats.__file__,
    os.path.dirname(__file__) + os.sep,
    os.path.join(_PACKAGE, "meshes.py"),
    os.path.join(_PACKAGE, "fp8") + os.sep,
    os.path.join(_PACKAGE, "fusion") + os.sep,
)
# The `checkpoint_name` that `fp8_remat` gives to arrays that it saves unquantized. The
# name scope has the reason.
SAVED_NAME = "fp8_remat"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Residual:
    """An array that the backward pass reads.

    Attributes:
      shape: The shape of the array.
      dtype: The dtype of the array.
      nbytes: The size in bytes.
      is_argument: Whether the array is an argument or a constant of the function. In
        this case the array exists anyway, so saving it costs nothing.
      asked_by: The operation that the array is saved for.
      name: The name that `jax.ad_checkpoint.checkpoint_name` gave it, if any.
      kept: The note of `fp8_remat`: the format, or why the array is unquantized. Empty
        for arrays that `fp8_remat` did not save.
    """

    shape: tuple[int, ...]
    dtype: Any
    nbytes: int
    is_argument: bool
    asked_by: str
    name: str | None
    kept: str


@dataclasses.dataclass(frozen=True)
class Linearized:
    """The forward and the backward program of `jax.vjp(fn, *args)`.

    Attributes:
      forward: The program that takes the leaves of the arguments. It returns the
        outputs of the function, then the residuals.
      num_outputs: The number of outputs of the function.
      out_tree: The tree structure of the function's output.
      vjp_tree: The tree structure of the function that `jax.vjp` returns. Its leaves
        are the residuals.
      backward: The program that takes the residuals, then the cotangents. It returns
        the gradients.
    """

    forward: core.ClosedJaxpr
    num_outputs: int
    out_tree: Any
    vjp_tree: Any
    backward: core.ClosedJaxpr

    @cached_property
    def residuals(self) -> list[core.Var | core.Literal]:
        """The residuals, as variables of the forward program."""
        return self.forward.jaxpr.outvars[self.num_outputs :]

    @cached_property
    def _variables(self) -> frozenset[core.Var]:
        jaxpr = self.forward.jaxpr
        results = (var for eqn in jaxpr.eqns for var in eqn.outvars)
        return frozenset((*jaxpr.invars, *results))

    def has(self, var: core.Var) -> bool:
        """Returns whether `var` belongs to the forward program, not to a nested one."""
        return var in self._variables

    def readers(self, index: int, *, cut: bool = True) -> list[core.JaxprEqn]:
        """Returns the operations of the backward program that read residual `index`.

        Operations that only move or convert elements do not count as readers. Their
        own readers are returned in their place. With `cut` this is done for slices,
        too.
        """

        def through(eqn: core.JaxprEqn) -> bool:
            return is_layout(eqn) and (cut or kind_of(eqn) is not Kind.CUT)

        return [reader.eqn for reader in self._reads(index, through)]

    def asked_by(self, index: int) -> str:
        """Returns the name and line of an operation that reads residual `index`.

        Returns "the output" if no operation reads it.
        """
        for reader in self._reads(index):
            location = _place((*reader.calls, reader.eqn))
            return (
                f"{_name(reader.eqn)} in {location}" if location else _name(reader.eqn)
            )
        return "the output"

    @cached_property
    def unread(self) -> frozenset[int]:
        """The indices of the residuals that no operation of the backward program reads.

        The rule of `jax.numpy.logaddexp`, for example, saves an array of this kind.
        """
        read = read_in(self.backward.jaxpr)
        pairs = zip(self.residuals, self.backward.jaxpr.invars, strict=False)
        return frozenset(
            i
            for i, (residual, v) in enumerate(pairs)
            if v not in read and isinstance(residual.aval.dtype, np.dtype)
        )

    def is_argument(self, var: core.Var | core.Literal) -> bool:
        """Returns whether an array is an argument or a constant."""
        jaxpr = self.forward.jaxpr
        while (maker := maker_of(jaxpr, var)) and keeps_parts(maker):
            (var,) = maker.invars
        return not isinstance(var, core.Var) or var in (*jaxpr.invars, *jaxpr.constvars)

    def note(self, index: int) -> Note | None:
        """Returns the note that `fp8_remat` left on residual `index`, or None."""
        for eqn in _producers(self.forward.jaxpr, self.residuals[index]):
            if note := Note.within(str(eqn.source_info.name_stack)):
                return note
        return None

    def describe(self, index: int) -> Residual:
        """Returns the entry of residual `index` in reports."""
        aval = self.residuals[index].aval
        note = self.note(index)
        names = (
            eqn.params["name"]
            for eqn in _producers(self.forward.jaxpr, self.residuals[index])
            if eqn.primitive.name == "name" and eqn.params["name"] != SAVED_NAME
        )
        return Residual(
            shape=aval.shape,
            dtype=aval.dtype,
            nbytes=aval.size * aval.dtype.itemsize,
            is_argument=self.is_argument(self.residuals[index]),
            asked_by=note.reader if note else self.asked_by(index),
            name=next(names, None),
            kept=note.kept if note else "",
        )

    def with_outputs(self, more: Sequence[core.Var]) -> core.ClosedJaxpr:
        """Returns the forward program with the variables `more` as further outputs."""
        jaxpr = self.forward.jaxpr
        info = jaxpr.debug_info.with_unknown_names()
        outvars = [*jaxpr.outvars, *more]
        return core.ClosedJaxpr(
            jaxpr.replace(outvars=outvars, debug_info=info), self.forward.consts
        )

    def source_dtype(self, var: core.Var) -> jnp.dtype:
        """Returns bfloat16 if `var` was cast from it, or else the dtype of `var`."""
        for eqn in _producers(self.forward.jaxpr, var):
            dtype = eqn.invars[0].aval.dtype if eqn.invars else None
            if eqn.primitive.name == "convert_element_type" and dtype == jnp.bfloat16:
                return dtype
            if not is_layout(eqn) or eqn.primitive.name == "reduce_precision":
                break
        return var.aval.dtype

    def feeds_exponential(self, index: int) -> bool:
        """Returns whether the backward pass takes the exponential of residual `index`.

        The exponential of a difference with the residual counts, too.
        """

        def through(eqn: core.JaxprEqn) -> bool:
            return is_layout(eqn) or eqn.primitive.name == "sub"

        reads = self._reads(index, through)
        return any(reader.eqn.primitive.name in ("exp", "exp2") for reader in reads)

    def has_pole(self, index: int) -> bool:
        """Returns whether a backward operation has a pole where residual `index` is 0.

        Examples are division by the residual and its logarithm. Numbers that are far
        below the amax of their group become zero in FP8.
        """
        return any(
            has_pole(reader.eqn, reader.position) for reader in self._reads(index)
        )

    def _reads(
        self, index: int, through: Callable[[core.JaxprEqn], bool] = is_layout
    ) -> Generator["_Read", None, set[int]]:
        jaxpr = self.backward.jaxpr
        return _readers(jaxpr, jaxpr.invars[index], through)


def linearize(fn: Callable, *args: Any, constants: int = 0) -> Linearized:
    """Traces `jax.vjp(fn, *args)` and computes nothing.

    The first `constants` arguments are not differentiated.
    """

    def differentiated(*args):
        fixed, arguments = args[:constants], args[constants:]
        return jax.vjp(partial(fn, *fixed), *arguments)

    forward, (out, vjp) = jax.make_jaxpr(differentiated, return_shape=True)(*args)
    outputs, out_tree = jax.tree.flatten(out)
    vjp_tree = jax.tree.structure(vjp)

    def backward(leaves, cotangents):
        return _gradients(jax.tree.unflatten(vjp_tree, leaves), out, cotangents)

    # Only the types say over which mesh axes of a `shard_map` the values vary.
    types = forward.out_avals
    cotangents = [t for t in types[: len(outputs)] if _is_inexact(t)]
    return Linearized(
        forward=forward,
        num_outputs=len(outputs),
        out_tree=out_tree,
        vjp_tree=vjp_tree,
        backward=jax.make_jaxpr(backward)(types[len(outputs) :], cotangents),
    )


def forward_backward(fn: Callable) -> Callable:
    """Returns a function of the same arguments that returns results and gradients.

    The gradients of the sum of all floating results are taken with respect to each
    floating argument.
    """

    def run(*args):
        out, vjp = jax.vjp(fn, *args)
        cotangents = [jnp.ones_like(o) for o in jax.tree.leaves(out) if _is_inexact(o)]
        return out, _gradients(vjp, out, cotangents)

    return run


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _gradients(vjp: Callable, out: Any, cotangents: Iterable[Any]) -> list[Any]:
    """Returns the gradients of the differentiable arguments.

    `cotangents` has one entry per differentiable output.
    """
    values = iter(cotangents)
    every = jax.tree.map(
        lambda o: next(values) if _is_inexact(o) else np.zeros(o.shape, float0), out
    )
    return [g for g in jax.tree.leaves(vjp(every)) if g.dtype != float0]


def _name(eqn: core.JaxprEqn) -> str:
    name = eqn.params.get("name") if is_kernel(eqn) else None
    return placement.operation_of(eqn.params) or name or eqn.primitive.name


def _place(path: Sequence[core.JaxprEqn]) -> str | None:
    """Returns the function and source line of the last operation of `path`, or None.

    Each operation of `path` contains the next. Operations of a backward pass have the
    line where their function was called. A jitted function is traced once for all its
    calls, so its operations have the line of the first call. Lines of other calls than
    the call in `path` are ignored.
    """
    user_frames: list[tuple[str, str, int]] = []
    for eqn in path:
        traceback = eqn.source_info.traceback
        frames = [
            (frame.function_name, frame.file_name, frame.line_num)
            for frame in (traceback.frames if traceback is not None else ())
            if not frame.file_name.startswith(_NOT_USERS)
        ]
        elsewhere = (
            user_frames
            and frames[-1:] == user_frames[-1:]
            and user_frames[0] not in frames
        )
        if frames and not elsewhere:
            user_frames = frames
    if not user_frames:
        return None
    function, file, line = user_frames[0]
    return f"{function.split('.<locals>')[0]} ({os.path.basename(file)}:{line})"


class _Read(NamedTuple):
    """An operation that reads a variable.

    Attributes:
      eqn: The operation.
      position: The index of the operand that is the variable.
      calls: The operations that contain `eqn`, outermost first.
    """

    eqn: core.JaxprEqn
    position: int
    calls: tuple[core.JaxprEqn, ...]


def _readers(
    jaxpr: core.Jaxpr,
    var: core.Var,
    through: Callable[[core.JaxprEqn], bool],
    calls: tuple[core.JaxprEqn, ...] = (),
) -> Generator[_Read, None, set[int]]:
    """Yields the operations that read `var`.

    Operations inside jit, scan, cond and checkpoint are included. The readers of an
    operation's results take the place of an operation that `through` accepts. The
    generator's return value is the indices of the outputs of `jaxpr` that are `var`,
    moved or converted.
    """
    outputs = {i for i, out in enumerate(jaxpr.outvars) if out is var}
    for eqn in jaxpr.eqns:
        for position, operand in enumerate(eqn.invars):
            if operand is not var:
                continue
            positions = set()
            inside = list(_inside(eqn, position))
            for body, inner in inside:
                positions |= yield from _readers(body, inner, through, (*calls, eqn))
            if through(eqn):
                # A barrier returns each operand at the operand's own position.
                barrier = eqn.primitive.name == "optimization_barrier"
                positions = {position} if barrier else {*range(len(eqn.outvars))}
            elif not inside:
                yield _Read(eqn, position, calls)
            for i in positions:
                outputs |= yield from _readers(jaxpr, eqn.outvars[i], through, calls)
    return outputs


def maker_of(jaxpr: core.Jaxpr, var: Any) -> core.JaxprEqn | None:
    """Returns the operation of a program that computes `var`, or None."""
    return next((eqn for eqn in jaxpr.eqns if var in eqn.outvars), None)


def _producers(jaxpr: core.Jaxpr, var: Any) -> Iterator[core.JaxprEqn]:
    """Yields the operations that compute `var`.

    Operations inside jit, scan or checkpoint come before the operation that contains
    them. After an operation that moves or converts values come the producers of its
    operand.
    """
    eqn = maker_of(jaxpr, var)
    if eqn is None or isinstance(var, core.Literal):
        return
    position = eqn.outvars.index(var)
    bodies = [body for body in bodies_of(eqn) if len(body.outvars) == len(eqn.outvars)]
    for body in bodies:
        yield from _producers(body, body.outvars[position])
    yield eqn
    if is_layout(eqn):
        is_barrier = eqn.primitive.name == "optimization_barrier"
        yield from _producers(jaxpr, eqn.invars[position if is_barrier else 0])


def _inside(eqn: core.JaxprEqn, position: int) -> Iterator[tuple[core.Jaxpr, core.Var]]:
    """Yields the programs that an operation runs, such as the branches of a cond.

    Each program comes with its input variable for the operand at `position`. Loops by
    `while` are left out.
    """
    if eqn.primitive.name == "while":
        return
    for body in bodies_of(eqn):
        # The branches of a cond do not take its index.
        at = position - (len(eqn.invars) - len(body.invars))
        if at >= 0:
            yield body, body.invars[at]
