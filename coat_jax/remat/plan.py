"""Decides in which form each residual of a function is saved for the backward pass."""

import dataclasses
import math
from collections.abc import Callable, Container, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend import core

from coat_jax.programs.graph import renamed, written_out
from coat_jax.programs.primitives import is_foreign, is_matmul, size_of, variables
from coat_jax.remat.choices import choosing
from coat_jax.remat.kernels import Kernels
from coat_jax.remat.loops import equal_stacks
from coat_jax.remat.options import Options
from coat_jax.remat.policies import Policy, offloads
from coat_jax.remat.recompute import Derivation
from coat_jax.remat.repeated import repeated_factors
from coat_jax.remat.shapes import group_of_products, is_narrow, merged_axes, why_not_fp8
from coat_jax.remat.shares import shares_of_sums
from coat_jax.remat.sources import (
    computed_from,
    follows_cheaply,
    is_integer,
    masks,
    restricted,
)
from coat_jax.remat.statistics import statistics_of
from coat_jax.remat.trace import Linearized
from coat_jax.remat.ways import Copy, Extra, Unread, Wide
from pallas_kernels import versions

_IN_LOOP = "offloaded by the policy in a loop"
_HIDING = "large numbers hide others in it"
_OF_KERNEL = "float32 statistics of a kernel"


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The way in which each residual of a function is saved and restored.

    Attributes:
      kept: One entry per residual: the index in `needed` of the constant or argument
        that the residual is, "recompute" if the backward pass computes it, `Wide` if it
        is saved unquantized, `Copy` if it is saved as an FP8 copy, or `Unread`.
      extras: The arrays that are saved in addition to residuals.
      needed: For each constant of the forward program, and then for each argument,
        whether the backward pass reads it. Needed arrays are kept by reference and take
        no memory of their own.
      recompute: The function that takes the constants and arguments (None if not
        needed) and the saved arrays, residuals before extras. It returns the residuals
        that `kept` marks as "recompute".
      vjp_tree: The tree structure of the function that `jax.vjp` returns.
    """

    kept: tuple[int | Literal["recompute"] | Wide | Copy | Unread, ...]
    extras: tuple[Extra, ...]
    needed: tuple[bool, ...]
    recompute: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]
    vjp_tree: Any


def plan(traced: Linearized, is_param: Sequence[bool], options: Options) -> Plan:
    """Decides how each residual is saved.

    `is_param` has one entry per argument: True for parameters. Constants of the forward
    program, which derivative rules may add, come before the arguments and count as
    parameters.
    """
    program = written_out(traced.forward.jaxpr)
    is_param = [True] * len(program.constvars) + [*is_param]
    program = versions.constants_as_arguments(program)
    residuals = renamed(program.outvars[traced.num_outputs :], equal_stacks(program))
    params = {v: i for i, v in enumerate(program.invars) if is_param[i]}
    computed = computed_from(program, is_param)
    made_again = masks(program, residuals, is_param)
    statistics = statistics_of(program, params)
    kernels = Kernels(traced, program)
    of_kernels = kernels.statistics()
    offloaded = _offloaded(program, residuals, options.policy)
    on_host = {i for i, v in enumerate(residuals) if _is_on_host(v.aval)}
    elsewhere = offloaded | on_host
    here = variables(v for i, v in enumerate(residuals) if i not in elsewhere)
    numbers = {v for v in here if size_of(v.aval) == 1}
    exact = dict.fromkeys(choosing(traced), "backward chooses by it")
    exact |= dict.fromkeys(
        repeated_factors(traced), "backward multiplies by it again and again"
    )
    exact |= dict.fromkeys(shares_of_sums(traced), "shares of a sum add up to 1")
    ways: list[Any] = []
    for index, residual in enumerate(residuals):
        var = residual if isinstance(residual, core.Var) else None
        # The codes of a weight follow from the weight and the scale, a saved number.
        is_code = is_narrow(residual.aval) and var not in numbers
        given = numbers if is_code else set()
        is_given = [*is_param, *[True] * len(given)]
        if index in traced.unread:
            ways.append(Unread(residual.aval.shape, residual.aval.dtype))
        elif var in params:
            ways.append(params[var])
        elif (
            var not in computed
            and index not in elsewhere
            and follows_cheaply(restricted(program, [residual], given), is_given)
        ) or index in made_again - elsewhere:
            ways.append("recompute")
        elif var in statistics:
            ways.append(Wide("statistics of longer rows"))
        elif var in of_kernels:
            ways.append(Wide(_OF_KERNEL))
        else:
            ways.append(_saved(traced, index, exact.get(index), options))
    # Integers have no gradients and no copies: arrays are computed from them again.
    integers = (v for v in program.invars if is_integer(v.aval))
    constants = [*params, *integers, *_recomputed(residuals, ways)]
    derivation = Derivation(program, constants, statistics, options.group)
    copied = {v for v, choice in zip(residuals, ways, strict=True) if _is_copy(choice)}
    for kernel in kernels.with_statistics(copied):
        for index, var in enumerate(residuals):
            if options.rerun_attention and kernel.results and not kernel.is_nested:
                if _is_among(var, kernel.results):
                    derivation.compute(var, kernel.operands)
                    ways[index] = "recompute"
            elif _is_copy(ways[index]) and var in kernel.results | kernel.operands:
                ways[index] = Wide("a kernel reads it beside statistics")
                # A mask that is added to scores follows from booleans.
                if (known := derivation.known.get(var)) and known.constant:
                    ways[index] = "recompute"

    for index in offloaded:
        if _is_copy(ways[index]) and residuals[index] in derivation.hiding:
            ways[index] = Wide(_HIDING)
        if _is_saved(ways[index]):
            ways[index] = dataclasses.replace(ways[index], offloaded=True)

    def may_copy(var):
        fits = traced.has(var) and var not in statistics
        return fits and not why_not_fp8(var.aval)

    away = variables(residuals[i] for i in elsewhere)

    def may_save(var):
        return traced.has(var) and var not in away

    extras = _derive(residuals, ways, derivation, options, may_save, may_copy)
    sources = {v: i for i, v in enumerate(residuals) if _is_source(ways[i])}
    sources |= {extra.var: len(ways) + i for i, extra in enumerate(extras)}
    recomputation, used = restricted(program, _recomputed(residuals, ways), sources)

    def recompute(args, saved):
        inputs = *args, *(saved[i] for i in sources.values())
        inputs = [x for x, u in zip(inputs, used, strict=True) if u]
        return core.jaxpr_as_fun(core.ClosedJaxpr(recomputation, ()))(*inputs)

    return Plan(
        kept=tuple(ways),
        extras=tuple(extras),
        needed=tuple(used[i] or i in ways for i in range(len(is_param))),
        recompute=recompute,
        vjp_tree=traced.vjp_tree,
    )


def _recomputed(residuals: Sequence[Any], ways: Sequence[Any]) -> list[Any]:
    return [
        v for v, choice in zip(residuals, ways, strict=True) if choice == "recompute"
    ]


def _is_copy(choice: Any) -> bool:
    return isinstance(choice, Copy)


def _is_among(var: core.Var | core.Literal, variables: Container[core.Var]) -> bool:
    return isinstance(var, core.Var) and var in variables  # Literals are not hashable.


def _derive(
    residuals: Sequence[Any],
    ways: list[Any],
    derivation: Derivation,
    options: Options,
    may_save: Callable[[core.Var], bool],
    may_copy: Callable[[core.Var], bool],
) -> list[Extra]:
    """Changes `ways` to "recompute" for residuals that follow from saved arrays.

    Returns the further arrays to save. `may_save` tells which arrays can be saved, and
    `may_copy` which of them can be copied.
    """
    wide = {
        i: derivation.smallest_view(residuals[i], may_save)
        for i, choice in enumerate(ways)
        if not _is_copy(choice) and _is_source(choice)
    }
    saved = derivation.keep(wide.values())
    extras = []
    for i, view in wide.items():
        if residuals[i] in saved:
            continue
        if view in saved:
            same = [j for j, v in enumerate(residuals) if v is view]
            # Keys that several query heads share are saved once, and repeated again.
            if not same:
                extras.append(Extra(view, ways[i], i))
                saved.discard(view)
            elif _is_copy(ways[same[0]]):
                ways[same[0]] = ways[i]
        ways[i] = "recompute"
    copies = {
        i: choice
        for i, choice in enumerate(ways)
        if isinstance(choice, Copy) and _is_source(choice)
    }
    sources, hiding = derivation.copy([residuals[i] for i in copies], may_copy)
    for i in copies:
        ways[i] = Wide(_HIDING) if residuals[i] in hiding else "recompute"
        hiding.discard(residuals[i])  # An equal residual follows from this one.
    for source in sources:
        provenances = {i: derivation.known[residuals[i]] for i in copies}
        readers = [
            i for i, provenance in provenances.items() if source in provenance.copies
        ]
        # The larger groups are for copies that matmuls read without any arithmetic.
        size = min(
            options.group if provenances[i].steps else copies[i].granularity.size
            for i in readers
        )
        same = [i for i in readers if residuals[i] is source]
        if same:
            ways[same[0]] = Copy.of(source.aval, size, copies[same[0]].fused)
        else:
            copy = Copy.of(source.aval, size, fused=True)
            extras.append(Extra(source, copy, readers[0]))
    return extras


def _is_source(choice: Any) -> bool:
    """Returns whether other arrays may be recomputed from an array saved this way."""
    in_loop = isinstance(choice, Wide) and choice.reason == _IN_LOOP
    return _is_saved(choice) and not choice.offloaded and not in_loop


def _is_saved(choice: Any) -> bool:
    return isinstance(choice, Copy | Wide)


def _offloaded(
    program: core.Jaxpr, residuals: Sequence[Any], policy: Policy | None
) -> set[int]:
    """Returns the indices of the residuals that a policy offloads."""
    if policy is None:
        return set()
    results: set[core.Var] = set()
    for eqn in program.eqns:
        # JAX puts this operation after an array that a policy saves.
        rounded = eqn.primitive.name == "reduce_precision"
        if offloads(policy, eqn) or (rounded and _is_among(eqn.invars[0], results)):
            results.update(eqn.outvars)
    return {i for i, var in enumerate(residuals) if _is_among(var, results)}


def _saved(
    traced: Linearized, index: int, exact: str | None, options: Options
) -> Copy | Wide:
    """Returns how a residual is saved if it does not follow from other arrays.

    `exact` is the reason why the backward pass needs the residual exactly, or None.
    """
    aval = traced.residuals[index].aval
    readers = traced.readers(index)
    if reason := _why_wide(traced, index):
        return Wide(reason)
    if exact:
        return Wide(exact)
    if aval.dtype == jnp.float32 and any(is_foreign(eqn.primitive) for eqn in readers):
        # Float32 arrays that a custom kernel reads are statistics by convention, such
        # as attention's log-sum-exp.
        return Wide(_OF_KERNEL)
    if options.where is not None and not options.where(traced.describe(index)):
        return Wide("where returned False")
    only_products = bool(readers) and all(map(is_matmul, readers))
    row = math.prod(merged_axes(aval) or aval.shape[-1:])
    group = group_of_products(row, options.group)
    # XLA fuses dequantization into a slice, so a slice counts as the reader here.
    all_readers = traced.readers(index, cut=False)
    return Copy.of(
        aval,
        group if only_products else options.group,
        fused=not any(
            is_matmul(eqn) or is_foreign(eqn.primitive) for eqn in all_readers
        ),
    )


def _why_wide(traced: Linearized, index: int) -> str | None:
    """Returns the reason why a residual is never quantized, or None."""
    aval = traced.residuals[index].aval
    if _is_on_host(aval):
        return _IN_LOOP
    if reason := why_not_fp8(aval):
        return reason
    if traced.feeds_exponential(index):
        return "backward takes its exponential"
    if traced.has_pole(index):
        return "backward divides by it"
    return None


def _is_on_host(aval: jax.core.ShapedArray) -> bool:
    """Returns whether the forward program itself moves an array to the host."""
    return aval.memory_space == jax.memory.Space.Host
