"""The axes of arrays by labels, which are followed through transposes and reshapes."""

from collections.abc import Mapping, Sequence

from jax.extend import core

from coat_jax.programs.primitives import Operand, keeps_order

# An axis has several labels where a reshape has merged axes, and none where it has one
# element, or repeats one.
Axis = tuple[int, ...]
Sizes = Mapping[int, int]
MOVES = frozenset(
    {"convert_element_type", "pcast", "pvary", "reshape", "squeeze", "transpose"}
)
SPREADS = MOVES - {"transpose"} | {"broadcast_in_dim"}


class MismatchError(Exception):
    """Raised where a program is not what is searched."""


def labelled(shape: Sequence[int]) -> list[Axis]:
    """Returns the axes of an array, each with its position as label."""
    return [(label,) if n != 1 else () for label, n in enumerate(shape)]


def of_operand(operand: Operand, axes: Sequence[Axis]) -> list[Axis]:
    """Returns the axes of an operand of an elementwise operation on arrays with `axes`.

    Operations repeat axes of one element.

    Raises:
      MismatchError: If the operand is a number.
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
      MismatchError: If the result's axes are parts of those, or it is another
        operation.
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
    """Returns the axes of the operand of an operation that moves or spreads elements.

    Args:
      eqn: A cast, a transpose, a reshape or a broadcast.
      axes: The axes of its result.
      sizes: The size of each label.

    Raises:
      MismatchError: If the operand's axes are parts of those, or it is another
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
    """Returns `axes` on the other side of an operation that keeps elements in order.

    `shape` is the shape there.
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
