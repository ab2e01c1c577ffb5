"""Follows labels of the axes of arrays through transposes and reshapes."""

from collections.abc import Mapping, Sequence

from jax.extend import core

from coat_jax.programs.primitives import Operand, keeps_order

# The labels of an axis: several if a reshape has merged axes, and none if the axis has
# one element, or repeats one element.
Axis = tuple[int, ...]
Sizes = Mapping[int, int]
MOVES = frozenset(
    {"convert_element_type", "pcast", "pvary", "reshape", "squeeze", "transpose"}
)
SPREADS = MOVES - {"transpose"} | {"broadcast_in_dim"}


class MismatchError(Exception):
    """Raised when a program does not have the form that is searched for."""


def labelled(shape: Sequence[int]) -> list[Axis]:
    """Returns the axes of an array, each with its position as label."""
    return [(label,) if n != 1 else () for label, n in enumerate(shape)]


def of_operand(operand: Operand, axes: Sequence[Axis]) -> list[Axis]:
    """Returns the axes of an operand of an elementwise operation on arrays with `axes`.

    An axis of one element, which the operation repeats, has no label.

    Raises:
      MismatchError: If the operand has another number of axes, such as a scalar.
    """
    if operand.aval.ndim != len(axes):
        raise MismatchError
    pairs = zip(operand.aval.shape, axes, strict=True)
    return [() if n == 1 else axis for n, axis in pairs]


def moved(eqn: core.JaxprEqn, axes: Sequence[Axis], sizes: Sizes) -> list[Axis]:
    """Returns the axes of the result of an operation that moves elements.

    Args:
      eqn: A cast, a transpose, a reshape or a broadcast.
      axes: The axes of its operand.
      sizes: The size of each label.

    Raises:
      MismatchError: If a reshape splits an axis with a single label, or `eqn` is
        another operation.
    """
    name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
    if name == "transpose":
        return [axes[i] for i in eqn.params["permutation"]]
    if name == "broadcast_in_dim":
        places = map(int, eqn.params["broadcast_dimensions"])
        by_place = dict(zip(places, axes, strict=True))
        return [by_place.get(i, ()) for i in range(len(shape))]
    return _in_order(eqn, axes, shape, sizes)


def before(eqn: core.JaxprEqn, axes: Sequence[Axis], sizes: Sizes) -> list[Axis]:
    """Returns the axes of the operand of an operation that moves or repeats elements.

    Args:
      eqn: A cast, a transpose, a reshape or a broadcast.
      axes: The axes of its result.
      sizes: The size of each label.

    Raises:
      MismatchError: If a reshape merges axes to a single label, or `eqn` is another
        operation.
    """
    name, shape = eqn.primitive.name, eqn.invars[0].aval.shape
    if name == "transpose":
        permutation = [int(i) for i in eqn.params["permutation"]]
        return [axes[permutation.index(i)] for i in range(len(axes))]
    if name == "broadcast_in_dim":
        places = eqn.params["broadcast_dimensions"]
        return [() if n == 1 else axes[i] for i, n in zip(places, shape, strict=True)]
    return _in_order(eqn, axes, shape, sizes)


def _in_order(
    eqn: core.JaxprEqn, axes: Sequence[Axis], shape: Sequence[int], sizes: Sizes
) -> list[Axis]:
    """Returns the axes of a result from the axes of its operand, or the reverse.

    The operation keeps elements in their order. `axes` are the axes of one of the two
    arrays, and `shape` is the shape of the other array.
    """
    if eqn.primitive.name in ("reshape", "squeeze"):
        return _regrouped(eqn, axes, shape, sizes)
    if eqn.primitive.name not in MOVES:
        raise MismatchError
    return list(axes)


def _regrouped(
    eqn: core.JaxprEqn, axes: Sequence[Axis], shape: Sequence[int], sizes: Sizes
) -> list[Axis]:
    """Returns the labels of `axes` for an array with `shape` and the same elements."""
    if eqn.primitive.name == "reshape" and not keeps_order(eqn):
        raise MismatchError
    labels = [label for axis in axes for label in axis]
    groups = []
    for n in shape:
        group, size = [], 1
        while size < n and labels:
            group.append(labels.pop(0))
            size *= sizes[group[-1]]
        if size != n:
            raise MismatchError
        groups.append(tuple(group))
    if labels:
        raise MismatchError
    return groups
