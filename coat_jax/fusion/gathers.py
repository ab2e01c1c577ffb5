"""Gathers of rows by a permutation, with gradients that are gathers too.

The gradient of a gather is a scatter that adds rows, because an index may occur several
times. On a GPU a scatter takes several times as long as a gather. Layers of experts
gather tokens in the order that sorts the experts of all tokens: each row occurs once,
or each token occurs once for each of its experts. In these cases the gradient is a
gather by the inverse order.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Int, Shaped

from coat_jax.fp8.rows import sums, taken, wide_order
from coat_jax.programs.graph import Graph, inlined, is_plain_call
from coat_jax.programs.primitives import Kind, Operand, all_eqns, kind_of, variables
from pallas_kernels.dispatch import array_types


def gathers(
    program: core.Jaxpr, keys: Sequence[Any], is_param: Sequence[bool]
) -> core.Jaxpr:
    """Returns a program in which gathers by permutations have gradients by gathers.

    An index counts as a permutation if it is p or p // k, where p is a permutation of
    the numbers from 0 to n - 1, and k divides n. Sorts, reversals and `iota` compute
    permutations. Any elementwise operations on integers may compute the index from p.
    """
    del keys, is_param
    if not any(eqn.primitive.name == "gather" for eqn in all_eqns(program.eqns)):
        return program
    inline = inlined(program, is_plain_call)
    of_rows = [eqn for eqn in inline.eqns if _takes_rows(eqn)]
    values = _integers(inline, [eqn.invars[1] for eqn in of_rows])
    replaced = {id(eqn): _by_permutation(eqn, values) for eqn in of_rows}
    if not any(replaced.values()):
        return program
    return inline.replace(eqns=[replaced.get(id(eqn)) or eqn for eqn in inline.eqns])


def _by_permutation(
    eqn: core.JaxprEqn, values: dict[core.Var, "_Values"]
) -> core.JaxprEqn | None:
    """Returns the operation that replaces a gather of rows, or None if it stays."""
    x, index = eqn.invars
    integers = _Values.of(index, values)
    if integers is None or integers.order is None:
        return None
    rows, size = x.aval.shape[0], integers.order.aval.size
    if not rows or size % rows or integers.table.shape != (size,):
        return None
    # The table has the index for each number that is permuted.
    if not np.array_equal(integers.table, np.arange(size) // (size // rows)):
        return None
    params = {"shape": index.aval.shape[:-1]}
    return eqn.replace(primitive=rows_p, invars=[x, integers.order], params=params)


def _takes_rows(eqn: core.JaxprEqn) -> bool:
    """Returns whether an operation gathers full rows of a floating array by index."""
    if eqn.primitive.name != "gather" or _is_placed(eqn):
        return False
    (x, index), params = eqn.invars, eqn.params
    numbers, batch = params["dimension_numbers"], len(index.aval.shape) - 1
    return (
        jnp.issubdtype(x.aval.dtype, jnp.floating)
        and jnp.finfo(x.aval.dtype).bits >= 8
        and _is_static(x)
        and index.aval.shape[-1] == 1
        and tuple(params["slice_sizes"]) == (1, *x.aval.shape[1:])
        and tuple(numbers.collapsed_slice_dims) == (0,)
        and tuple(numbers.start_index_map) == (0,)
        and not numbers.operand_batching_dims
        and tuple(numbers.offset_dims) == tuple(range(batch, eqn.outvars[0].aval.ndim))
    )


def _is_placed(eqn: core.JaxprEqn) -> bool:
    """Returns whether an operation's arrays may be split over a mesh.

    Within a `shard_map` over all axes of the mesh, arrays belong to a single device.
    """
    meshes = [v.aval.sharding.mesh for v in (*eqn.invars, *eqn.outvars)]
    return not all(mesh.empty or array_types.is_manual(mesh) for mesh in meshes)


class _Values(NamedTuple):
    """The integers of an array, if they follow from a permutation and constants.

    Attributes:
      table: The elements that the array has if the permutation is 0, 1, 2 and so on; or
        the single number that all elements equal.
      order: The variable of the permutation; None if the elements are constant.
    """

    table: np.ndarray
    order: core.Var | None = None

    @property
    def is_permutation(self) -> bool:
        """True if the array has the same elements as `order`."""
        return self.order is not None and np.array_equal(
            self.table, np.arange(self.order.aval.size)
        )

    @classmethod
    def of(
        cls, operand: Operand, values: dict[core.Var, "_Values"]
    ) -> "_Values | None":
        """Returns an operand's integers, or None if `values` does not have them."""
        if not isinstance(operand, core.Literal):
            return values.get(operand)
        if not _is_integer(operand) or np.ndim(operand.val):
            return None
        return cls(np.asarray(operand.val, operand.aval.dtype))

    @classmethod
    def permuted(cls, order: core.Var) -> "_Values":
        """Returns the values of the variable `order`, which is a permutation."""
        return cls(np.arange(order.aval.size, dtype=order.aval.dtype), order)

    @classmethod
    def computed(
        cls, eqn: core.JaxprEqn, operands: Sequence["_Values | None"]
    ) -> "_Values | None":
        """Returns the integers that an elementwise operation computes, or None."""
        compute = _OPERATIONS.get(eqn.primitive.name)
        if kind_of(eqn) is Kind.MARK and len(operands) == 1:
            compute = _same
        # A reshape with dimensions transposes its operand.
        if compute is None or eqn.params.get("dimensions") is not None:
            return None
        if not operands or None in operands:
            return None
        orders = {id(v.order): v.order for v in operands if v.order is not None}
        if len(orders) > 1:
            return None
        order = next(iter(orders.values()), None)
        result, tables = eqn.outvars[0].aval, [v.table for v in operands]
        # Elements keep their places, and constants are equal at all places.
        size = 1 if order is None else order.aval.size
        if order is not None and math.prod(result.shape) != size:
            return None
        if not _is_defined(eqn.primitive.name, tables):
            return None
        with np.errstate(all="ignore"):
            table = compute(*tables)
        return cls(np.asarray(table).astype(result.dtype), order)


def _integers(
    program: core.Jaxpr, indices: Sequence[Operand]
) -> dict[core.Var, _Values]:
    """Returns the known integers among the variables that `indices` depend on."""
    values: dict[core.Var, _Values] = {}
    needed = Graph(program).needed_for(variables(indices)) if indices else ()
    for eqn in program.eqns:
        if id(eqn) not in needed:
            continue
        operands = [_Values.of(v, values) for v in eqn.invars]
        for var in filter(_is_integer, eqn.outvars):
            if _is_order(var, eqn, operands):
                values[var] = _Values.permuted(var)
            elif result := _Values.computed(eqn, operands):
                values[var] = result
    return values


def _is_static(operand: Operand) -> bool:
    """Returns whether a shape has no symbolic lengths, which `jax.export` allows."""
    return all(isinstance(size, int) for size in operand.aval.shape)


def _is_integer(operand: Operand) -> bool:
    dtype = operand.aval.dtype
    return isinstance(dtype, np.dtype) and dtype.kind in "biu"


def _is_order(
    var: core.Var, eqn: core.JaxprEqn, operands: Sequence[_Values | None]
) -> bool:
    """Returns whether `var`, a result of `eqn`, is a permutation of 0, 1, 2 and so on.

    These are results of `iota`, and of sorts and reversals of a permutation.
    """
    if len(var.aval.shape) != 1 or not _is_static(var):
        return False
    if eqn.primitive.name == "iota":
        # In more elements than the type has numbers, numbers repeat.
        return var.aval.size - 1 <= np.iinfo(var.aval.dtype).max
    if eqn.primitive.name not in ("sort", "rev"):
        return False
    moved = operands[list(eqn.outvars).index(var)]
    return moved is not None and moved.is_permutation


def _is_defined(name: str, tables: Sequence[np.ndarray]) -> bool:
    """Returns whether the result of an operation on these integers is defined."""
    if name in ("div", "rem"):
        return bool(np.all(tables[1]))
    if name == "select_n":
        which, cases = tables[0], tables[1:]
        return bool(np.all((which >= 0) & (which < len(cases))))
    return True


def _same(x: np.ndarray) -> np.ndarray:
    return x


def _divided(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Divides integers and rounds toward zero, as XLA does."""
    return (x - np.fmod(x, y)) // y


def _chosen(which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    which, *cases = np.broadcast_arrays(which.astype(int), *cases)
    return np.take_along_axis(np.stack(cases), which[None], axis=0)[0]


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
    x: Shaped[Array, "rows *n"], order: Int[Array, " size"], *, shape: tuple[int, ...]
) -> Shaped[Array, "..."]:
    index = wide_order(order) // (order.shape[0] // x.shape[0])
    return taken(x, index).reshape(*shape, *x.shape[1:])


def _gradient(
    dy: Shaped[Array, "..."],
    x: Any,
    order: Int[Array, " size"],
    *,
    shape: tuple[int, ...],
) -> list[Any]:
    """Returns the gradient of `x`, and None for `order`, in a list.

    The gradient is summed in float32, or in float64 if `dy` is float64.
    """
    del shape
    if isinstance(dy, ad.Zero):
        return [ad.Zero(x.aval), None]
    rows, *inner = x.aval.shape
    return [sums(dy.reshape(len(order), *inner), order, rows), None]


def _type(x: Any, order: Any, *, shape: tuple[int, ...]) -> jax.core.ShapedArray:
    del order  # Within `shard_map` it varies over the same devices as `x`.
    shape = *shape, *x.shape[1:]
    return x.update(shape=shape, sharding=array_types.unsplit(x.sharding, len(shape)))


def _batched(
    arrays: Sequence[Array], axes: Sequence[Any], **params: Any
) -> tuple[Array, int]:
    return jax.vmap(partial(_taken, **params), tuple(axes))(*arrays), 0


def _tangent(dx: Array, x: Array, order: Array, **params: Any) -> Array:
    del x
    return rows_p.bind(dx, order, **params)


# A gather of rows. The operands are an array and the permutation that the index follows
# from; the parameter is the shape of the index. The numbers from r * k to r * k + k - 1
# in the permutation stand for row r of the array.
rows_p = core.Primitive("gather_rows")
rows_p.def_impl(_taken)
rows_p.def_abstract_eval(_type)
ad.defjvp(rows_p, _tangent, None)
ad.primitive_transposes[rows_p] = _gradient
batching.primitive_batchers[rows_p] = _batched
mlir.register_lowering(rows_p, mlir.lower_fun(_taken, multiple_results=False))
