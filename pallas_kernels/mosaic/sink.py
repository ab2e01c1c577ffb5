"""The outputs of elementwise kernels, and how strips are encoded and written."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.mosaic import core as mosaic
from pallas_kernels.mosaic.codec import encode, encode_groups, largest_of
from pallas_kernels.mosaic.strips import Blocks, Encoding, Walk
from pallas_kernels.numerics import GROUP, normal


class Encoded(NamedTuple):
    """Outputs of a kernel: arrays or refs; None for outputs that are not requested."""

    wide: Any = None  # [rows, parts, n]
    groups: Any = None  # Codes [rows, parts, n], scales [rows, parts, n / group].
    row: Any = None  # [rows, parts, n]
    transposed: Any = None  # [parts, n, rows]
    maxima: Any = None  # [thread blocks]
    sums: Any = None  # [thread blocks of a row, rows]


class Sink:
    """Encodes values strip by strip and writes them.

    Args:
      out: The outputs.
      scratch: Tiles in shared memory, per part.
      encoding: The outputs to write.
      scale: The per-tensor scale of codes, or None.
      valid: A mask of the numbers to write to the transposed copy: integers with all
        bits set, or 0 for numbers to replace by zeros. None means all numbers.
    """

    def __init__(
        self,
        out: Encoded,
        scratch: Iterable,
        encoding: Encoding,
        scale: Array | None,
        valid: Array | None = None,
    ):
        self._out = out
        self._scratch = list(scratch)
        self._encoding = encoding
        self._scale = scale
        self._valid = valid
        self._sums = None
        self._tiles = {}  # A tile's strips by (part, name), until it is complete.
        self._largest = None

    def put(self, values: Iterable[Array], index_of: Callable) -> None:
        """Writes a strip of each part, at the array index `index_of(part)`."""
        for i, value in enumerate(values):
            self._put(value, i, index_of(i))

    def _put(self, value, i, index):
        out, encoding = self._out, self._encoding
        if encoding.sums:
            value = jnp.sum(value, axis=1)
            self._sums = value if self._sums is None else self._sums + value
            return
        if encoding.maxima:
            largest = jnp.abs(value)
            if self._largest is not None:
                largest = jnp.maximum(self._largest, largest)
            self._largest = largest
        if out.groups is not None:
            codes, scale = encode_groups(value, encoding.groups)
            mosaic.store(out.groups.codes.at[index], codes)
            mosaic.store(out.groups.scale.at[index], scale)
        if out.wide is not None:
            self._write("wide", value.astype(encoding.wide), i, index)
        dtype = encoding.row if encoding.transposed is None else encoding.transposed
        if dtype is None:
            return
        codes = value
        if self._scale is not None:
            codes = value if encoding.denormals else normal(value)
            codes = encode(codes, self._scale, dtype)
        if out.row is not None:
            self._write("row", codes, i, index)
        if out.transposed is not None:
            self._transpose(codes, i)

    def _write(self, name, strip, i, index):
        if not self._encoding.tiles:
            mosaic.store(getattr(self._out, name).at[index], strip)
            return
        strips = self._tiles.setdefault((i, name), [])
        if strip.dtype.itemsize == 1:
            columns = pl.ds(len(strips) * GROUP, GROUP)
            mosaic.store(self._scratch[i].row.at[:, columns], strip)
            strip = None
        else:
            # Each lane stores vectors of 16 bytes, which swizzling does not split.
            vector = GROUP // strip.dtype.itemsize
            strip = plgpu.layout_cast(strip, plgpu.Layout.TCGEN05_TMEM_NATIVE(vector))
        strips.append(strip)

    def _transpose(self, codes, i):
        written = self._tiles.setdefault((i, "transposed"), [])
        to = self._scratch[i].transposed.at[pl.ds(len(written) * GROUP, GROUP)]
        if self._valid is not None:
            # Mosaic has bitwise operations on bytes, but no arithmetic.
            bits = jnp.int8 if codes.dtype.itemsize == 1 else jnp.int16
            codes = lax.bitcast_convert_type(codes, bits) & self._valid.astype(bits)
            codes = lax.bitcast_convert_type(codes, self._encoding.transposed)
        # A lane holds 16 numbers of one row and stores them as a column, one by one.
        of_lane = plgpu.layout_cast(codes, plgpu.Layout.TCGEN05_TMEM_NATIVE(1))
        mosaic.store(to.transpose((1, 0)), of_lane)
        written.append(None)

    def finish(
        self,
        walk: Walk,
        cta: Array,
        first_part: Array | int = 0,
        blocks: Blocks | None = None,
    ) -> None:
        """Writes the amax, the sums and the tiles of a thread block.

        The first part of this sink is part `first_part` of the outputs.
        """
        row, group = walk.start(cta, blocks)
        rows = pl.ds(row, walk.strip_rows)
        if self._sums is not None:
            to = self._out.sums.at[lax.rem(cta, walk.across), rows]
            mosaic.store(to, self._sums)
        if self._largest is not None:
            largest = largest_of([self._largest], self._encoding.wide)
            self._out.maxima[lax.axis_index("cta")] = largest
        if not self._tiles:
            return
        for (i, name), strips in self._tiles.items():
            if strips[0] is not None:
                tile = getattr(self._scratch[i], name)
                tile[...] = jnp.concatenate(strips, axis=1)
        plgpu.commit_smem()
        columns = pl.ds(group * walk.group, walk.columns * walk.group)
        turned = columns, pl.ds(walk.column(cta), walk.strip_rows)
        for i, name in self._tiles:
            at = first_part + i
            index = (at, *turned) if name == "transposed" else (rows, at, columns)
            to = getattr(self._out, name).at[index]
            plgpu.copy_smem_to_gmem(getattr(self._scratch[i], name), to)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
