"""Fuses FP8 matmuls of a program with the operations around them.

A single matmul that saves FP8 codes of its activations cannot know which other matmuls
save the same codes, and which kernel could compute them. In a whole program the matmuls
of one array become one operation, a `FusedMatmul`: it quantizes the array once,
computes a norm, an activation or a gate before the matmuls, and adds biases and the
residual stream after them.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from coat_jax.fp8.dot_general import is_fp8
from coat_jax.fp8.prologue import Saves
from coat_jax.fp8.stored import Stored
from coat_jax.fusion.experts import fuse_experts
from coat_jax.fusion.fused_matmul import FusedMatmul
from coat_jax.fusion.gates import fuse_gates
from coat_jax.fusion.halves import halves_of, is_moved, joined, split
from coat_jax.fusion.patterns import Gate, NormMatch, activation_of, gate_of, norm_of
from coat_jax.fusion.sums import Sum, bias_of, reader_after, sum_of
from coat_jax.programs.graph import Graph, deduplicated, inlined, is_plain_call, renamed
from coat_jax.programs.primitives import all_eqns, keeps_parts, variables
from coat_jax.quantization.formats import E4M3, Format
from pallas_kernels.checks import WIDE
from pallas_kernels.dispatch import devices
from pallas_kernels.numerics import GROUP

# The matmuls by what they have in common: the array that they multiply, the dtype of
# results, and the rank of weights.
Groups = Mapping[Any, list[core.JaxprEqn]]


@dataclasses.dataclass(frozen=True)
class Fusion:
    """The rewrite of a program that fuses its FP8 matmuls.

    Attributes:
      saves: What the kernels of norms and gates save for the backward pass.
      gates_in_bf16: Whether a kernel computes gradients of gates before BF16 matmuls.
    """

    saves: Saves
    gates_in_bf16: bool

    def __call__(
        self, program: core.Jaxpr, keys: Sequence[Any], is_param: Sequence[bool]
    ) -> core.Jaxpr:
        """Returns the program with fused FP8 matmuls and experts; see `fuse`."""
        del keys
        if self.saves == "copies":
            program = fuse_experts(program)
        if self.gates_in_bf16:
            program = fuse_gates(program)
        return fuse(program, is_param, self.saves)


def fusion(format: Format, group: int, where: Any, key: Any, policy: Any) -> Fusion:
    """Returns the fusion for these options of `fp8_remat`, which documents them.

    Kernels save E4M3 copies in groups of 16 only. For other options `fp8_remat` makes
    the copies itself, from unquantized arrays. With a policy the arrays that it names
    are saved, and not the operands of gates.
    """
    like_kernels = format == E4M3 and group == GROUP and where is None and key is None
    saves: Saves = "copies" if like_kernels else "arrays"
    return Fusion(saves, gates_in_bf16=like_kernels and policy is None)


def fuse(program: core.Jaxpr, is_param: Sequence[bool], saves: Saves) -> core.Jaxpr:
    """Returns a program with fused FP8 matmuls.

    Matmuls are fused only if their weights are computed from parameters alone.

    Args:
      program: The program.
      is_param: True for each argument that is a parameter.
      saves: What the kernels of norms and gates save for the backward pass.
    """
    if not any(map(is_fp8, all_eqns(program.eqns))):
        return program
    program = deduplicated(inlined(program, is_plain_call))
    params = [v for v, p in zip(program.invars, is_param, strict=True) if p]
    program, wholes = _with_halves(program, params)
    graph = Graph(program)
    fixed = graph.following(params)
    nodes = _nodes(graph, fixed, wholes)
    replaced: dict[int, Sequence[core.JaxprEqn]] = _passed_on(nodes, graph)
    for node in nodes:
        removed = (eqn for eqn in node.eqns if not fixed.issuperset(eqn.outvars))
        replaced |= dict.fromkeys(map(id, removed), ())
    replaced |= {id(node.calls[0]): node.traced(saves) for node in nodes}
    # Weights are computed before the first matmul of their array.
    weights = [stored.array for node in nodes for stored in node.stored.values()]
    weights += [node.whole.array for node in nodes if node.whole]
    biases = (bias for node in nodes for _, bias in node.weights)
    early = graph.needed_for(variables((*weights, *biases)))
    eqns = [eqn for eqn in program.eqns if id(eqn) in early]
    for eqn in program.eqns:
        if id(eqn) not in early:
            eqns.extend(replaced.get(id(eqn), [eqn]))
    return program.replace(eqns=eqns)


def _with_halves(
    program: core.Jaxpr, params: Sequence[core.Var]
) -> tuple[core.Jaxpr, set[core.Var]]:
    """Splits each matmul that computes gate and up at once into two matmuls.

    A matmul is split only if the gate can be fused afterwards.

    Returns:
      The program, and the weights of the matmuls that were split.
    """
    graph = Graph(program)
    matches = [halves_of(eqn, graph) for eqn in program.eqns if is_fp8(eqn)]
    matches = [match for match in matches if match]
    if not matches:
        return program, set()
    trial = Graph(split(program, matches))
    groups = _groups(trial, trial.following(params))
    pairs = [pair for _, (pair, _) in _gates(trial, groups)]
    results = {call.outvars[0] for pair in pairs for call in groups[pair]}

    def is_fused(half: core.Var) -> bool:
        while half not in results and trial.makers[half].primitive.name == "reshape":
            (half,) = trial.makers[half].invars
        return half in results

    fused_ones = [match for match in matches if is_fused(match.results[0])]
    if len(fused_ones) < len(matches):
        program = split(program, fused_ones)
    else:
        program = trial.program
    return program, {match.matmul.invars[1] for match in fused_ones}


def _groups(graph: Graph, fixed: set[core.Var]) -> Groups:
    """Returns the FP8 matmuls of activations and weights, grouped as in `Groups`.

    Weights are in `fixed`, the variables that follow from parameters alone.
    """
    groups = defaultdict(list)
    for eqn in filter(is_fp8, graph.program.eqns):
        x, w = eqn.invars
        if isinstance(x, core.Var) and x not in fixed and variables([w]) <= fixed:
            groups[x, eqn.params["dtype"], w.aval.ndim].append(eqn)
    return groups


def _nodes(
    graph: Graph, fixed: set[core.Var], wholes: Collection[core.Var]
) -> list[FusedMatmul]:
    """Returns the fused matmuls of a program.

    Args:
      graph: The program.
      fixed: The variables that follow from parameters alone.
      wholes: The weights, each with gate and up in one array, that the user's program
        multiplies by.
    """
    groups = _groups(graph, fixed)
    gates = dict(_gates(graph, groups))
    pairs = [key for key, _ in gates.values()]
    nodes = []
    for key, calls in groups.items():
        if key in pairs:
            continue
        pair, gate = gates.get(key, (None, None))
        first = groups[pair] if pair else calls
        node = FusedMatmul(
            calls=calls,
            stored={
                eqn.invars[1]: _stored(eqn.invars[1], graph) for eqn in (*first, *calls)
            },
            pair=first if pair else (),
            norm=_norm(pair or key, first, graph, fixed),
            gate=gate or _activation(key, calls, graph),
            biases=[_bias(call, graph, fixed) for call in calls],
        )
        node.total = _total(node, graph)
        node.whole = _whole(node, graph, wholes)
        nodes.append(node)
    return nodes


def _stored(weight: core.Var, graph: Graph) -> Stored:
    """Returns a weight as the program stores it, before a transpose if there is one."""
    maker = graph.makers.get(weight)
    if maker is not None and keeps_parts(maker):
        maker = graph.makers.get(maker.invars[0])
    is_transposed = (
        maker is not None
        and maker.primitive.name == "transpose"
        and maker.params["permutation"] == (1, 0)
        and isinstance(maker.invars[0], core.Var)
    )
    return Stored(maker.invars[0] if is_transposed else weight, is_transposed)


def _whole(
    node: FusedMatmul, graph: Graph, wholes: Collection[core.Var]
) -> Stored | None:
    """Returns the array that has the weights of gate and up as its halves, or None.

    With several devices the result is None, because devices that shard the outputs of
    the array do not shard each of its halves. An array [k, 2 f] has one scale, so it is
    read as a whole only if it is one of `wholes`. If a program multiplies by the halves
    instead, each half has its own scale.
    """
    if not node.pair or not devices.is_alone():
        return None
    gate, up = node.of_gate
    if gate.is_transposed != up.is_transposed:
        return None
    axis = -2 if gate.is_transposed else -1
    array = joined(gate.array, up.array, axis, graph)
    if array is None:
        return None
    stored = Stored(array, True) if gate.is_transposed else _stored(array, graph)
    if is_moved(stored.array, graph) or not (stored.is_transposed or array in wholes):
        return None
    return stored


def _gates(graph: Graph, groups: Groups) -> Iterator[tuple[Any, tuple[Any, Gate]]]:
    """Yields the gates between matmuls.

    Each gate comes with the key in `groups` of the matmul that reads the gate's result,
    and with the key of the two matmuls that compute the gate's operands.
    """
    sources = {
        eqn.outvars[0]: key
        for key, calls in groups.items()
        for eqn in calls
        if len(calls) == 2 and eqn.outvars[0].aval.dtype in WIDE
    }
    for key, calls in groups.items():
        y, _, rank = key
        if rank > 2 or len(calls) > 1 or not graph.only_read_by([y], calls):
            continue
        if gate := gate_of(y, graph, sources):
            source, other = (sources[v] for v in gate.operands)
            if source == other:
                yield key, (source, gate)


def _norm(
    key: Any, calls: Sequence[core.JaxprEqn], graph: Graph, fixed: set[core.Var]
) -> NormMatch | None:
    """Returns the norm to fuse with these matmuls, or None.

    Nothing but these matmuls may read the norm. `key` is their key in `Groups`. Batched
    matmuls, with a weight for each element of the batch, are not fused with norms.
    """
    x, *_ = key
    if x.aval.ndim > 2 or x.aval.dtype != jnp.bfloat16:
        return None
    match = norm_of(x, graph, fixed)
    if match is None:
        return None
    computed = (v for eqn in match.eqns for v in eqn.outvars if v not in fixed)
    return match if graph.only_read_by(computed, (*match.eqns, *calls)) else None


def _activation(key: Any, calls: Sequence[core.JaxprEqn], graph: Graph) -> Gate | None:
    """Returns the activation, such as GELU, to fuse with the only matmul that reads it.

    Args:
      key: The array that the matmuls multiply, their dtype, and their weights' rank.
      calls: The matmuls of this array.
      graph: The program.

    Returns:
      The activation; None if there is none, or if something else reads its result.
    """
    x, _, rank = key
    if rank > 2 or len(calls) > 1 or x.aval.dtype not in WIDE:
        return None
    match = activation_of(x, graph)
    if match is None:
        return None
    computed = (v for eqn in match.eqns for v in eqn.outvars)
    return match if graph.only_read_by(computed, (*match.eqns, *calls)) else None


def _bias(call: core.JaxprEqn, graph: Graph, fixed: set[core.Var]) -> Sum | None:
    (result,) = call.outvars
    return bias_of(result, graph, fixed) if result.aval.ndim == 2 else None


def _total(node: FusedMatmul, graph: Graph) -> Sum | None:
    """Returns the sum of a single result and another array, or None.

    A fused gated MLP can add only the residual stream, which is the input of its norm.
    """
    call, *further = node.calls
    if further or call.outvars[0].aval.ndim > 2:
        return None
    (bias,) = node.biases
    result = bias.result if bias else call.outvars[0]
    match = sum_of(result, graph, graph.position(call))
    if match and node.pair:
        is_stream = node.norm and node.norm.source.x is match.other
        return match if is_stream else None
    return match


def _passed_on(
    nodes: Sequence[FusedMatmul], graph: Graph
) -> dict[int, Sequence[core.JaxprEqn]]:
    """Lets additions to the residual stream read the copy that a norm's kernel returns.

    Returns the changed additions by the `id`s of the additions that they replace.
    Additions within fused matmuls are changed in `nodes` instead.
    """
    sums = {id(node.total.eqns[-1]): node for node in nodes if node.total}
    replaced = {}
    for node in nodes:
        if node.norm is None or node.pair:
            continue
        x, position = node.norm.source.x, graph.position(node.calls[0])
        reader = reader_after(x, node.norm.eqns, graph)
        if reader is None:
            continue
        later = sums.get(id(reader))
        if graph.position(later.calls[0] if later else reader) <= position:
            continue
        node.passed = core.Var(x.aval)
        if later:
            later.total = later.total._replace(other=node.passed)
        else:
            invars = renamed(reader.invars, {x: node.passed})
            replaced[id(reader)] = [reader.replace(invars=invars)]
    return replaced
