"""Gathers of rows by a permutation, with gradients that are gathers too.

The gradient of a gather is a scatter that adds rows, because an index may come several
times. On a GPU it takes several times as long as a gather. Layers of experts gather
their tokens by the order that sorts the choices of tokens: each row comes once, or each
token once for each of its experts. There the gradient gathers by the inverse order.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Int, Shaped

from coat_jax.fp8.rows import sums, taken
from coat_jax.programs.graph import Graph, inlined, is_plain_call
from coat_jax.programs.primitives import Operand


def gathers(
    program: core.Jaxpr, keys: Sequence[Any], is_param: Sequence[bool]
) -> core.Jaxpr:
    """Returns a program in which gathers by permutations have gradients by gathers.

    An index is a permutation if it is what a sort makes of the numbers from 0, or an
    elementwise function of it with the same values, or with all numbers k times each.
    """
    del keys, is_param
    inline = inlined(program, is_plain_call)
    graph = Graph(inline)
    replaced = {id(eqn): _by_permutation(eqn, graph) for eqn in inline.eqns}
    if not any(replaced.values()):
        return program
    return inline.replace(eqns=[replaced[id(eqn)] or eqn for eqn in inline.eqns])


def _by_permutation(eqn: core.JaxprEqn, graph: Graph) -> core.JaxprEqn | None:
    """Returns the operation that replaces a gather, or None if it has to stay."""
    if eqn.primitive.name != "gather" or not _takes_rows(eqn):
        return None
    x, index = eqn.invars
    if not jnp.issubdtype(x.aval.dtype, jnp.floating) or _is_placed(eqn):
        return None
    values = _Values.of(index, graph)
    if values is None or values.order is None:
        return None
    rows, size = x.aval.shape[0], values.order.aval.size
    if not rows or size % rows or values.table.shape != (size,):
        return None
    # The table has the index for each number that is permuted.
    if not np.array_equal(values.table, np.arange(size) // (size // rows)):
        return None
    invars = [x, index, values.order]
    return eqn.replace(primitive=rows_p, invars=invars, params={})


def _takes_rows(eqn: core.JaxprEqn) -> bool:
    """Returns whether a gather takes whole rows of its first axis."""
    (x, index), params = eqn.invars, eqn.params
    numbers, batch = params["dimension_numbers"], len(index.aval.shape) - 1
    return (
        index.aval.shape[-1] == 1
        and tuple(params["slice_sizes"]) == (1, *x.aval.shape[1:])
        and tuple(numbers.collapsed_slice_dims) == (0,)
        and tuple(numbers.start_index_map) == (0,)
        and not numbers.operand_batching_dims
        and tuple(numbers.offset_dims) == tuple(range(batch, eqn.outvars[0].aval.ndim))
    )


def _is_placed(eqn: core.JaxprEqn) -> bool:
    """Returns whether types of arrays tell where on a mesh they are."""
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    return any(not a.sharding.mesh.empty or getattr(a, "vma", None) for a in avals)


class _Values(NamedTuple):
    """The integers of an array, if they follow from a permutation and constants.

    Attributes:
      table: The elements in order for the permutation 0, 1, 2 and so on, or a single
        number that all elements have.
      order: The variable of the permutation; None if the elements are constant.
    """

    table: np.ndarray
    order: core.Var | None = None

    @classmethod
    def of(cls, operand: Operand, graph: Graph) -> "_Values | None":
        """Returns an operand's integers, or None if they are not known."""
        if operand.aval.dtype.kind not in "biu":
            return None
        if isinstance(operand, core.Literal):
            value = np.asarray(operand.val)
            return cls(value) if not value.ndim else None
        eqn = graph.makers.get(operand)
        if eqn is None:
            return None
        if _is_order(operand, graph):
            return cls(np.arange(operand.aval.size, dtype=operand.aval.dtype), operand)
        compute = _OPERATIONS.get(eqn.primitive.name)
        # A reshape with dimensions transposes its operand.
        if compute is None or eqn.params.get("dimensions") is not None:
            return None
        operands = [cls.of(v, graph) for v in eqn.invars]
        if not operands or None in operands:
            return None
        orders = {id(v.order): v.order for v in operands if v.order is not None}
        if len(orders) > 1:
            return None
        order = next(iter(orders.values()), None)
        # Elements keep their places, and others are equal at all places.
        size = 1 if order is None else order.aval.size
        if order is not None and math.prod(operand.aval.shape) != size:
            return None
        tables = [v.table for v in operands]
        if eqn.primitive.name in ("div", "rem") and not np.all(tables[1]):
            return None
        with np.errstate(all="ignore"):
            table = compute(*tables)
        return cls(np.asarray(table).astype(operand.aval.dtype), order)


def _is_order(operand: Operand, graph: Graph) -> bool:
    """Returns whether a vector has each number from 0 once.

    Sorts and reversals move the numbers that `iota` makes.
    """
    if isinstance(operand, core.Literal) or operand.aval.ndim != 1:
        return False
    eqn = graph.makers.get(operand)
    name = eqn and eqn.primitive.name
    if name in ("sort", "rev"):
        return _is_order(eqn.invars[list(eqn.outvars).index(operand)], graph)
    return name == "iota"


def _same(x: np.ndarray) -> np.ndarray:
    return x


def _divided(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Divides integers and rounds toward zero, as XLA does."""
    return (x - np.fmod(x, y)) // y


def _chosen(which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    return np.choose(which.astype(int), cases)


# Operations on integers that compute each element from elements at the same place.
_OPERATIONS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "and": np.bitwise_and,
    "broadcast_in_dim": _same,
    "convert_element_type": _same,
    "div": _divided,
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "not": np.invert,
    "or": np.bitwise_or,
    "rem": np.fmod,
    "reshape": _same,
    "select_n": _chosen,
    "sign": np.sign,
    "squeeze": _same,
    "sub": np.subtract,
}


def _taken(
    x: Shaped[Array, "rows *n"], index: Int[Array, "*k 1"], order: Int[Array, " size"]
) -> Shaped[Array, "..."]:
    del order
    return taken(x, index.reshape(-1)).reshape(*index.shape[:-1], *x.shape[1:])


def _gradient(
    dy: Shaped[Array, "..."], x: Any, index: Any, order: Int[Array, " size"]
) -> list[Any]:
    """Returns the gradient of `x`, the sum of each row's gradients in float32."""
    if isinstance(dy, ad.Zero):
        return [ad.Zero(x.aval), None, None]
    del index
    rows, *inner = x.aval.shape
    return [sums(dy.reshape(len(order), *inner), order, rows), None, None]


def _type(x: Any, index: Any, order: Any) -> jax.core.ShapedArray:
    shape = *index.shape[:-1], *x.shape[1:]
    return jax.core.ShapedArray(shape, x.dtype)


def _batched(arrays: Sequence[Array], axes: Sequence[Any]) -> tuple[Array, int]:
    return jax.vmap(_taken, tuple(axes))(*arrays), 0


# A gather of rows, as `jnp.take` computes it: an array, the index of each row, and the
# permutation that the index follows from.
rows_p = core.Primitive("gather_rows")
rows_p.def_impl(_taken)
rows_p.def_abstract_eval(_type)
ad.defjvp(rows_p, lambda dx, x, index, order: rows_p.bind(dx, index, order), None, None)
ad.primitive_transposes[rows_p] = _gradient
batching.primitive_batchers[rows_p] = _batched
mlir.register_lowering(rows_p, mlir.lower_fun(_taken, multiple_results=False))
