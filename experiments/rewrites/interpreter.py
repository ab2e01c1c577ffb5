"""Runs programs operation by operation instead of compiling each program.

JAX caches each compiled operation, so that most operations of a new program are
compiled already.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

_CALLS = frozenset({"closed_call", "jit", "remat2", "custom_jvp_call"})


def interpreted(fn: Callable, *args: Any) -> Any:
    """Returns `fn(*args)`, computed equation by equation of the jaxpr.

    Many small programs share compiled operations, where `jax.jit` would compile each
    program separately.
    """
    closed, out = jax.make_jaxpr(fn, return_shape=True)(*args)
    results = _results(closed.jaxpr, closed.consts, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(out), results)


def _results(program: core.Jaxpr, consts: list, arrays: list) -> list[Any]:
    values = dict(zip(program.constvars, consts, strict=True))
    values |= zip(program.invars, arrays, strict=True)

    def value(v: Any) -> Any:
        return v.val if isinstance(v, core.Literal) else values[v]

    for eqn in program.eqns:
        operands = [value(v) for v in eqn.invars]
        if eqn.primitive.name in _CALLS:
            body = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
            closed = body if isinstance(body, core.ClosedJaxpr) else None
            inner = closed.jaxpr if closed else body
            results = _results(inner, closed.consts if closed else [], operands)
        else:
            params = eqn.primitive.get_bind_params(eqn.params)
            # Older versions of JAX return functions, too.
            functions, params = params if isinstance(params, tuple) else ((), params)
            with eqn.ctx.manager:
                results = eqn.primitive.bind(*functions, *operands, **params)
            results = results if eqn.primitive.multiple_results else [results]
        values |= zip(eqn.outvars, results, strict=True)
    return [value(v) for v in program.outvars]
