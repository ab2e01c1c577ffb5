"""Quantization by the specification, in NumPy and ml_dtypes, group by group.

Nothing here is shared with `coat_jax`. Linear quantization is float32 arithmetic that
any backend can reproduce, so there is one right answer. The expansion has logarithms
and powers, which no backend rounds correctly. They are float64 here, and a code is
right if the float64 value, moved by the error of float32 arithmetic, rounds to it.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator

import ml_dtypes
import numpy as np

TINY = np.finfo(np.float32).tiny
EPS = 2.0**-23
POWERS = np.exp2(np.arange(-126, 129))
BFLOAT16 = np.arange(0x7F80, dtype=np.uint16).view(ml_dtypes.bfloat16)
BFLOAT16 = BFLOAT16.astype(np.float64)


def de8_table() -> np.ndarray:
    """Returns the dynamic map of 8-bit optimizers: midpoints of linspace(0.1, 1)."""
    positive = []
    for i in range(7):
        edges = np.linspace(0.1, 1, 2**i + 1)
        positive.extend((edges[1:] + edges[:-1]) / 2 * 10.0 ** (i - 6))
    values = np.concatenate([positive, np.negative(positive), [0.0, 1.0]])
    return np.sort(values).astype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """The specification of a format."""

    max: float
    dynamic_range: float
    dtype: type | None = None
    smallest_normal: float = 0.0
    mantissa_bits: int = 0

    @property
    def edge(self) -> float:
        """The largest magnitude that rounds to `max` rather than beyond it."""
        if self.dtype is None:
            return self.max
        step = 2.0 ** (math.floor(math.log2(self.max)) - self.mantissa_bits)
        return self.max + step / 2

    def round(self, x) -> np.ndarray:
        """Rounds to the nearest value; ties go to even, or down in DE8."""
        x = np.clip(np.asarray(x), -self.max, self.max)
        if self.dtype is not None:
            return x.astype(np.float32).astype(self.dtype).astype(np.float32)
        table = de8_table()
        distance = np.abs(x[..., None].astype(np.float64) - table)
        return table[np.argmin(distance, axis=-1)]


E4M3 = Format(
    max=448.0,
    dynamic_range=448.0**2 / 2,
    dtype=ml_dtypes.float8_e4m3fn,
    smallest_normal=2.0**-6,
    mantissa_bits=3,
)
E5M2 = Format(
    max=57344.0,
    dynamic_range=57344.0**2 / 2,
    dtype=ml_dtypes.float8_e5m2,
    smallest_normal=2.0**-14,
    mantissa_bits=2,
)
DE8 = Format(
    max=1.0, dynamic_range=float(1 / np.abs(de8_table()[de8_table() > 0]).min())
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unsigned(Format):
    """E4M3 with a fourth mantissa bit in the sign's place, without denormals."""

    def round(self, x) -> np.ndarray:
        """Rounds to nearest with ties up, but nonzero numbers never to zero."""
        x = np.minimum(np.asarray(x, np.float64), self.max)
        size = np.maximum(np.abs(x), self.smallest_normal)
        step = np.exp2(np.floor(np.log2(size)) - self.mantissa_bits)
        rounded = np.minimum(np.floor(size / step + 0.5) * step, self.max)
        return np.where(x == 0, x, np.copysign(rounded, x)).astype(np.float32)


UE4M4 = Unsigned(
    max=464.0, dynamic_range=464.0 / 2.0**-6, smallest_normal=2.0**-6, mantissa_bits=4
)
OCTAVES = 40.0


def ue4m4_values(codes: np.ndarray) -> np.ndarray:
    """Decodes UE4M4: E4M3's magnitude, plus half a step if the sign bit is set."""
    size = np.abs(codes.astype(np.float64))
    half = np.exp2(np.floor(np.log2(np.maximum(size, 2.0**-6))) - 4)
    return size + half * np.signbit(codes.astype(np.float32)) * (size > 0)


def moment_scale(group: np.ndarray, format: Format) -> np.ndarray:
    """Returns the float32 scale of a moment's group: amax / format.max."""
    amax = np.max(np.abs(group), initial=np.float32(0))
    if not np.isfinite(amax):
        return np.float32(np.nan)
    return np.maximum(np.float32(amax * np.float32(1 / format.max)), np.float32(TINY))


def groups(shape: tuple[int, ...], block: tuple[int, ...] | None) -> Iterator:
    """Yields pairs (index into scales, slices of the array), one per group.

    `block` is the extent of a group along the last axes; None means one group.
    """
    block = shape if block is None or not shape else block
    block = (1,) * (len(shape) - len(block)) + block
    starts = [range(0, n, max(b, 1)) for n, b in zip(shape, block, strict=True)]
    for start in itertools.product(*starts):
        axes = list(zip(start, block, strict=True))
        index = tuple(i // max(b, 1) for i, b in axes)
        yield index, tuple(slice(i, i + b) for i, b in axes)


def flush(x: np.ndarray) -> np.ndarray:
    """Returns `x` as float32, with denormals replaced by zeros of the same sign."""
    x = np.asarray(x).astype(np.float32)
    return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x)


def scale_of(group: np.ndarray, format: Format, block) -> np.ndarray:
    """Returns a group's scale in bfloat16, or a float32 power of two for a tensor."""
    dtype = scale_dtype(block)
    amax = np.max(np.abs(group), initial=np.float32(0))
    if not np.isfinite(amax):
        return dtype(np.nan)
    if block is None:
        fits = [s for s in POWERS if amax / s <= format.edge]
        return dtype(min(*fits, largest_scale(format, block)))
    scale = dtype(amax * np.float32(1 / format.max))
    return dtype(min(max(scale, dtype(TINY)), largest_scale(format, block)))


def largest_scale(format: Format, block) -> float:
    """Returns the largest scale s with s * max within bfloat16 and 1 / s normal."""
    allowed = POWERS if block is None else BFLOAT16
    fits = allowed * format.max <= BFLOAT16.max()
    return allowed[fits & (allowed <= 2.0**125)].max()


def scale_dtype(block: tuple[int, ...] | None):
    """Returns the dtype in which scales are stored."""
    return np.float32 if block is None else ml_dtypes.bfloat16


def quantize(x, format: Format, block) -> tuple[dict, np.ndarray]:
    """Quantizes linearly; returns scales by group and the values of the codes."""
    x = flush(x)
    scales, values = {}, np.zeros(x.shape, np.float32)
    for index, where in groups(x.shape, block):
        scale = scale_of(x[where], format, block)
        scales[index] = scale
        with np.errstate(invalid="ignore"):
            values[where] = format.round(x[where] * (1 / np.float32(scale)))
    return scales, values


def power_bounds(
    group: np.ndarray, scale, format: Format, octaves: float = math.inf
) -> tuple[int, int]:
    """Returns the least and greatest power k of a group that float32 may compute.

    k is in sixteenths. A group counts as at most `octaves` wide.
    """
    sizes = np.abs(group[group != 0]).astype(np.float64)
    if not sizes.size or not np.isfinite(sizes).all():
        return 255, 255
    top, bottom = math.log2(np.float32(scale) * format.max), math.log2(sizes.min())
    bottom = max(bottom, top - octaves)
    slack = EPS * (abs(top) + abs(bottom) + 1)
    fill = 16 * math.log2(format.dynamic_range)

    def floor(octaves: float) -> int:
        steps = fill / octaves if octaves > 0 else math.inf
        return int(min(max(steps, 1), 255))

    return floor((top - bottom + slack) * (1 + EPS)), floor(top - bottom - slack)


def expanded_bounds(
    group: np.ndarray, scale, k: float, format: Format, error: float = 0.0
) -> tuple:
    """Returns bounds of each code's value under expansion with power k / 16.

    A logarithm may be off by two float32 roundings of itself. There is no other
    tolerance, unless the group itself is known only up to a relative `error`. A code
    with two equal bounds is the only right one.
    """
    with np.errstate(divide="ignore"):
        log = np.log2(np.abs(group).astype(np.float64))
    top = math.log2(np.float32(scale) * format.max)
    power = np.minimum(log - top, 0.0) * (k / 16)
    size = np.where(np.isfinite(log), np.abs(log), 0) + abs(top)
    slack = 2 * EPS * (size * (k / 16) + np.where(np.isfinite(power), -power, 0) + 1)
    slack = slack + error * k / 16
    exact = np.exp2(power) * format.max
    signed = [np.copysign(exact * (1 + s), group) for s in (-slack, slack)]
    return tuple(format.round(s) for s in signed)


def dequantize(values: np.ndarray, scales: dict, block, powers: dict | None, format):
    """Decodes the values of codes to float64, which is exact for linear codes.

    `powers` holds k in sixteenths by group; None means linear codes.
    """
    x = np.zeros(values.shape, np.float64)
    for index, where in groups(values.shape, block):
        v, scale = values[where].astype(np.float64), float(scales[index])
        if powers is not None:
            t = (np.abs(v) / format.max) ** (16 / float(powers[index]))
            size = np.where(t == 0, 0, np.maximum(format.max * t * scale, TINY))
            x[where] = np.copysign(size, v)
        else:
            x[where] = v * scale
    return x


def adam(mu, nu, gradients, b1=0.9, b2=0.95):
    """Returns Adam's moments after each gradient, in float64."""
    actual, mu, nu = [], mu.astype(np.float64), nu.astype(np.float64)
    for g in gradients.astype(np.float64):
        mu, nu = b1 * mu + (1 - b1) * g, b2 * nu + (1 - b2) * g * g
        actual.append((mu, nu))
    return actual
