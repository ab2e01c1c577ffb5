"""Names of the axes of arrays, which determine how a mesh may split the arrays."""

import dataclasses
from typing import Literal

from jaxtyping import Array


@dataclasses.dataclass(frozen=True)
class Axes:
    """The names of an array's axes, separated by spaces.

    Axes with the same name are split alike: the first array that is split along such an
    axis decides how.
    An axis named "_" is whole on every device. "(g e)" is the axes `g` and `e`, merged:
    `g` may be split, while `e` is whole.

    Attributes:
      names: The names, as many as the array has axes.
      reduced: How the devices' results are combined if the mesh splits an axis of
        operands that the result does not have. None means equal results. A "max"
        is an amax: the result's unnamed axes are reduced to one element each.
      sizes: The lengths of axes that occur in merged axes only.
      own: Whether the array keeps its sharding, whatever its names say.
      gathered: Whether the array's last axis may be split over more mesh axes than its
        name. The operation then gets these parts gathered along the first axis, which
        has one element otherwise. Gathered along the last axis the parts would have to
        be copied once more, since they are not contiguous in memory there.
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
    """Returns names for `count` axes of tokens."""
    return " ".join(f"t{j}" for j in range(count))


def grouped(count: int, n: int, group: int) -> tuple[Axes, Axes]:
    """Returns the axes of elements in groups along the last axis, and of the groups.

    The last axis may be split between whole groups.

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
    """Returns axes of an array of any sharding, for which an operation only waits."""
    return Axes(" ".join(f"own{j}" for j in range(x.ndim)), own=True)


def transposed_tokens(count: int) -> str:
    """Returns the name of the axis that merges `count` axes of tokens."""
    return f"({tokens(count)})" if count > 1 else tokens(count) or "_"
