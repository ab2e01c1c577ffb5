"""Context parallelism: sequences that are split over the devices of a mesh.

A layer processes each token independently of the others, except in RoPE, which needs
the token's position, and in attention, which needs all keys. So each part of a sequence
becomes a row of the batch, and only RoPE and attention take the split into account.
Before attention each device has all heads of s / p positions. For attention devices
exchange arrays, so that each has all s positions of n / p heads, and afterwards they
exchange back (all-to-all; DeepSpeed-Ulysses, arXiv 2309.14509, section 3.1). Attention
thus runs as on one device, with any mask.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.dispatch.array_types import axis_names, parts_of

MeshAxes = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextParallel:
    """A split of sequences over p devices, with attention split over heads.

    Attributes:
      mesh: The mesh, with automatic or explicit axes.
      axis: The mesh axis that splits sequences into p parts.
      batch_axes: The mesh axes that split the batch.
      head_axes: Other mesh axes that split heads, as in tensor parallelism.

    Raises:
      ValueError: If the mesh lacks a named axis, or an axis is named twice.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from coat_jax.layers.context import ContextParallel
      >>> auto = (jax.sharding.AxisType.Auto,) * 2
      >>> mesh = jax.make_mesh((1, 1), ("data", "context"), axis_types=auto)
      >>> context = ContextParallel(mesh=mesh, batch_axes="data")
      >>> x = context.enter(jnp.zeros((2, 8, 64)))
      >>> context.leave(x).shape
      (2, 8, 64)
    """

    mesh: Mesh | AbstractMesh
    axis: str = "context"
    batch_axes: MeshAxes = None
    head_axes: MeshAxes = None

    def __post_init__(self) -> None:
        names = (*axis_names(self.batch_axes), *axis_names(self.head_axes), self.axis)
        for name in names:
            if name not in self.mesh.axis_names:
                raise ValueError(
                    f"the mesh must have the axis {name!r}, got {self.mesh.axis_names}"
                )
        if len(set(names)) < len(names):
            raise ValueError(f"an axis can split one thing only, got {names}")

    @property
    def parts(self) -> int:
        """The number of parts of a sequence, p."""
        return self.mesh.shape[self.axis]

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The mesh axes that split the rows of `enter`."""
        return (*axis_names(self.batch_axes), self.axis)

    def check(self, num_heads: int) -> None:
        """Raises ValueError unless the heads can be split evenly over the devices."""
        parts = self.parts * self._size(self.head_axes)
        if num_heads % parts:
            axes = ", ".join((*axis_names(self.head_axes), self.axis))
            raise ValueError(
                f"context parallelism splits attention over heads: their number must "
                f"be a multiple of {parts}, the size of the mesh axes {axes}, got "
                f"{num_heads}; use a smaller axis {self.axis}, and split the batch or "
                "the parameters over the other devices"
            )

    def enter(self, x: Shaped[Array, "b s ..."]) -> Shaped[Array, "rows length ..."]:
        """Splits each sequence into p rows of the batch, [b * p, s / p, ...].

        Rows are in the order of devices, so that no data moves if the devices already
        have these parts.

        Raises:
          ValueError: If b or s cannot be split evenly over the mesh.
        """
        b, s, *features = x.shape
        batch = self._size(self.batch_axes)
        if b % batch or s % self.parts:
            raise ValueError(
                f"the mesh splits {b} sequences into {batch} parts and each of "
                f"{s} positions into {self.parts}: both must divide"
            )

        def rows(x):
            x = self._constrained(x, self.batch_axes, self.axis)
            x = x.reshape(batch, b // batch, self.parts, -1, *features)
            return x.swapaxes(1, 2).reshape(b * self.parts, -1, *features)

        return self._placed(rows, x, self.row_axes)

    def leave(self, x: Shaped[Array, "rows length ..."]) -> Shaped[Array, "b s ..."]:
        """Joins the rows of each sequence: the inverse of `enter`."""

        def sequences(x):
            return self._sequences(self._constrained(x, self.row_axes))

        return self._placed(sequences, x, self.batch_axes, self.axis)

    def starts(self, rows: int, length: int) -> Int[Array, " rows"]:
        """Returns the position at which each row of `enter` begins."""
        of_a_shard = rows // (self._size(self.batch_axes) * self.parts)
        indices = jnp.arange(rows) // of_a_shard % self.parts
        return self._placed(lambda index: index * length, indices, self.row_axes)

    def attend(
        self,
        attention: Callable[..., Array],
        q: Float[Array, "rows length n d"],
        k: Float[Array, "rows length k d"],
        v: Float[Array, "rows length k d"],
        segment_ids: Int[Array, "b s"] | None = None,
        *options: Any,
    ) -> Float[Array, "b s n d"]:
        """Computes attention over whole sequences; each device computes some heads.

        Key heads that are too few to be split are repeated. `to_rows` moves the result
        back to the devices that have its positions.

        Args:
          attention: A function of queries [b, s, n, d], keys and values [b, s, k, d],
            segment ids, and `options`.
          q: Queries of the rows of `enter`.
          k: Keys.
          v: Values.
          segment_ids: The segment ids of whole sequences, or None.
          *options: Other arrays that `attention` takes.

        Raises:
          ValueError: If the heads cannot be split evenly over the devices.
        """
        n, key_heads = q.shape[2], k.shape[2]
        self.check(n)
        parts = self.parts * self._size(self.head_axes)
        repeats = math.lcm(key_heads, parts) // key_heads

        def exchanged(q, k, v, segment_ids, *options):
            if segment_ids is not None:
                segment_ids = self._constrained(segment_ids, self.batch_axes)
            k, v = (jnp.repeat(x, repeats, axis=2) for x in (k, v))
            heads = map(self._to_heads, (q, k, v))
            return attention(*heads, segment_ids, *options)

        heads = self.batch_axes, None, self._split_heads
        return self._placed(exchanged, q, *heads, more=(k, v, segment_ids, *options))

    def to_rows(self, o: Float[Array, "b s n d"]) -> Float[Array, "rows length n d"]:
        """Returns the result of `attend` in rows, with all heads of their positions."""

        def exchanged(o):
            o = self._constrained(o, self.batch_axes, None, self._split_heads)
            o = self._constrained(o, self.batch_axes, self.axis, self.head_axes)
            return self.enter(o)

        return self._placed(exchanged, o, self.row_axes, None, self.head_axes)

    def to_heads(self, x: Float[Array, "rows length n d"]) -> Float[Array, "b s n d"]:
        """Returns `x` in the layout of the results of `attend`; inverts `to_rows`."""
        heads = self.batch_axes, None, self._split_heads
        return self._placed(self._to_heads, x, *heads)

    def _to_heads(self, x: Array) -> Array:
        x = self._sequences(self._constrained(x, self.row_axes, None, self.head_axes))
        # XLA inserts the all-to-all between these two constraints.
        x = self._constrained(x, self.batch_axes, self.axis, self.head_axes)
        return self._constrained(x, self.batch_axes, None, self._split_heads)

    def _sequences(self, x: Array) -> Array:
        rows, _, *features = x.shape
        x = x.reshape(self._size(self.batch_axes), self.parts, -1, *x.shape[1:])
        return x.swapaxes(1, 2).reshape(rows // self.parts, -1, *features)

    @property
    def _split_heads(self) -> tuple[str, ...]:
        return (*axis_names(self.head_axes), self.axis)

    def _size(self, axes: MeshAxes) -> int:
        return parts_of(self.mesh, axis_names(axes))

    def _constrained(self, x: Array, *spec: Any) -> Array:
        # Gradients get the same constraint.
        sharding = NamedSharding(self._mesh_at(x), P(*spec))
        return jax.lax.with_sharding_constraint(x, sharding)

    def _placed(self, fn: Callable, x: Array, *spec: Any, more: tuple = ()) -> Array:
        """Returns `fn(x, *more)`, sharded by `spec`, on automatic or explicit axes.

        Within `fn` all mesh axes are automatic.
        """
        mesh = self._mesh_at(x)
        if explicit := mesh.explicit_axes:
            sharding = NamedSharding(mesh, P(*spec))
            run = jax.sharding.auto_axes(fn, axes=explicit, out_sharding=sharding)
            return run(x, *more)
        return self._constrained(fn(x, *more), *spec)

    def _mesh_at(self, x: Array) -> Mesh | AbstractMesh:
        """Returns the mesh of the type of `x`, or `self.mesh` if that has none.

        Within `auto_axes` the axes of the result are automatic.
        """
        mesh = jax.typeof(x).sharding.mesh
        if mesh.empty and self.mesh.explicit_axes:
            mesh = jax.sharding.get_abstract_mesh()
        return self.mesh if mesh.empty else mesh
