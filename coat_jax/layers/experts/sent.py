"""Rows of tokens that travel to the devices of their experts, and back.

Along a mesh axis each of p devices has E / p experts, and tokens of its own. It sorts
the choices of its tokens by device, and by expert for each device. Devices tell one
another how many rows they send (p * p * E / p numbers), so that each knows where its
rows arrive. Rows arrive in the order of their senders, and are sorted by expert once
more. Shared experts are on every device: their rows stay where they are.

Shapes are static, but loads are not. An array of arrived rows has place for all rows
that can arrive, or for `Experts.buffer` times the mean.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

import pallas_kernels as kernels
from coat_jax.layers.experts.routing import Experts
from coat_jax.layers.experts.rows import Rows, taken
from pallas_kernels import GroupTiles
from pallas_kernels.dispatch import array_types, devices, stand_ins
from pallas_kernels.ops.grouped_matmul.tiles import ROWS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunks:
    """Parts of arrays of rows that the devices of a mesh axis send to one another.

    All arrays are int32 [senders, receivers], and equal on all devices of the axis.

    Attributes:
      start: The first row of a part in its sender's array.
      target: The first row of a part in its receiver's array. Parts follow one another
        in the order of their senders.
      size: The number of rows.
      axis: The mesh axis.
    """

    start: Int[Array, "p p"]
    target: Int[Array, "p p"]
    size: Int[Array, "p p"]
    axis: str = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, sizes: Int[Array, "p p"], capacity: int, axis: str) -> "Chunks":
        """Returns parts that follow one another in the arrays of all devices.

        Args:
          sizes: The number of rows of each part.
          capacity: The number of rows of each receiver's array. Rows after the last
            one are not sent, because they would be written to other memory.
          axis: The mesh axis.
        """
        target = jnp.cumsum(sizes, axis=0) - sizes
        size = jnp.clip(capacity - target, 0, sizes)
        start = jnp.cumsum(sizes, axis=1) - sizes
        return cls(start=start, target=target, size=size, axis=axis)

    def returned(self) -> "Chunks":
        """Returns the parts on their way back."""
        arrays = {"start": self.target.T, "target": self.start.T, "size": self.size.T}
        return dataclasses.replace(self, **arrays)

    def send(self, x: Shaped[Array, "n *m"], count: int) -> Shaped[Array, "count *m"]:
        """Sends the parts of `x`, and returns what arrives, with zeros elsewhere."""
        # XLA has the operation for GPUs and TPUs. Programs that are traced for their
        # memory are a GPU's.
        if devices.target_platform() == "cpu" and not stand_ins.active.get():
            return self._gather(x, count)
        here = lax.axis_index(self.axis)
        out = jnp.zeros((count, *x.shape[1:]), x.dtype)
        sent = self.start[here], self.size[here], self.target[here]
        arrays = array_types.varying_alike((x, out, *sent, self.size[:, here]))
        return lax.ragged_all_to_all(*arrays, axis_name=self.axis)

    def _gather(self, x: Array, count: int) -> Array:
        """Gathers the arrays of all senders, and takes the rows of this receiver."""
        here, every = lax.axis_index(self.axis), lax.all_gather(x, self.axis)
        arrays = self.start, self.target, self.size
        start, target, size = (v[:, here] for v in arrays)
        row = jnp.arange(count, dtype=jnp.int32)
        # If several parts begin at one row, only the last of them can have rows.
        sender = jnp.sum(row[:, None] >= target, axis=1) - 1
        within = row - target[sender]
        index = sender * len(x) + start[sender] + within
        nothing = every.shape[0] * len(x)
        index = jnp.where(within < size[sender], index, nothing)
        return taken(every.reshape(nothing, *x.shape[1:]), index)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SentRows:
    """Rows by expert of the tokens that all devices of a mesh axis have sent.

    It has the methods of `Rows`. Arguments and results "of tokens" and "of choices" are
    this device's, and rows are of its experts.

    Attributes:
      sent: The rows that this device sends, sorted by device and expert.
      counts: The number of rows that the first device sends to an expert of the second.
      order: The index of each row among the arrived rows, and for padding their number.
      sizes: The number of rows of each of this device's experts. The shared experts
        are last.
      capacity: The number of rows that can arrive.
      axis: The mesh axis.
    """

    sent: Rows
    counts: Int[Array, "p p groups"]
    order: Int[Array, " rows"]
    sizes: Int[Array, " groups"]
    capacity: int = dataclasses.field(metadata={"static": True})
    axis: str = dataclasses.field(metadata={"static": True})

    @classmethod
    def sorted_by_expert(
        cls,
        ids: Int[Array, "tokens choices"],
        experts: Experts,
        axis: str,
        *,
        padding: int,
    ) -> "SentRows":
        """Sorts the choices of this device's tokens by their experts `ids`.

        At least `padding` rows of padding follow.
        """
        count = lax.axis_size(axis)
        each = experts.num_experts // count
        groups = each + experts.num_shared
        shared = ids >= experts.num_experts
        device = jnp.where(shared, lax.axis_index(axis), ids // each)
        group = jnp.where(shared, ids - experts.num_experts + each, ids % each)
        keys = (device * groups + group).astype(ids.dtype)
        sent = Rows.sorted_by_expert(keys, count * groups)
        counts = lax.all_gather(sent.sizes.reshape(count, groups), axis)
        arrays = sent.choice, counts
        return cls.of(*arrays, ids.shape, experts, axis, padding=padding)

    @classmethod
    def of(
        cls,
        choice: Int[Array, " sent"],
        counts: Int[Array, "p p groups"],
        shape: tuple[int, int],
        experts: Experts,
        axis: str,
        *,
        padding: int,
    ) -> "SentRows":
        """Returns the rows that arrive, in the order of this device's experts.

        Args:
          choice: The choices of this device's tokens, sorted by device and expert.
          counts: The number of rows that the first device sends to an expert of the
            second.
          shape: The numbers of this device's tokens and of their choices.
          experts: The experts.
          axis: The mesh axis.
          padding: The least number of rows of padding at the end.
        """
        here, count = lax.axis_index(axis), len(counts)
        arrived = counts[:, here]
        rows = capacity(shape[0], experts, count)
        return cls(
            sent=Rows.of(choice, counts[here].reshape(-1), shape),
            counts=counts,
            order=_order(arrived, rows, padding),
            sizes=jnp.sum(arrived, axis=0, dtype=jnp.int32),
            capacity=rows,
            axis=axis,
        )

    @property
    def saved(self) -> tuple[Array, Array]:
        """The arrays that `restored` takes."""
        return self.sent.choice, self.counts

    def tiles(self) -> GroupTiles:
        """Lists the tiles of rows, for all matmuls of them."""
        return kernels.group_tiles(self.sizes, rows=len(self.order))

    def of_tokens(self, x: Shaped[Array, "tokens *n"]) -> Shaped[Array, "rows *n"]:
        """Sends a row of `x` for each choice of its token; padding is zeros."""
        return self._arrive(self.sent.of_tokens(x))

    def of_choices(self, x: Shaped[Array, "tokens choices"]) -> Shaped[Array, " rows"]:
        """Sends the elements of choices to their rows; padding is zeros."""
        return self._arrive(self.sent.of_choices(x))

    def to_choices(self, x: Shaped[Array, " rows"]) -> Shaped[Array, "tokens choices"]:
        """Returns rows' elements to the choices, the inverse of `of_choices`."""
        return self.sent.to_choices(self._return(x))

    def sums(self, x: Float[Array, "rows n"]) -> Float[Array, "tokens n"]:
        """Returns rows in their dtype, and adds up the rows of each token, in float32.

        If any device was sent more rows than it has place for, all sums are NaN.
        """
        largest = jnp.max(jnp.sum(self.counts, axis=(0, 2)))
        sums = self.sent.sums(self._return(x))
        return jnp.where(largest > self.capacity, jnp.nan, sums)

    def common(self, scale: Float[Array, ""]) -> Float[Array, ""]:
        """Returns the largest scale of all devices, which fits the rows of all."""
        return array_types.largest_over(scale, (self.axis,))

    @property
    def _chunks(self) -> Chunks:
        return Chunks.of(jnp.sum(self.counts, axis=2), self.capacity, self.axis)

    def _arrive(self, x: Array) -> Array:
        return taken(self._chunks.send(x, self.capacity), self.order)

    def _return(self, x: Array) -> Array:
        count = len(self.order)
        places = jnp.full(self.capacity, count, jnp.int32)
        rows = jnp.arange(count, dtype=jnp.int32)
        places = places.at[self.order].set(rows, mode="drop")
        chunks = self._chunks.returned()
        return chunks.send(taken(x, places), len(self.sent.choice))


def capacity(tokens: int, experts: Experts, devices: int) -> int:
    """Returns the number of rows that a device has place for, a multiple of 8.

    A token sends a device at most as many rows as the device has experts.

    Args:
      tokens: The number of each device's tokens.
      experts: The experts.
      devices: The number of devices.
    """
    most = min(experts.top_k, experts.num_experts // devices)
    rows = tokens * (devices * most + experts.num_shared)
    if experts.buffer is not None:
        rows = min(rows, math.ceil(experts.buffer * tokens * experts.choices))
    return -(-rows // ROWS) * ROWS


def sorted_rows(
    ids: Int[Array, "tokens choices"],
    experts: Experts,
    axis: str | None,
    *,
    padding: int = 0,
) -> Rows | SentRows:
    """Sorts the choices of tokens by expert.

    Args:
      ids: The experts of each token.
      experts: The experts.
      axis: The mesh axis that splits the experts, within `shard_map`; None means that
        all experts are here.
      padding: The least number of rows of padding at the end.
    """
    if axis is None:
        return Rows.sorted_by_expert(ids, experts.num_groups, padding=padding)
    return SentRows.sorted_by_expert(ids, experts, axis, padding=padding)


def restored(
    saved: tuple[Array, Array],
    shape: tuple[int, int],
    experts: Experts,
    axis: str | None,
    *,
    padding: int,
) -> Rows | SentRows:
    """Returns the rows of which `saved` was saved; see `sorted_rows`."""
    if axis is None:
        return Rows.of(*saved, shape)
    return SentRows.of(*saved, shape, experts, axis, padding=padding)


def _order(
    arrived: Int[Array, "p groups"], capacity: int, padding: int
) -> Int[Array, " rows"]:
    """Returns where the rows of each group are among rows sorted by sender and group.

    Rows after the last group's have the index `capacity`.
    """
    sizes = arrived.T.reshape(-1)
    ends = jnp.cumsum(sizes)
    first = jnp.cumsum(arrived.reshape(-1)).reshape(arrived.shape) - arrived
    row = jnp.arange(capacity + padding, dtype=jnp.int32)
    segment = jnp.sum(row[:, None] >= ends[:-1], axis=1)
    index = first.T.reshape(-1)[segment] + row - (ends - sizes)[segment]
    return jnp.where(row < ends[-1], index, capacity).astype(jnp.int32)
