"""Merges calls that read the same array, such as the matmuls of queries and keys.

A function that saves FP8 codes of its activations cannot know who else saves them. In
`fp8_remat` it can leave that to the plan of residuals: its merged form, which takes
several weights, saves the activations themselves, and the plan decides whether they are
saved in FP8 or recomputed.

A gated MLP is one call: of the merged matmuls of gate and up, the gate, and the matmul
that follows, which then reads the codes that the gate's kernel writes. Likewise a norm
belongs to the matmuls that read it, and an activation to the one matmul that does, if
nothing else reads it.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from coat_jax.remat.gates import Activated, Gate, activation_of, gate_of
from coat_jax.remat.norms import NormOf, Source, norm_of
from coat_jax.remat.programs import (
    deduplicated,
    embedded,
    inlined,
    variables,
)
from pallas_kernels.checks import WIDE


class Forms(NamedTuple):
    """The merged forms of calls `fn(x, w)` of activations and weights.

    Attributes:
      merged: A function of the source of activations, a tuple of weights, a norm and
        the dtype of results. It returns a tuple of the results of `fn` for the source's
        array or, unless it is None, its norm.
      gated: A function of the source of activations, the weights of gate, up and down,
        a norm, the name of the activation, and the dtypes of gate and of the result, if
        there is one. It returns `fn(activation(fn(x, gate)) * fn(x, up), down)`, with x
        as in `merged`.
      activated: A function of activations, weights, the name of the activation, and the
        dtype of the result, if there is one. It returns `fn(activation(x), w)`.
    """

    merged: Callable
    gated: Callable | None = None
    activated: Callable | None = None


# The forms of calls, by the names of their jitted functions. A name ends with the ranks
# of activations and weights, so that calls that `vmap` has changed are not found.
FORMS: dict[str, Forms] = {}


def merged(program: core.Jaxpr, is_param: Sequence[bool], fused: bool) -> core.Jaxpr:
    """Merges the mergeable calls of a program that read the same activations.

    Weights must follow from parameters, as `is_param` marks them among the arguments.
    With `fused`, norms, activations and gated MLPs are merged, too.
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
    read = {eqn.invars[1] for eqns in groups.values() for eqn in eqns}
    weights = _makers(program, read)
    uses = _Uses.of(program)
    norms = dict(_norms(uses, groups, fixed)) if fused else {}
    replaced: dict[int, list[core.JaxprEqn]] = {}
    for found in norms.values():
        own = (eqn for eqn in found.eqns if not fixed.issuperset(eqn.outvars))
        replaced |= {id(eqn): [] for eqn in own}
    for mlp in list(_mlps(uses, groups)) if fused else []:
        pair = groups.pop(mlp.pair)
        (down,) = groups.pop(mlp.down)
        replaced |= {id(eqn): [] for eqn in (*pair, *mlp.gate.eqns)}
        replaced[id(down)] = _gated(mlp.gate, pair, down, norms.get(mlp.pair))
    for key, found in list(_activations(uses, groups)) if fused else []:
        (down,) = groups.pop(key)
        replaced |= {id(eqn): [] for eqn in found.eqns}
        replaced[id(down)] = _activated(found, down)
    for key, eqns in groups.items():
        replaced |= {id(eqn): [] for eqn in eqns[1:]}
        replaced[id(eqns[0])] = _merged(eqns, norms.get(key))
    eqns = [eqn for eqn in program.eqns if id(eqn) in weights]
    for eqn in program.eqns:
        if id(eqn) not in weights:
            eqns.extend(replaced.get(id(eqn), [eqn]))
    return program.replace(eqns=eqns)


class _Uses(NamedTuple):
    """The operations that compute and read the variables of a program.

    Attributes:
      program: The program.
      makers: The operation that computes each variable, unless it is a mergeable call.
      readers: The operations that read each variable, and the program for its results.
      places: The place of each operation in the program, by its identity.
    """

    program: core.Jaxpr
    makers: dict[core.Var, core.JaxprEqn]
    readers: dict[core.Var, list[Any]]
    places: dict[int, int]

    @classmethod
    def of(cls, program: core.Jaxpr) -> "_Uses":
        """Returns the uses of a program's variables."""
        between = (eqn for eqn in program.eqns if not _is_call(eqn))
        makers = {var: eqn for eqn in between for var in eqn.outvars}
        readers = defaultdict(list)
        for reader in (*program.eqns, program):
            operands = program.outvars if reader is program else reader.invars
            for var in variables(operands):
                readers[var].append(reader)
        places = {id(eqn): place for place, eqn in enumerate(program.eqns)}
        return cls(program, makers, readers, places)

    def only_in(
        self,
        eqns: Sequence[core.JaxprEqn],
        calls: Sequence[core.JaxprEqn],
        besides: Collection[core.Var] = (),
    ) -> bool:
        """Returns whether nothing but `eqns` and `calls` reads what `eqns` compute.

        `besides` are variables that others may read.
        """
        own = {id(eqn) for eqn in (*eqns, *calls)}
        made = (v for eqn in eqns for v in eqn.outvars if v not in besides)
        return all(id(reader) in own for v in made for reader in self.readers[v])


def _norms(
    uses: _Uses, groups: Mapping[Any, list], fixed: set[core.Var]
) -> Iterator[tuple[Any, NormOf]]:
    """Yields the norms that nothing but one group of calls reads, by the groups' keys.

    Calls of batches of weights have no merged form with a norm.
    """
    for key, eqns in groups.items():
        x, *_ = key
        if x.aval.ndim > 2 or x.aval.dtype != jnp.bfloat16:
            continue
        found = norm_of(x, uses.program, uses.makers, uses.places, fixed)
        if found and uses.only_in(found.eqns, eqns, besides=fixed):
            yield key, found


class _Mlp(NamedTuple):
    """A gated MLP: its gate, and the keys of its calls."""

    gate: Gate
    pair: Any
    down: Any


def _mlps(uses: _Uses, groups: Mapping[Any, list]) -> Iterator[_Mlp]:
    """Yields the gated MLPs among calls, which are grouped by what they read."""
    program, makers, readers, _ = uses
    pairs = {
        eqn.outvars[0]: key
        for key, eqns in groups.items()
        for eqn in eqns
        if len(eqns) == 2 and eqn.outvars[0].aval.dtype in WIDE
    }
    for key, eqns in groups.items():
        product, name, _ = key
        if len(readers[product]) > 1 or FORMS[name].gated is None:
            continue
        gate = gate_of(product, program, makers, readers, pairs)
        if gate and pairs[gate.gate] == pairs[gate.up] and len(eqns) == 1:
            yield _Mlp(gate, pairs[gate.gate], key)


def _activations(
    uses: _Uses, groups: Mapping[Any, list]
) -> Iterator[tuple[Any, Activated]]:
    """Yields the activations that nothing but one call reads, by the calls' keys."""
    for key, eqns in groups.items():
        x, name, _ = key
        if len(eqns) > 1 or FORMS[name].activated is None or x.aval.dtype not in WIDE:
            continue
        found = activation_of(x, *uses)
        if found and uses.only_in(found.eqns, eqns):
            yield key, found


def _is_call(eqn: core.JaxprEqn) -> bool:
    if eqn.primitive.name != "jit" or eqn.params["name"] not in FORMS:
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


def _merged(eqns: Sequence[core.JaxprEqn], norm: NormOf | None) -> list[core.JaxprEqn]:
    """Returns the operations of the merged form of calls, which read a norm or None."""
    form = FORMS[eqns[0].params["name"]].merged
    results = [eqn.outvars[0] for eqn in eqns]
    weights = [eqn.invars[1] for eqn in eqns]

    def call(source, *weights, norm):
        return form(source, weights, norm=norm, dtype=results[0].aval.dtype)

    return _traced(call, eqns[0].invars[0], norm, weights, results, eqns[0])


def _gated(
    gate: Gate,
    pair: Sequence[core.JaxprEqn],
    down: core.JaxprEqn,
    norm: NormOf | None,
) -> list[core.JaxprEqn]:
    """Returns the operations of the merged form of a gated MLP."""
    weights = {eqn.outvars[0]: eqn.invars[1] for eqn in pair}
    operands = [weights[gate.gate], weights[gate.up], down.invars[1]]
    call = functools.partial(
        FORMS[down.params["name"]].gated,
        activation=gate.activation,
        inner=gate.gate.aval.dtype,
        dtype=down.outvars[0].aval.dtype,
    )
    return _traced(call, pair[0].invars[0], norm, operands, down.outvars, down)


def _activated(found: Activated, down: core.JaxprEqn) -> list[core.JaxprEqn]:
    """Returns the operations of the merged form of an activation and a matmul."""
    form = FORMS[down.params["name"]].activated
    dtype = down.outvars[0].aval.dtype

    def call(source, w, norm):
        return form(source.x, w, activation=found.activation, dtype=dtype)

    return _traced(call, found.x, None, [down.invars[1]], down.outvars, down)


def _traced(
    call: Callable,
    x: core.Var,
    norm: NormOf | None,
    weights: Sequence,
    results: Sequence,
    like: core.JaxprEqn,
) -> list[core.JaxprEqn]:
    """Returns the operations of `call(source, *weights, norm=...)`.

    They have the place in the source of `like`.
    """
    source = Source(x) if norm is None else norm.source
    call = functools.partial(call, norm=norm and norm.norm)
    operands, tree = jax.tree.flatten((source, *weights))
    closed = jax.make_jaxpr(lambda *arrays: call(*tree.unflatten(arrays)))(
        *(v.aval for v in operands)
    )
    made, _ = embedded(closed.jaxpr, operands, results)
    return [eqn.replace(source_info=like.source_info) for eqn in made]
