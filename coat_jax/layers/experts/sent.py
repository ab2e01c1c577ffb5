"""Rows of tokens that travel to the devices of their experts, and back.

Along a mesh axis each of p devices has E / p experts, and tokens of its own. Each
device sorts the choices of its tokens by device, and by expert for each device, and
sends each device a chunk of rows. All chunks have the same size, so that an all-to-all
exchanges them, and rows come back by the same exchange. Devices tell one another how
many rows there are for each expert (p * p * E / p numbers), and sort the rows that
arrived by expert once more. Shared experts are on every device: their rows stay where
they are.

Shapes are static, but loads are not. A chunk has room for all rows that a device can
send to another, or for `Experts.buffer` times the mean. In the first case devices
exchange as many parts of the chunks, one after another, as the longest chunk needs.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

import pallas_kernels as kernels
from coat_jax.fp8.rows import taken
from coat_jax.layers.experts.routing import Experts
from coat_jax.layers.experts.rows import Rows
from pallas_kernels import GroupTiles
from pallas_kernels.dispatch import array_types
from pallas_kernels.ops.grouped_matmul.tiles import ROWS

# The number of rows that travel at once, relative to a chunk's rows under equal loads.
_PART = 1.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunks:
    """The chunks of rows that each device of a mesh axis sends to every device.

    Attributes:
      rows: The size of a chunk in rows, a multiple of 8.
      part: The number of rows of a chunk that travel at once.
      axis: The mesh axis.
    """

    rows: int
    part: int
    axis: str

    @classmethod
    def of(cls, tokens: int, experts: Experts, devices: int, axis: str) -> "Chunks":
        """Returns the chunks for `tokens` tokens on each of `devices` devices.

        A token sends at most as many rows to a device as the device has experts.
        """
        rows = tokens * min(experts.top_k, experts.num_experts // devices)
        mean = tokens * experts.top_k / devices
        at_once = _aligned(_PART * mean)
        if experts.buffer is not None:
            rows = min(rows, math.ceil(experts.buffer * mean))
            at_once = rows
        rows = _aligned(rows)
        return cls(rows=rows, part=min(_aligned(at_once), rows), axis=axis)

    def overflow(self, sizes: Int[Array, "p p"]) -> Bool[Array, ""]:
        """Returns whether any chunk is too small for its rows.

        `sizes` has the number of rows by sender and receiver.
        """
        return jnp.max(sizes) > self.rows

    def exchange(
        self, x: Shaped[Array, "p*rows *n"], sizes: Int[Array, "p p"]
    ) -> Shaped[Array, "p*rows *n"]:
        """Sends chunk i to device i, and returns the chunks of all devices in order.

        Args:
          x: The chunks, with zeros after their rows.
          sizes: The number of rows in each device's chunks, by sender and receiver.
        """
        chunks = x.reshape(-1, self.rows, *x.shape[1:])
        if self.part == self.rows:
            return self._exchanged(chunks).reshape(x.shape)
        needed = -(-jnp.max(sizes) // self.part)
        out = jnp.zeros_like(chunks)
        number = jnp.zeros((), needed.dtype)
        chunks, out, number = array_types.varying_alike((chunks, out, number))

        def travel(state):
            number, out = state
            # The last part may overlap the part before, and then sends rows again.
            start = jnp.minimum(number * self.part, self.rows - self.part)
            sent = lax.dynamic_slice_in_dim(chunks, start, self.part, axis=1)
            sent = self._exchanged(sent)
            out = lax.dynamic_update_slice_in_dim(out, sent, start, axis=1)
            return number + 1, out

        _, out = lax.while_loop(lambda state: state[0] < needed, travel, (number, out))
        return out.reshape(x.shape)

    def _exchanged(self, chunks: Array) -> Array:
        return lax.all_to_all(chunks, self.axis, split_axis=0, concat_axis=0)


def _aligned(rows: float) -> int:
    return -(-math.ceil(rows) // ROWS) * ROWS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SentRows:
    """Rows, sorted by expert, of tokens from all devices of a mesh axis.

    The class has the methods of `Rows`. In their arguments and results, tokens and
    choices are those that this device has, and rows belong to this device's experts.

    Attributes:
      choice: The choices of this device's tokens, sorted by device and expert, with
        choices of shared experts at the end.
      counts: The number of rows that device i sends to expert k of device j, at
        [i, j, k].
      sent: The rows of this device's chunks, and then the rows of shared experts.
      order: The index of each row among the arrived rows, which are in the order of
        `sent`. The index of padding is the number of arrived rows.
      sizes: The number of rows of each of this device's experts. The shared experts
        are last.
      chunks: The sizes of the chunks that devices exchange, and the mesh axis.
    """

    choice: Int[Array, " sorted"]
    counts: Int[Array, "p p each"]
    sent: Rows
    order: Int[Array, " rows"]
    sizes: Int[Array, " groups"]
    chunks: Chunks = dataclasses.field(metadata={"static": True})

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
        # Experts are in the order of devices, and shared experts follow them.
        by_expert = Rows.sorted_by_expert(ids, experts.num_groups)
        sizes = by_expert.sizes[: experts.num_experts].reshape(count, -1)
        counts = lax.all_gather(sizes, axis)
        choice = by_expert.choice[: ids.size]
        return cls.of(choice, counts, ids.shape, experts, axis, padding=padding)

    @classmethod
    def of(
        cls,
        choice: Int[Array, " sorted"],
        counts: Int[Array, "p p each"],
        shape: tuple[int, int],
        experts: Experts,
        axis: str,
        *,
        padding: int,
    ) -> "SentRows":
        """Returns the rows that arrive, in the order of this device's experts.

        Args:
          choice: The sorted choices of this device's tokens; see the class.
          counts: The number of rows that each device sends to each expert; see the
            class.
          shape: The number of this device's tokens, and of choices of each token.
          experts: The experts.
          axis: The mesh axis.
          padding: The least number of rows of padding at the end.
        """
        tokens, _ = shape
        chunks = Chunks.of(tokens, experts, len(counts), axis)
        here, shared = lax.axis_index(axis), experts.num_shared
        # Rows that do not fit in a chunk do not arrive.
        arrived = jnp.diff(
            jnp.minimum(jnp.cumsum(counts[:, here], axis=1), chunks.rows), prepend=0
        )
        of_shared = jnp.full(shared, tokens, jnp.int32)
        sizes = jnp.sum(arrived, axis=0, dtype=jnp.int32)
        sizes = jnp.concatenate(array_types.varying_alike((sizes, of_shared)))
        of_devices = jnp.sum(counts[here], axis=1, dtype=jnp.int32)
        in_chunks = _in_chunks(choice, of_devices, chunks, shape, shared)
        count = _aligned(len(in_chunks)) + padding
        return cls(
            choice=choice,
            counts=counts,
            sent=Rows.of(in_chunks, sizes, shape),
            order=_order(arrived, sizes, chunks, count),
            sizes=sizes,
            chunks=chunks,
        )

    @property
    def saved(self) -> tuple[Array, Array]:
        """The arrays to save as residuals; `restored` returns equal rows from them."""
        return self.choice, self.counts

    def tiles(self) -> GroupTiles:
        """Returns the kernels' tiles of these rows, which all their matmuls share."""
        return kernels.group_tiles(self.sizes, rows=len(self.order))

    def of_tokens(self, x: Shaped[Array, "tokens *n"]) -> Shaped[Array, "rows *n"]:
        """Sends each token's row of `x` to the rows of its choices; padding is zeros.

        If a row does not fit in a chunk, all results are undefined.
        """
        return self._arrive(self.sent.of_tokens(x))

    def transposed(self, x: Float[Array, "tokens n"]) -> Float[Array, "n padded"]:
        """Returns `of_tokens(x)` for codes `x`, transposed by `grouped_transpose`."""
        return kernels.grouped_transpose(self.of_tokens(x), self.sizes)

    def of_choices(self, x: Shaped[Array, "tokens choices"]) -> Shaped[Array, " rows"]:
        """Sends each choice's element of `x` to the choice's row; padding is zeros."""
        return self._arrive(self.sent.of_choices(x))

    def to_choices(self, x: Shaped[Array, " rows"]) -> Shaped[Array, "tokens choices"]:
        """Sends each row's element of `x` back to the row's choice.

        This is the inverse of `of_choices`.
        """
        return self.sent.to_choices(self._return(x))

    def sums(
        self,
        x: Float[Array, "rows n"],
        add: Float[Array, "tokens n"] | None = None,
        dtype: DTypeLike = jnp.float32,
    ) -> Float[Array, "tokens n"]:
        """Sends rows back in their dtype, and sums the rows of each token and `add`.

        Sums are in float32, and are rounded to `dtype`.

        If any device of the axis has more rows for another device than fit in a chunk,
        the sums are NaN on all devices of the axis.
        """
        sums = self.sent.sums(self._return(x), add, dtype)
        return jnp.where(self.chunks.overflow(self._of_pairs), jnp.nan, sums)

    def common(self, scale: Float[Array, ""]) -> Float[Array, ""]:
        """Returns the largest of all devices' scales, for rows from all of them."""
        return array_types.largest_over(scale, (self.chunks.axis,))

    @property
    def _of_pairs(self) -> Int[Array, "p p"]:
        """The number of rows that device i sends to device j, at [i, j]."""
        return jnp.sum(self.counts, axis=2)

    def _arrive(self, x: Array) -> Array:
        return taken(self._exchange(x), self.order)

    def _return(self, x: Array) -> Array:
        count = len(self.order)
        places = jnp.full(len(self.sent.choice), count, jnp.int32)
        rows = jnp.arange(count, dtype=jnp.int32)
        places = places.at[self.order].set(rows, mode="drop")
        return self._exchange(taken(x, places))

    def _exchange(self, x: Array) -> Array:
        """Exchanges the chunks; the rows of shared experts stay."""
        in_chunks = len(self.counts) * self.chunks.rows
        exchanged = self.chunks.exchange(x[:in_chunks], self._of_pairs)
        if len(x) == in_chunks:
            return exchanged
        return jnp.concatenate([exchanged, x[in_chunks:]])


def sorted_rows(
    ids: Int[Array, "tokens choices"],
    experts: Experts,
    axis: str | None,
    *,
    padding: int = 0,
) -> Rows | SentRows:
    """Returns the rows of tokens' choices, sorted by expert.

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
    """Returns the rows of `sorted_rows` again, from their attribute `saved`."""
    if axis is None:
        return Rows.of(*saved, shape)
    return SentRows.of(*saved, shape, experts, axis, padding=padding)


def _in_chunks(
    choice: Int[Array, " sorted"],
    sizes: Int[Array, " p"],
    chunks: Chunks,
    shape: tuple[int, int],
    shared: int,
) -> Int[Array, " sent"]:
    """Returns the choice of each row of the chunks, and then of shared experts' rows.

    Args:
      choice: The choices, sorted by device, with choices of shared experts at the end.
      sizes: The number of rows for each device.
      chunks: The chunks.
      shape: The number of tokens, and of choices of each token.
      shared: The number of shared experts.
    """
    tokens, choices = shape
    row = jnp.arange(chunks.rows, dtype=jnp.int32)
    first = jnp.cumsum(sizes) - sizes
    nothing = tokens * choices
    index = jnp.where(row < sizes[:, None], first[:, None] + row, nothing).reshape(-1)
    rows = choice.at[index].get(mode="fill", fill_value=nothing)
    return jnp.concatenate([rows, choice[tokens * (choices - shared) :]])


def _order(
    arrived: Int[Array, "p each"],
    sizes: Int[Array, " groups"],
    chunks: Chunks,
    count: int,
) -> Int[Array, " rows"]:
    """Returns the index of each row, by group, in the chunks and shared experts' rows.

    Args:
      arrived: The number of rows that arrive, by sender and group.
      sizes: The number of rows of each group, with the shared experts last.
      chunks: The chunks.
      count: The number of rows in the result. Rows of padding, at the end, have an
        index after the last arrived row.
    """
    senders, each = arrived.shape
    chunk = chunks.rows * jnp.arange(senders, dtype=jnp.int32)
    starts = chunk[:, None] + jnp.cumsum(arrived, axis=1) - arrived
    shared = sizes[each:]
    of_shared = senders * chunks.rows + jnp.cumsum(shared) - shared
    start = jnp.concatenate([starts.T.reshape(-1), of_shared])
    size = jnp.concatenate([arrived.T.reshape(-1), shared])
    ends = jnp.cumsum(size)
    row = jnp.arange(count, dtype=jnp.int32)
    segment = jnp.sum(row[:, None] >= ends[:-1], axis=1)
    index = start[segment] + row - (ends - size)[segment]
    return jnp.where(row < ends[-1], index, senders * chunks.rows + jnp.sum(shared))
