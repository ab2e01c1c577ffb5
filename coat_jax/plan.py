"""How every residual of a function is kept between its passes, and why."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import partial_eval as pe

from coat_jax.quantized import Format, PerGroup
from coat_jax.residuals import (
    PRODUCTS,
    Cut,
    Linearized,
    Residual,
    all_eqns,
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
class Part:
    """Of an array whose copy is kept as a whole.

    Attributes:
      whole: Which one of those.
      cuts: What takes the part, one after the other.
    """

    whole: int
    cuts: tuple[Cut, ...]


@dataclasses.dataclass(frozen=True)
class Whole:
    """An array of which all, or more, is in residuals.

    Attributes:
      var: What it is in the forward program.
      copy: How it is kept.
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
      wholes: What is kept besides, of which residuals are parts.
      needed: Per argument: whether the backward pass reads it by reference.
      recompute: From the needed arguments to the residuals kept as "recompute".
      vjp_tree: Structure of the function that `jax.vjp` returns.
    """

    kept: tuple[int | Literal["recompute"] | Wide | Copy | Part, ...]
    wholes: tuple[Whole, ...]
    needed: tuple[bool, ...]
    recompute: Callable[[Sequence[Any]], Sequence[Any]]
    vjp_tree: Any


def plan(traced: Linearized, is_param: Sequence[bool], options: Options) -> Plan:
    """Decides for every residual; `is_param` tells which arguments are parameters."""
    jaxpr = traced.forward.jaxpr
    params = {v: i for i, v in enumerate(jaxpr.invars) if is_param[i]}
    kept: list[Any] = []
    for index, var in enumerate(traced.residuals):
        if not isinstance(var, core.Literal) and var in params:
            kept.append(params[var])
        elif _is_cheap(_restricted(traced, [index]), is_param):
            kept.append("recompute")
        else:
            kept.append(_saved(traced, index, options))
    wholes = _put_together(traced, kept)
    recomputed = [i for i, how in enumerate(kept) if how == "recompute"]
    program, used = _restricted(traced, recomputed)
    return Plan(
        kept=tuple(kept),
        wholes=tuple(wholes),
        needed=tuple(u or i in kept for i, u in enumerate(used)),
        recompute=lambda args: core.jaxpr_as_fun(program)(
            *[a for a, u in zip(args, used, strict=True) if u]
        ),
        vjp_tree=traced.vjp_tree,
    )


def _put_together(traced: Linearized, kept: list[Any]) -> list[Whole]:
    """Makes parts of those copies that are all of an array, and lists these arrays.

    Its one copy takes no more memory, and what it is of is in one place already.
    """
    found: dict[Any, list[tuple[int, tuple[Cut, ...]]]] = {}
    for index, how in enumerate(kept):
        if isinstance(how, Copy):
            var, cuts = traced.cut_from(index, how.granularity.size)
            if cuts:
                found.setdefault((var, how.granularity), []).append((index, cuts))
    wholes: list[Whole] = []
    for (var, granularity), parts in found.items():
        if sum(traced.residuals[i].aval.size for i, _ in parts) >= var.aval.size:
            for index, cuts in parts:
                kept[index] = Part(len(wholes), cuts)
            copy = Copy(granularity, fused=True)
            wholes.append(Whole(var, copy, parts[0][0]))
    return wholes


def _restricted(
    traced: Linearized, indices: Sequence[int]
) -> tuple[core.Jaxpr, list[bool]]:
    """The part of the forward program behind some residuals, and the inputs it uses."""
    wanted = [traced.num_outputs + i for i in indices]
    jaxpr = traced.forward.jaxpr
    mask = [i in wanted for i in range(len(jaxpr.outvars))]
    # Effects are forward's: nothing is kept for their sake.
    eqns = [
        eqn.replace(effects=core.no_effects) if eqn.effects else eqn
        for eqn in jaxpr.eqns
    ]
    return pe.dce_jaxpr(jaxpr.replace(eqns=eqns), mask)


def _is_cheap(
    restricted: tuple[core.Jaxpr, list[bool]], is_param: Sequence[bool]
) -> bool:
    """Whether a program needs parameters only and does no work to speak of."""
    program, used = restricted
    from_params = all(p for p, u in zip(is_param, used, strict=True) if u)
    return from_params and not any(
        eqn.primitive.name in PRODUCTS | {"while"} or is_foreign(eqn.primitive)
        for eqn in all_eqns(program)
    )


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
        return "offloaded by the policy"
    if not jnp.issubdtype(aval.dtype, jnp.floating):
        return "no floating numbers"
    if aval.dtype.itemsize == 1:
        return "8 bits already"
    if aval.size < _MIN_SIZE:
        return f"fewer than {_MIN_SIZE} elements"
    if aval.shape[-1] * aval.dtype.itemsize < _MIN_ROW_BYTES:
        return f"rows of less than {_MIN_ROW_BYTES} bytes"
    if traced.feeds_exponential(index):
        return "backward takes its exponential"
    if traced.has_pole(index):
        return "backward divides by it"
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
