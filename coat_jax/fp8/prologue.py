"""Descriptions of the operations that `fp8_remat` finds before FP8 matmuls."""

from typing import Any, Literal, NamedTuple

import jax
from jax import lax
from jax.extend import core
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from pallas_kernels import Activation, NormKind


class Norm(NamedTuple):
    """A norm of the last axis, as `pallas_kernels.norm` computes it.

    Attributes:
      kind: "rms" or "layer".
      eps: The number that is added to the mean square, or to the variance.
    """

    kind: NormKind
    eps: float


class Mark(NamedTuple):
    """A sharding constraint or a name that a program gives to an array.

    Attributes:
      primitive: The primitive that marks an array: `sharding_constraint`, `reshard` or
        `name`.
      params: The parameters of the primitive, by name.
      shape: The shape of the array in the program.
    """

    primitive: core.Primitive
    params: tuple[tuple[str, Any], ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, eqn: core.JaxprEqn) -> "Mark":
        """Returns the mark of an equation that constrains or names an array."""
        return cls(eqn.primitive, tuple(eqn.params.items()), eqn.invars[0].aval.shape)

    def __call__(self, x: Array) -> Array:
        """Applies the mark to an array, which is reshaped to `shape` and back."""
        return self._bind(x.reshape(self.shape)).reshape(x.shape)

    def _bind(self, x: Array) -> Array:
        params = dict(self.params)
        if self.primitive.name == "reshard":
            # Explicit mesh axes are automatic where kernels run. If the mesh has other
            # automatic axes, they may split the axes that the spec leaves out.
            where = params["dst_sharding"]
            free = P.UNCONSTRAINED if where.mesh.auto_axes else None
            spec = P(*(free if names is None else names for names in where.spec))
            return lax.with_sharding_constraint(x, spec)
        return self.primitive.bind(x, **params)

    @property
    def is_name(self) -> bool:
        """True if the mark is a name, False if it is a sharding constraint."""
        return self.primitive.name == "name"

    def on_all(self, arrays: Any) -> Any:
        """Applies the mark, which must be a name, to each array of a tree."""
        return jax.tree.map(self._bind, arrays)


# The residuals of a norm or a gate: FP8 copies of the inputs, in groups of 16, which
# the kernel writes; or the inputs themselves, which `fp8_remat` saves or recomputes.
Saves = Literal["copies", "arrays"]


class Prologue(NamedTuple):
    """An operation before matmuls: a norm, an activation or a gate.

    Attributes:
      function: The norm, or the activation, which may be the activation of a gate.
      marks: The marks of the operation's result.
      saves: The form in which the operation's inputs are saved.
    """

    function: Norm | Activation
    marks: tuple[Mark, ...]
    saves: Saves

    def constrained(self, x: Array) -> Array:
        """Applies the marks that are sharding constraints to codes or gradients."""
        for mark in self.marks:
            x = x if mark.is_name else mark(x)
        return x

    def named(self, arrays: Any) -> Any:
        """Gives arrays the names of the result, for the policies of `jax.checkpoint`.

        A policy that would save the result by its name then saves these arrays instead.
        """
        for mark in self.marks:
            arrays = mark.on_all(arrays) if mark.is_name else arrays
        return arrays


class Source(NamedTuple):
    """The array that matmuls read, or the operands of the norm that computes it.

    Attributes:
      x: The array, or the norm's input.
      scale: The weight that multiplies the normalized input, or None. It is a vector
        [k], or has a row [k] for each sequence.
      bias: The bias that is added afterwards, or None. It has the shapes that `scale`
        may have.
    """

    x: Any
    scale: Any = None
    bias: Any = None
