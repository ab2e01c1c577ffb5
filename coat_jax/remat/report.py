"""Reports of the memory that differentiating a function takes."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from coat_jax.programs.primitives import bodies_of
from coat_jax.remat.trace import Residual, forward_backward, linearize, maker_of
from pallas_kernels.checks import summary
from pallas_kernels.dispatch import operations


@dataclasses.dataclass(frozen=True)
class ResidualReport:
    """A list of the arrays that `jax.vjp` saves for a function; prints as a table.

    Attributes:
      rows: One entry per saved array, the largest first, arguments last.
    """

    rows: tuple[Residual, ...]

    @property
    def nbytes(self) -> int:
        """The number of bytes saved, not counting arguments."""
        return sum(row.nbytes for row in self.rows if not row.is_argument)

    def __str__(self) -> str:
        lines = [f"{'MiB':>10}  {'saved':32}  {'as':34}  for"]
        for row in self.rows:
            size = "argument" if row.is_argument else f"{row.nbytes / 2**20:.3f}"
            array = f"{row.dtype}{list(row.shape)}".replace(" ", "")
            lines.append(f"{size:>10}  {array:32}  {row.kept:34}  {row.asked_by}")
        return "\n".join([*lines, f"{self.nbytes / 2**20:>10.3f}  in all"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """The bytes that the compiled forward and backward pass of a function take.

    Attributes:
      argument_bytes: The size of the arguments.
      output_bytes: The size of the outputs and of the gradients of all arguments.
      temp_bytes: The peak size of all temporary arrays.
      peak_bytes: The sum of these three sizes, minus the memory that outputs share with
        arguments.
      residual_bytes: The size of the arrays that autodiff saves for the backward pass,
        before XLA fuses operations.
    """

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    peak_bytes: int
    residual_bytes: int

    def __str__(self) -> str:
        rows = dataclasses.asdict(self).items()
        return "\n".join(f"{name:15} {value / 2**20:12.3f} MiB" for name, value in rows)


def residual_report(
    fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> ResidualReport:
    """Lists the arrays that `jax.vjp(fn, *args)` saves for the backward pass.

    `fn` is traced and nothing is computed. An array that is saved twice is listed once.
    Arrays that an `fp8_remat` inside `fn` saves have a note: their format, or why they
    are unquantized. Arguments of the wrapped function have a note only if they are
    copied.

    Args:
      fn: The function that is differentiated, such as a loss or a layer.
      *args: Its arguments: pytrees of arrays or of `jax.ShapeDtypeStruct`.
      **kwargs: Its keyword arguments. Those that are not arrays are static, such as
        `train=False`.

    Examples:
      >>> import coat_jax as coat, jax.numpy as jnp
      >>> report = coat.residual_report(lambda x: jnp.sin(x) * 2, jnp.ones((8, 8)))
      >>> report.nbytes, len(report.rows)
      (256, 1)
    """
    check_callable("residual_report", fn)
    fn, args = _positional(fn, args, kwargs)
    with operations.traced_anew():  # Cached traces have the lines of earlier calls.
        traced = linearize(fn, *args)
    jaxpr, first = traced.forward.jaxpr, {}
    for index, var in enumerate(traced.residuals):
        if isinstance(var, core.Var):
            # A loop may return an array of its last step and the stack of all.
            first.setdefault((*_origin(jaxpr, var), var.aval.shape), index)
    rows = [traced.describe(index) for index in first.values()]
    return ResidualReport(tuple(sorted(rows, key=lambda r: (r.is_argument, -r.nbytes))))


def _positional(
    fn: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable, tuple[Any, ...]]:
    """Returns a function without keyword arguments, and its arguments for this call.

    If there are keyword arguments, the floating arrays among them become the last
    argument, a list.
    """
    if not kwargs:
        return fn, args
    leaves, tree = jax.tree.flatten(kwargs)
    floats = [
        jnp.issubdtype(getattr(x, "dtype", np.dtype(bool)), jnp.inexact) for x in leaves
    ]

    def positional(*args):
        *args, arrays = args
        remaining = iter(arrays)
        values = zip(leaves, floats, strict=True)
        keywords = [next(remaining) if is_float else x for x, is_float in values]
        return fn(*args, **jax.tree.unflatten(tree, keywords))

    return positional, (*args, list(itertools.compress(leaves, floats)))


def _origin(jaxpr: core.Jaxpr, var: core.Var) -> tuple[Any, ...]:
    """Returns a key that is equal for variables with the same values.

    The key ends with the variable that the values come from, before any constraints of
    its sharding. If operations such as loops contain this variable, these operations
    come before the variable in the key, the outermost first.
    """
    eqn = maker_of(jaxpr, var)
    if eqn is None:
        return (var,)
    if eqn.primitive.name == "sharding_constraint":
        return _origin(jaxpr, eqn.invars[0])
    for body in bodies_of(eqn):
        if len(body.outvars) == len(eqn.outvars):
            inner = body.outvars[eqn.outvars.index(var)]
            if isinstance(inner, core.Var):
                *loops, origin = _origin(body, inner)
                # Two calls of a function may have the same program.
                return (var,) if origin in body.invars else (id(eqn), *loops, origin)
    return (var,)


def check_callable(name: str, fn: Any) -> None:
    """Raises TypeError unless `fn` is a function."""
    if not callable(fn):
        raise TypeError(f"{name} takes a function, got {summary(fn)}")


def memory_report(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> MemoryReport:
    """Compiles `fn` with its backward pass and reports the bytes of both.

    Args:
      fn: The function that is differentiated, such as a loss or a layer.
      *args: Its arguments: pytrees of arrays or of `jax.ShapeDtypeStruct`.
      **kwargs: Its keyword arguments. Those that are not arrays are static, such as
        `train=False`.

    Examples:
      >>> import coat_jax as coat, jax.numpy as jnp
      >>> coat.memory_report(lambda x: jnp.sin(x) * 2, jnp.ones((8, 8))).residual_bytes
      256
    """
    check_callable("memory_report", fn)
    fn, args = _positional(fn, args, kwargs)
    compiled = jax.jit(forward_backward(fn)).lower(*args).compile()
    stats = compiled.memory_analysis()
    return MemoryReport(
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
        peak_bytes=peak_bytes(compiled),
        residual_bytes=residual_report(fn, *args).nbytes,
    )


def peak_bytes(compiled: jax.stages.Compiled) -> int:
    """Returns the bytes on the device that a compiled program takes at its peak.

    Its arguments and results are included.
    """
    stats = compiled.memory_analysis()
    total = stats.argument_size_in_bytes + stats.output_size_in_bytes
    return total + stats.temp_size_in_bytes - stats.alias_size_in_bytes
