"""Merges calls that read the same array, such as the matmuls of queries and keys.

A function that saves FP8 codes of its activations cannot know who else saves them. In
`fp8_remat` it can leave that to the plan of residuals: its merged form, which takes
several weights, saves the activations themselves, and the plan decides whether they are
saved in FP8 or recomputed.

A gated MLP is one call: of the merged matmuls of gate and up, the gate, and the matmul
that follows, which then reads the codes that the gate's kernel writes. Likewise a norm
belongs to the matmuls that read it, and an activation to the one matmul that does, if
nothing else reads it. To a matmul's result its kernel adds the residual stream, and
the stream's gradient is added by the kernel of the norm's gradient.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from coat_jax.fp8.dot_general import fp8_dot_p
from coat_jax.fp8.fused import Source, activated_product, gated_products, products
from coat_jax.remat.gates import Activated, Gate, activation_of, gate_of
from coat_jax.remat.norms import NormOf, norm_of
from coat_jax.remat.programs import (
    Uses,
    deduplicated,
    embedded,
    inlined,
    is_stateful,
    renamed,
    variables,
)
from coat_jax.remat.streams import Sum, bias_of, reader_behind, sum_of
from pallas_kernels.checks import WIDE


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
            groups[x, eqn.params["dtype"], w.aval.ndim].append(eqn)
    uses = Uses.of(program, _is_call)
    parts = _Parts.of(uses, groups, fixed) if fused else _Parts(*({} for _ in range(7)))
    replaced = _replaced(groups, parts, fixed)
    read = {eqn.invars[1] for eqns in groups.values() for eqn in eqns}
    read |= {found.other for found in parts.biases.values()}
    weights = _makers(program, read)
    eqns = [eqn for eqn in program.eqns if id(eqn) in weights]
    for eqn in program.eqns:
        if id(eqn) not in weights:
            eqns.extend(replaced.get(id(eqn), [eqn]))
    return program.replace(eqns=eqns)


class _Mlp(NamedTuple):
    """A gated MLP: its gate, and the keys of its calls."""

    gate: Gate
    pair: Any
    down: Any


class _Parts(NamedTuple):
    """The parts that kernels of calls compute besides matmuls, by the calls' keys.

    Attributes:
      norms: The norms that calls read.
      mlps: The gated MLPs, by the keys of their last calls.
      activations: The activations that single calls read.
      biases: The sums with biases that calls compute, by the calls' identities.
      sums: The sums that single calls compute, with biases if they have any.
      passed: The variables that stand for inputs of norms behind the norms' calls.
      readers: The operations that read such a variable in place of the input, by the
        identities of those that they replace. Calls are not among them.
    """

    norms: dict[Any, NormOf]
    mlps: dict[Any, _Mlp]
    activations: dict[Any, Activated]
    biases: dict[int, Sum]
    sums: dict[Any, Sum]
    passed: dict[Any, core.Var]
    readers: dict[int, list[core.JaxprEqn]]

    @classmethod
    def of(
        cls, uses: Uses, groups: Mapping[Any, list], fixed: set[core.Var]
    ) -> "_Parts":
        """Finds what kernels compute in a program; `fixed` follows from parameters."""
        norms = dict(_norms(uses, groups, fixed))
        mlps = {mlp.down: mlp for mlp in _mlps(uses, groups)}
        activations = dict(_activations(uses, groups))
        pairs = {mlp.pair for mlp in mlps.values()}
        own = {key: eqns for key, eqns in groups.items() if key not in pairs}
        biases = dict(_biases(uses, own, fixed))
        sums = dict(_sums(uses, own, mlps, norms, biases))
        found = cls(norms, mlps, activations, biases, sums, {}, {})
        found._pass_on(uses, groups)
        return found

    def _pass_on(self, uses: Uses, groups: Mapping[Any, list]) -> None:
        """Lets the sums behind norms' calls read what these calls pass on."""
        pairs = {mlp.pair for mlp in self.mlps.values()}
        calls = {id(groups[key][0]): key for key in self.sums}
        for key, norm in self.norms.items():
            x, place = norm.source.x, uses.places[id(groups[key][0])]
            reader = reader_behind(x, norm.eqns, place, self.sums.values(), uses)
            if reader is None or key in pairs:
                continue
            self.passed[key] = core.Var(x.aval)
            if call := calls.get(id(reader)):
                self.sums[call] = self.sums[call]._replace(other=self.passed[key])
            else:
                invars = renamed(reader.invars, {x: self.passed[key]})
                self.readers[id(reader)] = [reader.replace(invars=invars)]


def _replaced(
    groups: Mapping[Any, list[core.JaxprEqn]], parts: _Parts, fixed: set[core.Var]
) -> dict[int, Sequence[core.JaxprEqn]]:
    """Returns the operations that replace others, by the identities of those.

    What follows from parameters alone is `fixed`, and stays.
    """
    gates = [mlp.gate for mlp in parts.mlps.values()]
    named = parts.norms, parts.activations, parts.biases, parts.sums
    own = (part for found in named for part in found.values())
    eqns = (eqn for part in (*gates, *own) for eqn in part.eqns)
    replaced: dict[int, Sequence[core.JaxprEqn]] = {
        id(eqn): () for eqn in eqns if not fixed.issuperset(eqn.outvars)
    }
    pairs = {mlp.pair for mlp in parts.mlps.values()}
    for key, calls in groups.items():
        replaced |= dict.fromkeys(map(id, calls), ())
        total, place = parts.sums.get(key), id(calls[0])
        biases = [parts.biases.get(id(call)) for call in calls]
        if mlp := parts.mlps.get(key):
            pair, norm = groups[mlp.pair], parts.norms.get(mlp.pair)
            replaced[place] = _gated(mlp.gate, pair, calls[0], norm, *biases, total)
        elif activation := parts.activations.get(key):
            replaced[place] = _activated(activation, calls[0], *biases, total)
        elif key not in pairs:
            norm, passed = parts.norms.get(key), parts.passed.get(key)
            replaced[place] = _merged(calls, norm, biases, total, passed)
    return replaced | parts.readers


def _norms(
    uses: Uses, groups: Mapping[Any, list], fixed: set[core.Var]
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


def _mlps(uses: Uses, groups: Mapping[Any, list]) -> Iterator[_Mlp]:
    """Yields the gated MLPs among calls, which are grouped by what they read."""
    program, makers, readers = uses.program, uses.makers, uses.readers
    pairs = {
        eqn.outvars[0]: key
        for key, eqns in groups.items()
        for eqn in eqns
        if len(eqns) == 2 and eqn.outvars[0].aval.dtype in WIDE
    }
    for key, eqns in groups.items():
        product, _, rank = key
        if len(readers[product]) > 1 or rank > 2:
            continue
        gate = gate_of(product, program, makers, readers, pairs)
        if gate and pairs[gate.gate] == pairs[gate.up] and len(eqns) == 1:
            yield _Mlp(gate, pairs[gate.gate], key)


def _activations(
    uses: Uses, groups: Mapping[Any, list]
) -> Iterator[tuple[Any, Activated]]:
    """Yields the activations that nothing but one call reads, by the calls' keys."""
    for key, eqns in groups.items():
        x, _, rank = key
        if len(eqns) > 1 or rank > 2 or x.aval.dtype not in WIDE:
            continue
        found = activation_of(x, uses.program, uses.makers, uses.readers, uses.places)
        if found and uses.only_in(found.eqns, eqns):
            yield key, found


def _sums(
    uses: Uses,
    groups: Mapping[Any, list],
    mlps: Mapping[Any, _Mlp],
    norms: Mapping[Any, NormOf],
    biases: Mapping[int, Sum],
) -> Iterator[tuple[Any, Sum]]:
    """Yields the sums of single calls' results, by the calls' keys.

    A gated MLP adds what its norm reads, and nothing else.
    """
    for key, (call, *others) in groups.items():
        if others or call.outvars[0].aval.ndim > 2:
            continue
        bias = biases.get(id(call))
        if found := sum_of(call, bias.result if bias else call.outvars[0], uses):
            norm = norms.get(mlps[key].pair) if key in mlps else None
            if key not in mlps or (norm and norm.source.x is found.other):
                yield key, found


def _biases(
    uses: Uses, groups: Mapping[Any, list], fixed: set[core.Var]
) -> Iterator[tuple[int, Sum]]:
    """Yields the sums of calls' results and biases, by the calls' identities."""
    for calls in groups.values():
        for call in calls:
            if call.outvars[0].aval.ndim == 2 and (found := bias_of(call, fixed, uses)):
                yield id(call), found


def _is_call(eqn: core.JaxprEqn) -> bool:
    return eqn.primitive is fp8_dot_p


def _contains_call(eqn: core.JaxprEqn) -> bool:
    return eqn.primitive.name == "jit" and _has_call(eqn)


def _has_call(eqn: core.JaxprEqn) -> bool:
    """Returns whether an operation is a mergeable call, or jitted and contains one."""
    if eqn.primitive.name != "jit":
        return _is_call(eqn)
    return any(map(_has_call, eqn.params["jaxpr"].jaxpr.eqns))


def _from_params(program: core.Jaxpr, is_param: Sequence[bool]) -> set[core.Var]:
    """Returns the variables that follow from parameters and constants alone."""
    found = {v for v, p in zip(program.invars, is_param, strict=True) if p}
    found |= {*program.constvars}
    for eqn in program.eqns:
        if variables(eqn.invars) <= found and not is_stateful(eqn):
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


def _merged(
    eqns: Sequence[core.JaxprEqn],
    norm: NormOf | None,
    biases: Sequence[Sum | None],
    total: Sum | None,
    passed: core.Var | None,
) -> list[core.JaxprEqn]:
    """Returns the operations of the merged form of calls.

    Args:
      eqns: The calls.
      norm: The norm that they read, if its kernel computes it.
      biases: The sum of each call's result and a bias, if its kernel computes it.
      total: The sum that the only call computes, if its kernel does.
      passed: The variable that stands for the norm's input behind the calls, if any.
    """
    pairs = zip(eqns, biases, strict=True)
    results = [_result(*pair, total) for pair in pairs]
    if passed is not None:
        results.append(passed)

    def call(source, weights, other):
        ys = products(
            *(source, weights, other),
            norm=norm and norm.norm,
            dtype=results[0].aval.dtype,
            passes=passed is not None,
        )
        return [y.reshape(v.aval.shape) for y, v in zip(ys, results, strict=True)]

    weights = tuple(map(_weight, eqns, biases))
    operands = _source(eqns[0].invars[0], norm), weights, total and total.other
    return _traced(call, operands, results, eqns[0])


def _gated(
    gate: Gate,
    pair: Sequence[core.JaxprEqn],
    down: core.JaxprEqn,
    norm: NormOf | None,
    bias: Sum | None,
    total: Sum | None,
) -> list[core.JaxprEqn]:
    """Returns the operations of the merged form of a gated MLP."""
    weights = {eqn.outvars[0]: eqn.invars[1] for eqn in pair}
    operands = [weights[gate.gate], weights[gate.up], _weight(down, bias)]
    result = _result(down, bias, total)

    def call(source, *weights):
        y = gated_products(
            source,
            *weights,
            norm=norm and norm.norm,
            activation=gate.activation,
            inner=gate.gate.aval.dtype,
            dtype=result.aval.dtype,
            adds=total is not None,
        )
        return y.reshape(result.aval.shape)

    source = _source(pair[0].invars[0], norm)
    return _traced(call, (source, *operands), [result], down)


def _activated(
    found: Activated, down: core.JaxprEqn, bias: Sum | None, total: Sum | None
) -> list[core.JaxprEqn]:
    """Returns the operations of the merged form of an activation and a matmul."""
    result = _result(down, bias, total)

    def call(*operands):
        y = activated_product(
            *operands, activation=found.activation, dtype=result.aval.dtype
        )
        return y.reshape(result.aval.shape)

    operands = found.x, _weight(down, bias), total and total.other
    return _traced(call, operands, [result], down)


def _weight(eqn: core.JaxprEqn, bias: Sum | None) -> tuple[Any, Any]:
    """Returns a call's weight, and its bias or None."""
    return eqn.invars[1], bias and bias.other


def _result(eqn: core.JaxprEqn, bias: Sum | None, total: Sum | None) -> core.Var:
    """Returns the variable that the kernel of a call computes."""
    last = total or bias
    return last.result if last else eqn.outvars[0]


def _source(x: core.Var, norm: NormOf | None) -> Source:
    return Source(x) if norm is None else norm.source


def _traced(
    call: Callable,
    operands: Sequence[Any],
    results: Sequence[core.Var],
    like: core.JaxprEqn,
) -> list[core.JaxprEqn]:
    """Returns the operations of `call(*operands)`, whose operands are trees.

    They have the place in the source of `like`.
    """
    leaves, tree = jax.tree.flatten(operands)
    closed = jax.make_jaxpr(lambda *arrays: call(*tree.unflatten(arrays)))(
        *(v.aval for v in leaves)
    )
    made, _ = embedded(closed.jaxpr, leaves, results)
    return [eqn.replace(source_info=like.source_info) for eqn in made]
