"""Merges calls that read the same array, such as the matmuls of queries and keys.

A function that saves FP8 codes of its activations cannot know who else saves them. In
`fp8_remat` it can leave that to the plan of residuals: its merged form, which takes
several weights, saves the activations themselves, and the plan decides whether they are
saved in FP8 or recomputed.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence

import jax
from jax.extend import core

from coat_jax.remat.programs import (
    deduplicated,
    embedded,
    inlined,
    variables,
)
from pallas_kernels import dispatch

# The merged forms of calls, by the names that `mergeable` gives to the calls.
_MERGED: dict[str, Callable] = {}


@functools.cache
def mergeable(fn: Callable, merged: Callable, ranks: tuple[int, int]) -> Callable:
    """Returns `fn(x, w)` in a form that `fp8_remat` can find and merge.

    Args:
      fn: A function of activations and weights, which returns one array.
      merged: A function of activations, a tuple of weights and the dtype of results.
        It returns a tuple of the results of `fn`.
      ranks: The ranks of activations and weights. They are part of the call's name, so
        that calls that `vmap` has changed are not found.
    """

    def call(x, w):
        return fn(x, w)

    call.__name__ = "_".join((fn.__name__, *map(str, ranks)))
    _MERGED[call.__name__] = merged
    jitted = jax.jit(call)

    def traced(x, w):
        # `explain` counts calls, also of functions that JAX has traced before.
        with dispatch.counted():
            return jitted(x, w)

    return traced


def merged(program: core.Jaxpr, is_param: Sequence[bool]) -> core.Jaxpr:
    """Merges the mergeable calls of a program that read the same activations.

    Weights must follow from parameters, as `is_param` marks them among the arguments.
    """
    if not any(map(_has_call, program.eqns)):
        return program
    program = deduplicated(inlined(program, _contains_call))
    fixed = _from_params(program, is_param)
    groups = defaultdict(list)
    for eqn in filter(_is_call, program.eqns):
        x, w = eqn.invars
        if isinstance(x, core.Var) and x not in fixed and variables([w]) <= fixed:
            groups[x, eqn.params["name"], eqn.outvars[0].aval.dtype].append(eqn)
    first = {id(eqns[0]): eqns for eqns in groups.values()}
    others = {id(eqn) for eqns in groups.values() for eqn in eqns[1:]}
    read = {eqn.invars[1] for eqns in groups.values() for eqn in eqns}
    weights = _makers(program, read)
    eqns = [eqn for eqn in program.eqns if id(eqn) in weights]
    for eqn in program.eqns:
        if id(eqn) in first:
            eqns.extend(_merged(first[id(eqn)]))
        elif id(eqn) not in others | weights:
            eqns.append(eqn)
    return program.replace(eqns=eqns)


def _is_call(eqn: core.JaxprEqn) -> bool:
    if eqn.primitive.name != "jit" or eqn.params["name"] not in _MERGED:
        return False
    ranks = [v.aval.ndim for v in eqn.invars]
    return eqn.params["name"].endswith("_".join(("", *map(str, ranks))))


def _contains_call(eqn: core.JaxprEqn) -> bool:
    return eqn.primitive.name == "jit" and not _is_call(eqn) and _has_call(eqn)


def _has_call(eqn: core.JaxprEqn) -> bool:
    """Returns whether an operation is a mergeable call, or jitted and contains one."""
    if eqn.primitive.name != "jit":
        return False
    return _is_call(eqn) or any(map(_has_call, eqn.params["jaxpr"].jaxpr.eqns))


def _from_params(program: core.Jaxpr, is_param: Sequence[bool]) -> set[core.Var]:
    """Returns the variables that follow from parameters and constants alone."""
    found = {v for v, p in zip(program.invars, is_param, strict=True) if p}
    found |= {*program.constvars}
    for eqn in program.eqns:
        if variables(eqn.invars) <= found and not eqn.effects:
            found |= {*eqn.outvars}
    return found


def _makers(program: core.Jaxpr, wanted: set[core.Var]) -> set[int]:
    """Returns the identities of all operations that `wanted` follows from."""
    found = set()
    for eqn in reversed(program.eqns):
        if not wanted.isdisjoint(eqn.outvars):
            found.add(id(eqn))
            wanted = wanted | variables(eqn.invars)
    return found


def _merged(eqns: Sequence[core.JaxprEqn]) -> list[core.JaxprEqn]:
    """Returns the operations of the merged form of calls."""
    call = _MERGED[eqns[0].params["name"]]
    x = eqns[0].invars[0]
    weights = [eqn.invars[1] for eqn in eqns]
    results = [v for eqn in eqns for v in eqn.outvars]
    closed = jax.make_jaxpr(functools.partial(call, dtype=results[0].aval.dtype))(
        x.aval, tuple(w.aval for w in weights)
    )
    made, _ = embedded(closed.jaxpr, [x, *weights], results)
    return [eqn.replace(source_info=eqns[0].source_info) for eqn in made]
