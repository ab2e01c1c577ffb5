"""Fills arrays on devices from a checkpoint, in pieces of bounded memory.

Each device holds a shard of a parameter. A piece is a block of consecutive whole rows,
at the same place in every shard. Threads read the next pieces while one is copied to
the devices and into its place there. The memory of pieces is reused, because the
operating system takes longer to allocate new memory than to read a file from its cache.
The host holds at most `READERS` + 1 pieces, a copy of one, and the arrays that the
threads convert or dequantize, a few MiB each.
"""

import collections
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from coat_jax.models.hf.layout import Parameter
from coat_jax.models.hf.weights import Weights

# The number of threads that read, and the most bytes of a piece of several rows.
READERS = 8
PIECE = 2**25
# JAX on a CPU uses memory with this alignment, in bytes, for arrays without a copy.
_ALIGNMENT = 64

# The part of a piece in each shard, by the place of the shard in the parameter.
Parts = dict[tuple[int, ...], np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pieces:
    """The pieces of a parameter on its devices.

    All shapes and places have the axes of `Parameter.stored`, after an axis of layers
    if the parameter has one. All processes cut a parameter alike.

    Attributes:
      parameter: The parameter in the checkpoint.
      target: The shape and dtype of the array, of all layers.
      sharding: The sharding of the array, which divides all axes evenly.
    """

    parameter: Parameter
    target: jax.ShapeDtypeStruct
    sharding: Sharding

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        return self._stored(self.target.shape)

    @cached_property
    def shard(self) -> tuple[int, ...]:
        """The shape of a device's shard."""
        return self._stored(self.sharding.shard_shape(self.target.shape))

    @cached_property
    def piece(self) -> tuple[int, ...]:
        """The shape of a piece in one shard.

        A piece has one entry along the first axes, some entries along the next axis,
        and all entries along the others. In all different shards of a process together,
        it has at most `PIECE` bytes or one row of each shard.
        """
        # The first axis with entries that are small enough is cut.
        limit = PIECE // self._most_shards // self.target.dtype.itemsize
        axis, rows = 0, len(self.shard) - 1 - len(self.parameter.columns)
        while axis < rows and math.prod(self.shard[axis + 1 :]) > limit:
            axis += 1
        size, below = self.shard[axis], self.shard[axis + 1 :]
        pieces = -(-size // max(limit // math.prod(below), 1))
        return (1,) * axis + (-(-size // pieces),) + below

    @cached_property
    def starts(self) -> list[tuple[int, ...]]:
        """The place of each piece in a shard.

        All pieces have one shape, so that the last piece along an axis may overlap the
        piece before it; they have the same values there.
        """
        axes = [
            [min(start, size - length) for start in range(0, size, length)]
            for size, length in zip(self.shard, self.piece, strict=True)
        ]
        return list(itertools.product(*axes))

    @property
    def nbytes(self) -> int:
        """The number of bytes of a piece in all different shards of a process."""
        size = math.prod(self.piece) * self.target.dtype.itemsize
        return size * self._most_shards

    def read(self, weights: Weights, start: Sequence[int], memory: np.ndarray) -> Parts:
        """Reads a piece into memory; returns its part of each shard.

        Args:
          weights: The checkpoint.
          start: The place of the piece in a shard.
          memory: At least `nbytes` bytes.
        """
        size = math.prod(self.piece) * self.target.dtype.itemsize
        parts = {}
        for i, shard in enumerate(sorted(set(self._places.values()))):
            of_shard = memory[i * size : (i + 1) * size].view(self.target.dtype)
            parts[shard] = of_shard.reshape(self.piece)
            first = [a + b for a, b in zip(shard, start, strict=True)]
            index = [range(a, a + n) for a, n in zip(first, self.piece, strict=True)]
            if not self.parameter.of_layers:
                weights.read(self.parameter, 0, index, parts[shard])
                continue
            for layer, out in zip(index[0], parts[shard], strict=True):
                weights.read(self.parameter, layer, index[1:], out)
        return parts

    def put(self, parts: Parts) -> Array:
        """Copies a piece to its devices, as one array with a shard on each device."""
        return self._array(parts, self._whole_piece, self._stored_sharding)

    def put_whole(self, parts: Parts) -> Array:
        """Returns the array of a parameter that is a single piece."""
        # On a CPU the array may keep the memory, which could then not be reused.
        copies = {
            shard: np.array(
                of_shard.T if self.parameter.transposed else of_shard, order="C"
            )
            for shard, of_shard in parts.items()
        }
        return self._array(copies, self.target.shape, self.sharding)

    def programs(self) -> tuple[jax.stages.Lowered, jax.stages.Lowered]:
        """Returns a program that makes zeros, and one that writes a piece to its place.

        The second program takes the array, which is donated, the piece, and the piece's
        place in a shard, int32 [axes].
        """
        zeros = partial(jnp.zeros, self.target.shape, self.target.dtype)
        whole = jax.ShapeDtypeStruct(
            self.target.shape, self.target.dtype, sharding=self.sharding
        )
        piece = jax.ShapeDtypeStruct(
            self._whole_piece, self.target.dtype, sharding=self._stored_sharding
        )
        start = jax.ShapeDtypeStruct((len(self.shape),), jnp.int32)
        write = _place_transposed if self.parameter.transposed else _place
        if isinstance(self.sharding, NamedSharding):
            specs = self.sharding.spec, self._stored_sharding.spec, P()
            write = jax.shard_map(
                write, mesh=self.sharding.mesh, in_specs=specs, out_specs=specs[0]
            )
        write = jax.jit(write, donate_argnums=0, out_shardings=self.sharding)
        return (
            jax.jit(zeros, out_shardings=self.sharding).lower(),
            write.lower(whole, piece, start),
        )

    def _array(self, parts: Parts, shape: tuple[int, ...], sharding: Sharding) -> Array:
        shards = [jax.device_put(parts[s], d) for d, s in self._places.items()]
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)

    def _stored(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[::-1] if self.parameter.transposed else shape

    @cached_property
    def _stored_sharding(self) -> Sharding:
        if not isinstance(self.sharding, NamedSharding):
            return self.sharding
        spec = (*self.sharding.spec, *[None] * len(self.shape))[: len(self.shape)]
        return NamedSharding(self.sharding.mesh, P(*self._stored(spec)))

    @cached_property
    def _whole_piece(self) -> tuple[int, ...]:
        """The shape of the array that `put` returns: a piece of every shard."""
        shapes = zip(self.piece, self.shape, self.shard, strict=True)
        return tuple(n * (whole // shard) for n, whole, shard in shapes)

    @cached_property
    def _all_places(self) -> dict[jax.Device, tuple[int, ...]]:
        indices = self._stored_sharding.devices_indices_map(self.shape)
        return {
            device: tuple(s.start or 0 for s in index)
            for device, index in indices.items()
        }

    @cached_property
    def _places(self) -> dict[jax.Device, tuple[int, ...]]:
        """The place of the shard of each device of this process."""
        devices = self.sharding.addressable_devices
        return {d: indices for d, indices in self._all_places.items() if d in devices}

    @cached_property
    def _most_shards(self) -> int:
        """The largest number of different shards that any process has."""
        shards = collections.defaultdict(set)
        for device, indices in self._all_places.items():
            shards[device.process_index].add(indices)
        return max(map(len, shards.values()))


def _place(array: Array, piece: Array, start: Array) -> Array:
    return lax.dynamic_update_slice(array, piece, list(start))


def _place_transposed(array: Array, piece: Array, start: Array) -> Array:
    return lax.dynamic_update_slice(array, piece.T, list(start)[::-1])


def filled(weights: Weights, parameters: Mapping[str, Pieces]) -> dict[str, Array]:
    """Returns the arrays of parameters, by name, with the values of a checkpoint."""
    arrays: dict[str, Array] = {}
    with (
        _reading(weights, parameters) as pieces,
        ThreadPoolExecutor(READERS) as compilers,
    ):
        programs = {
            name: [compilers.submit(p.compile) for p in parameter.programs()]
            for name, parameter in parameters.items()
            if len(parameter.starts) > 1
        }
        for name, start, parts in pieces:
            if name not in programs:
                array = parameters[name].put_whole(parts)
            else:
                zeros, write = (program.result() for program in programs[name])
                piece = parameters[name].put(parts)
                array = arrays.pop(name) if name in arrays else zeros()
                array = write(array, piece, np.array(start, np.int32))
            # The memory of a piece is used again only after the devices have read it.
            arrays[name] = jax.block_until_ready(array)
    return arrays


@contextlib.contextmanager
def _reading(
    weights: Weights, parameters: Mapping[str, Pieces]
) -> Iterator[Iterator[tuple[str, tuple[int, ...], Parts]]]:
    """Reads all pieces of all parameters in threads, while the context is open.

    Yields:
      An iterator over the pieces, each with its parameter's name, its place and its
      parts. The parts are valid until the next piece is requested.
    """
    waiting = ((name, start) for name, p in parameters.items() for start in p.starts)
    size = max(parameter.nbytes for parameter in parameters.values())
    pool = ThreadPoolExecutor(READERS)
    reading: collections.deque = collections.deque()

    def submit(memory: np.ndarray) -> None:
        for name, start in itertools.islice(waiting, 1):
            parts = pool.submit(parameters[name].read, weights, start, memory)
            reading.append((name, start, memory, parts))

    def pieces() -> Iterator[tuple[str, tuple[int, ...], Parts]]:
        while reading:
            name, start, memory, parts = reading.popleft()
            yield name, start, parts.result()
            submit(memory)

    try:
        for _ in range(READERS + 1):
            submit(_aligned(size))
        yield pieces()
    finally:
        # The files close only after every read has ended.
        pool.shutdown(cancel_futures=True)


def _aligned(size: int) -> np.ndarray:
    """Returns new memory of `size` bytes, aligned to `_ALIGNMENT`."""
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return memory[first : first + size]
