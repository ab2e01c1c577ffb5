"""The table of operations: what each primitive of JAX does to an array.

All modules that read programs look operations up here. An operation with a primitive
that is not in the table is opaque: it is kept as it is.
"""

import enum
import math
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.hijax import AbstractRef
from jax.extend import core

from pallas_kernels import versions
from pallas_kernels.dispatch import array_types, placement

Operand = core.Var | core.Literal


class Kind(enum.Enum):
    """The kinds of operations.

    Attributes:
      MARK: Returns its operand unchanged; a hint to a compiler or a policy.
      CAST: Converts to another dtype.
      VIEW: Moves elements, without a change of their number.
      SPREAD: Broadcasts elements.
      CUT: Takes a part of the elements.
      ELEMENTWISE: Computes each element from elements with the same index.
      REDUCTION: Reduces whole axes.
      MATMUL: Multiplies matrices, or convolves.
      WRITE: Writes an array that XLA does not fuse with its readers.
      STATEFUL: Gives another result when it runs again.
    """

    MARK = enum.auto()
    CAST = enum.auto()
    VIEW = enum.auto()
    SPREAD = enum.auto()
    CUT = enum.auto()
    ELEMENTWISE = enum.auto()
    REDUCTION = enum.auto()
    MATMUL = enum.auto()
    WRITE = enum.auto()
    STATEFUL = enum.auto()


# The effect of an elementwise operation on rounding errors of its operands, relative to
# the amax of a group. An operation that is "gentle", or that is "bounded" because its
# results are, may always be computed from FP8 copies. A "sum" may cancel. All other
# operations need "exact" operands.
Errors = Literal["gentle", "bounded", "sum", "exact"]


class Entry(NamedTuple):
    """An entry of the table.

    Attributes:
      kind: The kind of the operation.
      errors: The effect of the operation on rounding errors; None unless it is
        elementwise.
      has_pole: Whether the operation's result is not finite where its operand is zero.
    """

    kind: Kind
    errors: Errors | None = None
    has_pole: bool = False


def _entries() -> Iterator[tuple[str, Entry]]:
    names = {
        Kind.MARK: "copy name optimization_barrier pcast pvary reshard "
        "sharding_constraint stop_gradient",
        Kind.CAST: "convert_element_type reduce_precision",
        Kind.VIEW: "reshape rev squeeze transpose",
        Kind.SPREAD: "broadcast_in_dim",
        Kind.CUT: "slice split",
        Kind.REDUCTION: "reduce_and reduce_max reduce_min reduce_or reduce_prod "
        "reduce_sum",
        Kind.MATMUL: "conv_general_dilated dot_general ragged_dot_general",
        Kind.WRITE: "argmax argmin concatenate cond cumsum empty empty2 gather "
        "gather_rows ragged_all_to_all scatter scatter-add sort while",
        Kind.STATEFUL: "rng_uniform",
    }
    for kind, words in names.items():
        yield from ((name, Entry(kind)) for name in words.split())
    elementwise: dict[Errors, str] = {
        "gentle": "abs clamp max min mul neg square",
        "bounded": "erf erfc logistic tanh",
        "sum": "add add_any one_minus_square sub",
        "exact": "and cos digamma div eq exp exp2 expm1 ge gt integer_pow le lgamma "
        "log log1p lt ne not or pow rem rsqrt select_n sin sqrt",
    }
    poles = {"digamma", "lgamma", "log", "rsqrt"}
    for errors, words in elementwise.items():
        for name in words.split():
            yield name, Entry(Kind.ELEMENTWISE, errors, name in poles)


TABLE = dict(_entries())
_OF_CODES = frozenset(f"quantize_{kind}" for kind in ("columns", "rows", "tensor"))
# Operations of our own that count as one, whatever they contain.
CLOSED: set[core.Primitive] = set()
# Values pass through these unchanged, but for their places and their dtypes.
_LAYOUT = frozenset({Kind.MARK, Kind.CAST, Kind.VIEW, Kind.SPREAD, Kind.CUT})
# The guess of a length that `jax.export` leaves open.
_SYMBOLIC = 4096


def entry_of(eqn: core.JaxprEqn) -> Entry | None:
    """Returns the entry of an operation, or None if it is opaque."""
    return TABLE.get(eqn.primitive.name)


def kind_of(eqn: core.JaxprEqn) -> Kind | None:
    """Returns the kind of an operation, or None if it is opaque."""
    entry = entry_of(eqn)
    return entry and entry[0]


def is_layout(eqn: core.JaxprEqn) -> bool:
    """Returns whether an operation only moves, converts or marks values."""
    return kind_of(eqn) in _LAYOUT


def is_elementwise(eqn: core.JaxprEqn) -> bool:
    """Returns whether an operation computes elements from elements of equal index."""
    return kind_of(eqn) is Kind.ELEMENTWISE


def is_matmul(eqn: core.JaxprEqn) -> bool:
    """Returns whether an operation is a matmul or a convolution."""
    return kind_of(eqn) is Kind.MATMUL


def has_pole(eqn: core.JaxprEqn, position: int) -> bool:
    """Returns whether a result is not finite where operand `position` is zero."""
    name = eqn.primitive.name
    if name == "integer_pow":
        return eqn.params["y"] < 0
    entry = entry_of(eqn)
    return (entry is not None and entry.has_pole) or (
        name in ("div", "rem") and position == 1
    )


def is_foreign(primitive: core.Primitive) -> bool:
    """Returns whether a primitive is a custom kernel, not a primitive of `jax.lax`."""
    name = primitive.name.replace("-", "_")
    is_of_jax = primitive.name in TABLE or name == "custom_jvp_call"
    return not is_of_jax and not hasattr(lax, f"{name}_p")


def does_work(eqn: core.JaxprEqn) -> bool:
    """Returns whether an operation is costly or stateful, and so is never repeated."""
    is_never = kind_of(eqn) in (Kind.MATMUL, Kind.STATEFUL)
    is_costly = is_foreign(eqn.primitive) and not makes_codes(eqn)
    return is_never or eqn.primitive.name == "while" or is_costly


def makes_codes(eqn: core.JaxprEqn) -> bool:
    """Returns whether an operation is a kernel that quantizes its operand to codes.

    The kernel costs as little as the XLA operations that it replaces: a single pass
    over its operand.
    """
    return placement.operation_of(eqn.params) in _OF_CODES


def is_stateful(eqn: core.JaxprEqn) -> bool:
    """Returns whether an operation may give another result when it runs again."""
    if versions.has_effects(eqn) or kind_of(eqn) is Kind.STATEFUL:
        return True
    bodies = versions.bodies_in_params(eqn.params)
    return any(is_stateful(inner) for body in bodies for inner in body.eqns)


def keeps_parts(eqn: core.JaxprEqn) -> bool:
    """Returns whether an operation is a reshard that moves no data.

    `jax.sharding.auto_axes` makes explicit mesh axes of its arguments automatic by a
    reshard of this kind.
    """
    if eqn.primitive.name != "reshard" or adds_up(eqn):
        return False
    new, old = eqn.params["dst_sharding"], eqn.invars[0].aval.sharding
    return new == old or not (new.mesh.explicit_axes or any(new.spec))


def adds_up(eqn: core.JaxprEqn) -> bool:
    """Returns whether a reshard, or its gradient, adds up partial sums of devices."""
    if eqn.primitive.name != "reshard":
        return False
    shardings = eqn.invars[0].aval.sharding, eqn.params["dst_sharding"]
    return any(map(array_types.is_partial, shardings))


def keeps_order(reshape: core.JaxprEqn) -> bool:
    """Returns whether a reshape keeps the elements in row-major order.

    Other reshapes transpose first, such as `jnp.ravel(x, order="F")`.
    """
    axes = reshape.params["dimensions"]
    return axes is None or tuple(axes) == tuple(range(reshape.invars[0].aval.ndim))


def bodies_of(eqn: core.JaxprEqn) -> list[core.Jaxpr]:
    """Returns the programs within an operation; an empty list for a kernel."""
    return [] if is_kernel(eqn) else list(versions.bodies_in_params(eqn.params))


def is_kernel(eqn: core.JaxprEqn) -> bool:
    """Returns whether an operation is a kernel: a program on memory references.

    An operation with custom partitioning counts as a kernel, because its program is
    only a definition. A call that contains a single operation of `pallas_kernels`, as
    under `vmap`, counts as a kernel, too.
    """
    if eqn.primitive.name == "custom_partitioning" or eqn.primitive in CLOSED:
        return True
    if placement.operation_of(eqn.params):
        return True
    return eqn.primitive.name != "run_state" and any(
        isinstance(var.aval, AbstractRef)
        for body in versions.bodies_in_params(eqn.params)
        for var in body.invars
    )


def all_eqns(eqns: Iterable[core.JaxprEqn]) -> Iterator[core.JaxprEqn]:
    """Yields the operations at any depth that contain no others, and `while` loops."""
    for eqn in eqns:
        bodies = bodies_of(eqn)
        for body in bodies:
            yield from all_eqns(body.eqns)
        if not bodies or eqn.primitive.name == "while":
            yield eqn


def variables(operands: Iterable[Operand]) -> set[core.Var]:
    """Returns the operands that are variables; literals are not hashable."""
    return {v for v in operands if isinstance(v, core.Var)}


def number_of(literal: core.Literal) -> float:
    """Returns the value of a scalar literal, rounded to the literal's dtype."""
    return float(np.asarray(literal.val, literal.aval.dtype))


def real_number_of(literal: core.Literal) -> float | None:
    """Returns the value of a real scalar, or None for any other literal."""
    dtype = getattr(literal.aval, "dtype", np.dtype(bool))
    is_real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    return number_of(literal) if is_real and literal.aval.shape == () else None


def size_of(aval: jax.core.ShapedArray) -> int:
    """Returns an array's number of elements, with a guess for symbolic lengths."""
    return math.prod(n if isinstance(n, int) else _SYMBOLIC for n in aval.shape)
