"""How every residual of a function is kept between its passes, and why."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import partial_eval as pe

from coat_jax.quantization.array import Format, PerGroup
from coat_jax.remat.recompute import Derivation, variables, written_out
from coat_jax.remat.trace import (
    PRODUCTS,
    Linearized,
    Residual,
    all_eqns,
    does_work,
    is_foreign,
)

# A smaller residual saves less than the two operations more are worth.
_MIN_SIZE = 4096
# Of shorter rows the scales weigh too much, and rows of one are statistics.
_MIN_ROW_BYTES = 16
# Groups that only products read have at most so many elements, and so many of them, or
# a multiple, make up a row: devices that share a row have whole ones.
_MAX_GROUP = 128
_SHARES = 8
_OFFLOADED = "offloaded by the policy"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What `fp8_remat` was asked for; see there."""

    format: Format
    group: int
    where: Callable[[Residual], Any] | None
    policy: Callable[..., Any] | None
    key: jax.Array | None

    def __post_init__(self):
        if not isinstance(self.format, Format):
            raise ValueError(
                f"format must be E4M3, E5M2 or DE8 of coat_jax, got {self.format!r}"
            )
        if type(self.group) is not int or self.group < 1:
            raise ValueError(f"group must be a positive int, got {self.group!r}")
        for name in ("where", "policy"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise ValueError(f"{name} must be a function or None, got {value!r}")
        if self.key is not None:
            self._check_key()

    def _check_key(self) -> None:
        dtype, shape = getattr(self.key, "dtype", None), jnp.shape(self.key)
        typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
        if not typed or shape:
            raise ValueError(f"key must be one jax.random.key, got {self.key!r}")
        if self.format.table is not None:
            raise ValueError(
                f"key is for floating formats, got format={self.format!r}: its codes "
                "are not rounded stochastically"
            )


@dataclasses.dataclass(frozen=True)
class Copy:
    """An FP8 copy.

    Attributes:
      granularity: Its groups.
      fused: Whether nothing but operations that XLA fuses with reads it.
    """

    granularity: PerGroup
    fused: bool


@dataclasses.dataclass(frozen=True)
class Wide:
    """As it is, and why."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Extra:
    """An array that is no residual but has a copy, from which several follow.

    Attributes:
      var: What it is in the forward program.
      copy: Its copy.
      index: One of these residuals.
    """

    var: core.Var
    copy: Copy
    index: int


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """How every residual of a function is kept, and how it comes back.

    Attributes:
      kept: Per residual: the argument it is, "recompute", or how it is saved.
      extras: What is saved besides.
      needed: Per argument: whether the backward pass reads it by reference.
      recompute: From the needed arguments and what is saved, residuals and then extras,
        to the residuals kept as "recompute".
      vjp_tree: Structure of the function that `jax.vjp` returns.
    """

    kept: tuple[int | Literal["recompute"] | Wide | Copy, ...]
    extras: tuple[Extra, ...]
    needed: tuple[bool, ...]
    recompute: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]
    vjp_tree: Any


def plan(traced: Linearized, is_param: Sequence[bool], options: Options) -> Plan:
    """Decides for every residual; `is_param` tells which arguments are parameters."""
    program = written_out(traced.forward.jaxpr)
    residuals = program.outvars[traced.num_outputs :]
    params = {v: i for i, v in enumerate(program.invars) if is_param[i]}
    computed = _computed_from(program, is_param)
    kept: list[Any] = []
    for index, residual in enumerate(residuals):
        var = residual if isinstance(residual, core.Var) else None
        if var in params:
            kept.append(params[var])
        elif var not in computed and _is_cheap(
            _restricted(program, [residual]), is_param
        ):
            kept.append("recompute")
        else:
            kept.append(_saved(traced, index, options))
    constants = [*params, *_recomputed(residuals, kept)]
    derivation = Derivation(program, constants, options.group)
    extras = _derive(traced, residuals, kept, derivation, options)
    sources = {v: i for i, v in enumerate(residuals) if _is_source(kept[i])}
    sources |= {extra.var: len(kept) + i for i, extra in enumerate(extras)}
    rest, used = _restricted(program, _recomputed(residuals, kept), sources)

    def recompute(args, saved):
        inputs = *args, *(saved[i] for i in sources.values())
        inputs = [x for x, u in zip(inputs, used, strict=True) if u]
        return core.jaxpr_as_fun(rest)(*inputs)

    return Plan(
        kept=tuple(kept),
        extras=tuple(extras),
        needed=tuple(used[i] or i in kept for i in range(len(is_param))),
        recompute=recompute,
        vjp_tree=traced.vjp_tree,
    )


def _recomputed(residuals: Sequence[Any], kept: Sequence[Any]) -> list[Any]:
    return [v for v, how in zip(residuals, kept, strict=True) if how == "recompute"]


def _derive(
    traced: Linearized,
    residuals: Sequence[Any],
    kept: list[Any],
    derivation: Derivation,
    options: Options,
) -> list[Extra]:
    """Has copies recomputed that follow from others or from extras, and lists these."""
    for var, how in zip(residuals, kept, strict=True):
        if isinstance(how, Wide) and _is_source(how):
            derivation.keep(var)
    copies = {i: how for i, how in enumerate(kept) if isinstance(how, Copy)}
    sources = derivation.copy(
        [residuals[i] for i in copies],
        lambda var: traced.has(var) and not _why_not_fp8(var.aval),
    )
    extras = []
    for i in copies:
        kept[i] = "recompute"
    for source in sources:
        ways = {i: derivation.known[residuals[i]] for i in copies}
        behind = [i for i, known in ways.items() if source in known.copies]
        # No product reads the groups of what is computed with.
        size = min(
            options.group if ways[i].steps else copies[i].granularity.size
            for i in behind
        )
        own = [i for i in behind if residuals[i] is source]
        if own:
            kept[own[0]] = Copy(PerGroup(size), copies[own[0]].fused)
        else:
            extras.append(Extra(source, Copy(PerGroup(size), fused=True), behind[0]))
    return extras


def _is_source(how: Any) -> bool:
    """Whether backward has it on the device, to compute from."""
    return isinstance(how, Copy) or (isinstance(how, Wide) and how.reason != _OFFLOADED)


def _restricted(
    program: core.Jaxpr,
    wanted: Sequence[core.Var | core.Literal],
    given: Iterable[core.Var] = (),
) -> tuple[core.Jaxpr, list[bool]]:
    """The part of a program behind some variables, and the inputs it uses.

    Besides the program's own these are the variables that are given.
    """
    names = {var: core.Var(var.aval) for var in given}

    def renamed(variables):
        # Literals have no hash.
        return [names.get(v, v) if isinstance(v, core.Var) else v for v in variables]

    eqns = program.eqns
    if names:
        eqns = [eqn.replace(invars=renamed(eqn.invars)) for eqn in eqns]
    restricted = program.replace(
        invars=[*program.invars, *names.values()],
        outvars=renamed(wanted),
        eqns=eqns,
        debug_info=program.debug_info.with_unknown_names(),
    )
    return pe.dce_jaxpr(restricted, [True] * len(wanted))


def _computed_from(program: core.Jaxpr, is_param: Sequence[bool]) -> set[core.Var]:
    """What certainly follows from other inputs than parameters.

    Not what loops return: a part of that may follow from parameters alone.
    """
    found = {v for v, p in zip(program.invars, is_param, strict=True) if not p}
    for eqn in program.eqns:
        plain = not list(core.jaxprs_in_params(eqn.params))
        if plain and not found.isdisjoint(variables(eqn.invars)):
            found.update(eqn.outvars)
    return found


def _is_cheap(
    restricted: tuple[core.Jaxpr, list[bool]], is_param: Sequence[bool]
) -> bool:
    """Whether a program needs parameters only and does no work to speak of."""
    program, used = restricted
    from_params = all(p for p, u in zip(is_param, used, strict=True) if u)
    return from_params and not any(map(does_work, all_eqns(program.eqns)))


def _saved(traced: Linearized, index: int, options: Options) -> Copy | Wide:
    aval = traced.residuals[index].aval
    readers = traced.readers(index)
    if reason := _why_wide(traced, index):
        return Wide(reason)
    if aval.dtype == jnp.float32 and any(is_foreign(eqn.primitive) for eqn in readers):
        # By convention, such as attention's log-sum-exp.
        return Wide("float32 statistics of a kernel")
    if options.where is not None and not options.where(traced.describe(index)):
        return Wide("where returned False")
    only_products = bool(readers) and all(map(_is_product, readers))
    group = _group_of_products(aval.shape[-1], options.group)
    # What cuts it fuses, whoever reads the parts.
    whole = traced.readers(index, cut=False)
    return Copy(
        PerGroup(group if only_products else options.group),
        fused=not any(_is_product(eqn) or is_foreign(eqn.primitive) for eqn in whole),
    )


def _is_product(eqn: core.JaxprEqn) -> bool:
    return eqn.primitive.name in PRODUCTS


def _why_wide(traced: Linearized, index: int) -> str | None:
    """Why a residual is never quantized, if so."""
    aval = traced.residuals[index].aval
    if aval.memory_space == jax.memory.Space.Host:
        return _OFFLOADED
    if reason := _why_not_fp8(aval):
        return reason
    if traced.feeds_exponential(index):
        return "backward takes its exponential"
    if traced.has_pole(index):
        return "backward divides by it"
    return None


def _why_not_fp8(aval: jax.core.ShapedArray) -> str | None:
    """Why an array of this kind has no copy, if so."""
    if not jnp.issubdtype(aval.dtype, jnp.floating):
        return "no floating numbers"
    if aval.dtype.itemsize == 1:
        return "8 bits already"
    if aval.size < _MIN_SIZE:
        return f"fewer than {_MIN_SIZE} elements"
    if aval.shape[-1] * aval.dtype.itemsize < _MIN_ROW_BYTES:
        return f"rows of less than {_MIN_ROW_BYTES} bytes"
    return None


def _group_of_products(row: int, group: int) -> int:
    """The size of groups that only products read, which are as fine with larger ones.

    Products themselves would take one scale a tensor (COAT, section 5.1). Its maximum
    is another pass over the array, and over all devices that share it.
    """
    if row <= _MAX_GROUP:
        return max(_MAX_GROUP, group)
    sizes = [_MAX_GROUP >> i for i in range(3)]
    fitting = [size for size in sizes if size > group and row % (_SHARES * size) == 0]
    return max(fitting, default=group)
