"""Makes functions that are traced once, and are one call in programs that use them."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import partial_eval as pe

from pallas_kernels import versions
from pallas_kernels.dispatch import operations

# The most programs of one function, for different argument types, that are kept.
KEPT = 64


def outlined(fn: Callable) -> Callable:
    """Wraps `fn` so that it is traced once for each combination of argument types.

    In a program the wrapped function is one jitted call. An argument that `fn` returns,
    and a result that it returns twice, are no results of the call, because a loop would
    stack each of them. If no argument is traced into a program, `fn` is called
    directly. `fn` must close over no tracers.
    """
    called, jitted = functools.lru_cache(maxsize=KEPT)(_called), jax.jit(fn)

    @functools.wraps(fn)
    def call(*args):
        leaves = jax.tree.leaves(args)
        if not any(isinstance(x, pe.DynamicJaxprTracer) for x in leaves):
            return fn(*args)
        with operations.counted():
            traced = jitted.trace(*args)
            results = called(traced.jaxpr, fn.__name__)(leaves)
        return jax.tree.unflatten(traced.out_tree, results)

    return call


def _called(jaxpr: core.ClosedJaxpr, name: str) -> Callable[[Sequence[Any]], list[Any]]:
    """Returns a function of a program's arguments that returns its results.

    The program runs in one jitted call of the given name.
    """
    program = jaxpr.jaxpr
    inputs = {*program.invars, *program.constvars}
    computed = dict.fromkeys(
        v for v in program.outvars if isinstance(v, core.Var) and v not in inputs
    )
    literals = [v for v in program.outvars if isinstance(v, core.Literal)]
    results = program.replace(
        outvars=[*computed, *literals],
        debug_info=program.debug_info.with_unknown_names(),
    )
    body = core.jaxpr_as_fun(core.ClosedJaxpr(results, jaxpr.consts))

    def run(*args):
        return body(*args)

    run.__name__ = name
    jitted = jax.jit(run)

    def call(args):
        outputs = iter(jitted(*args))
        values = dict(zip(program.constvars, jaxpr.consts, strict=True))
        values |= zip(program.invars, args, strict=True)
        values |= zip(computed, outputs, strict=False)
        return [
            values[v] if isinstance(v, core.Var) else next(outputs)
            for v in program.outvars
        ]

    return call


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class AxisEnv:
    """The named axes, such as an axis of `jax.vmap`, around a differentiated function.

    JAX runs the backward pass of a custom derivative under `jax.vmap` outside of the
    axis, where a trace of a collective would not find its name.

    Attributes:
      sizes: The name and the size of each axis.
    """

    sizes: tuple[tuple[Any, int], ...]

    @classmethod
    def current(cls) -> "AxisEnv":
        """Returns the axes within which the caller is traced."""
        return cls(tuple(versions.axis_sizes().items()))

    def call[Result](self, fn: Callable[..., Result], *args: Any) -> Result:
        """Returns `fn(*args)`, called within the axes that the caller lacks."""
        bound = versions.axis_sizes()
        missing = [(name, size) for name, size in self.sizes if name not in bound]
        with versions.within_axes(missing):
            return fn(*args)
