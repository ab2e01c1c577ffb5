"""Names of the axes of arrays, which determine how a mesh may split the arrays."""

import dataclasses
from typing import Literal

from jaxtyping import Array


@dataclasses.dataclass(frozen=True)
class Axes:
    """The names of an array's axes, which determine how a mesh may split the array.

    Axes with the same name are split alike, as in the first array that is split along
    an axis of this name. An axis named "_" is never split. "(g e)" is one axis that
    merges `g` and `e`: `g` may be split, and `e` is never split.

    Attributes:
      names: The names, one for each axis of the array, separated by spaces.
      reduced: How the devices' results are combined if the mesh splits an axis of
        operands that the result does not have. None means that all devices have equal
        results. "max" means that the result is an amax: its unnamed axes are reduced to
        one element each.
      sizes: The lengths of axes that occur in merged axes only.
      own: Whether the array keeps its sharding, and its names are ignored.
      gathered: Whether the array's last axis may be split over more mesh axes than
        other axes of the same name. The operation then gets these parts gathered along
        the first axis, which otherwise has one element. A gather along the last axis
        would need one more copy, since the parts are not contiguous in memory there.
      added: Whether the operation adds the array to a result. If this result is a sum
        over devices, one device adds the array, and the others add zeros.
    """

    names: str
    reduced: Literal["sum", "max"] | None = None
    sizes: tuple[tuple[str, int], ...] = ()
    own: bool = False
    gathered: bool = False
    added: bool = False

    @property
    def merged(self) -> list[list[str]]:
        """The names of each axis of the array: several names if the axis is merged."""
        groups, inside = [], False
        for word in self.names.replace("(", "( ").replace(")", " )").split():
            if word in "()":
                inside = word == "("
                groups += [[]] if inside else []
            elif inside:
                groups[-1].append(word)
            else:
                groups.append([word])
        return groups

    def mapped(self, name: str) -> "Axes":
        """Returns these axes with a new first axis `name`, over which `vmap` maps."""
        return dataclasses.replace(self, names=f"{name} {self.names}", gathered=False)


WHOLE = Axes("")  # Scalars.


def tokens(count: int) -> str:
    """Returns names for `count` axes of tokens, such as "t0 t1"."""
    return " ".join(f"t{j}" for j in range(count))


def grouped(count: int, n: int, group: int) -> tuple[Axes, Axes]:
    """Returns the axes of an array with groups along its last axis, and of its scales.

    The last axis may be split between groups, but not inside a group.

    Args:
      count: The number of leading axes.
      n: The length of the last axis.
      group: The number of elements of a group.
    """
    leading = tokens(count)
    if n <= group or n % group:
        return Axes(f"{leading} _"), Axes(f"{leading} _")
    return Axes(f"{leading} (g e)", sizes=(("e", group),)), Axes(f"{leading} g")


def alike(x: Array) -> Axes:
    """Returns the axes of an array, each named by its position and its length.

    Arrays of one shape get equal names, so that a mesh splits them alike.
    """
    return Axes(" ".join(f"a{j}x{length}" for j, length in enumerate(x.shape)))


def as_it_is(x: Array) -> Axes:
    """Returns the axes of an array that keeps its sharding, since it is not read."""
    return Axes(" ".join(f"own{j}" for j in range(x.ndim)), own=True)


def transposed_tokens(count: int) -> str:
    """Returns the name of the axis that merges `count` axes of tokens."""
    return f"({tokens(count)})" if count > 1 else tokens(count) or "_"
