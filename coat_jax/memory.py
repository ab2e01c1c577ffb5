"""What differentiation costs in memory, measured: reports of a function's residuals."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

from coat_jax.residuals import FP8_SCOPE, Linearized, forward_backward, linearize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Residual:
    """One array that the backward pass reads.

    Attributes:
      shape: Its shape.
      dtype: Its dtype.
      nbytes: Its size in bytes.
      is_argument: Whether it is an argument or a constant of the function: it exists
        anyway, nothing is saved.
      asked_by: The operation that it was saved for.
    """

    shape: tuple[int, ...]
    dtype: Any
    nbytes: int
    is_argument: bool
    asked_by: str


@dataclasses.dataclass(frozen=True)
class ResidualReport:
    """What `jax.vjp` saves of a function, largest first; prints as a table.

    Attributes:
      rows: One a saved array.
    """

    rows: tuple[Residual, ...]

    @property
    def nbytes(self) -> int:
        """Bytes saved, arguments not counted."""
        return sum(row.nbytes for row in self.rows if not row.is_argument)

    def __str__(self) -> str:
        lines = [f"{'MiB':>10}  {'saved':32}  for"]
        for row in self.rows:
            size = "argument" if row.is_argument else f"{row.nbytes / 2**20:.3f}"
            array = f"{row.dtype}{list(row.shape)}".replace(" ", "")
            lines.append(f"{size:>10}  {array:32}  {row.asked_by}")
        return "\n".join([*lines, f"{self.nbytes / 2**20:>10.3f}  in all"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Bytes of a function's compiled forward and backward pass.

    Attributes:
      argument_bytes: The arguments.
      output_bytes: The outputs and the gradients of all arguments.
      temp_bytes: What exists in between at once, at most.
      peak_bytes: The sum of the three, less what arguments and outputs share.
      residual_bytes: What autodiff saves between the passes, before XLA fuses.
    """

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    peak_bytes: int
    residual_bytes: int

    def __str__(self) -> str:
        rows = dataclasses.asdict(self).items()
        return "\n".join(f"{name:15} {value / 2**20:12.3f} MiB" for name, value in rows)


def residual_report(fn: Callable, *args: Any) -> ResidualReport:
    """Lists what `jax.vjp(fn, *args)` saves for the backward pass.

    Traces `fn`, computes nothing. An array that is saved twice is listed once.

    Args:
      fn: The function that is differentiated, such as a loss or a layer.
      *args: Its arguments: pytrees of arrays or of `jax.ShapeDtypeStruct`.

    Example:
      >>> import coat_jax as coat, jax.numpy as jnp
      >>> report = coat.residual_report(lambda x: jnp.sin(x) * 2, jnp.ones((8, 8)))
      >>> report.nbytes, len(report.rows)
      (256, 1)
    """
    traced = linearize(fn, *args)
    jaxpr = traced.forward.jaxpr
    given = {*jaxpr.invars, *jaxpr.constvars}
    first: dict[core.Var, int] = {}
    for index, var in enumerate(traced.residuals):
        if isinstance(var, core.Var):
            first.setdefault(var, index)
    rows = [_row(traced, index, var in given) for var, index in first.items()]
    return ResidualReport(tuple(sorted(rows, key=lambda r: (r.is_argument, -r.nbytes))))


def memory_report(fn: Callable, *args: Any) -> MemoryReport:
    """Compiles `fn` with its backward pass and reports the bytes of both.

    Args:
      fn: The function that is differentiated, such as a loss or a layer.
      *args: Its arguments: pytrees of arrays or of `jax.ShapeDtypeStruct`.

    Example:
      >>> import coat_jax as coat, jax.numpy as jnp
      >>> coat.memory_report(lambda x: jnp.sin(x) * 2, jnp.ones((8, 8))).residual_bytes
      256
    """
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
    """Device memory that a compiled program needs, its arguments included."""
    stats = compiled.memory_analysis()
    total = stats.argument_size_in_bytes + stats.output_size_in_bytes
    return total + stats.temp_size_in_bytes - stats.alias_size_in_bytes


def _row(traced: Linearized, index: int, is_argument: bool) -> Residual:
    var = traced.residuals[index]
    scope = _scope(traced.forward.jaxpr, var)
    return Residual(
        shape=var.aval.shape,
        dtype=var.aval.dtype,
        nbytes=var.aval.size * var.aval.dtype.itemsize,
        is_argument=is_argument,
        asked_by=FP8_SCOPE + scope if scope else traced.asked_by(index),
    )


def _scope(jaxpr: core.Jaxpr, var: core.Var) -> str | None:
    """Whom an FP8 copy is for, as `fp8_remat` put it down, also from within a scan."""
    for eqn in jaxpr.eqns:
        if var not in eqn.outvars:
            continue
        position = eqn.outvars.index(var)
        for body in core.jaxprs_in_params(eqn.params):
            inner = body.outvars[position]
            if isinstance(inner, core.Var) and (found := _scope(body, inner)):
                return found
        _, marked, name = str(eqn.source_info.name_stack).rpartition(FP8_SCOPE)
        return name.split(";")[0] if marked else None
    return None
