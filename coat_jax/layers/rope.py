"""The angles of RoPE, and changes of them for sequences longer than in pretraining."""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.ops.rope.api import angles, angles_of, frequencies


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """A change of RoPE's frequencies for longer sequences.

    "linear" divides all frequencies by `factor`. "llama3" divides only low ones. Let
    `turns` be the number of full rotations of a pair of elements within
    `original_length` positions. Above `high_frequency_factor` turns the frequency
    stays, below `low_frequency_factor` turns it is divided, and between the two it is
    interpolated linearly in `turns` (Llama 3.1).

    Attributes:
      kind: "linear" or "llama3".
      factor: The number that divides frequencies.
      low_frequency_factor: The number of turns below which frequencies are divided.
      high_frequency_factor: The number of turns above which frequencies stay.
      original_length: The number of positions in pretraining.

    Raises:
      ValueError: If a number is not positive and finite, the kind is unknown, or
        `high_frequency_factor` is not above `low_frequency_factor`.

    Examples:
      >>> from coat_jax.layers.rope import Rope, RopeScaling
      >>> rope = Rope(theta=5e5, scaling=RopeScaling(kind="llama3", factor=8.0))
      >>> cos, sin = rope.angles(16, 128)
      >>> cos.shape
      (16, 64)
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise ValueError(f"kind must be linear or llama3, got {self.kind!r}")
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if not 0 < value < float("inf"):
                raise ValueError(f"{field.name} must be positive, got {value!r}")
        if self.high_frequency_factor <= self.low_frequency_factor:
            raise ValueError(
                "high_frequency_factor must be above low_frequency_factor, got "
                f"{self.high_frequency_factor}, {self.low_frequency_factor}"
            )

    def scaled(self, frequency: Float[Array, " half"]) -> Float[Array, " half"]:
        """Returns the given frequencies after this change."""
        if self.kind == "linear":
            return frequency / self.factor
        low, high = self.low_frequency_factor, self.high_frequency_factor
        turns = self.original_length * frequency / (2 * math.pi)
        share = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
        return (1 - share) * frequency / self.factor + share * frequency


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embeddings.

    Attributes:
      theta: The base of the frequencies.
      scaling: A change of the frequencies; None means no change.
    """

    theta: float
    scaling: RopeScaling | None = None

    def angles(
        self, length: int, head_dim: int, start: Int[Array, "*b"] | int = 0
    ) -> tuple[Float[Array, "*b length half"], Float[Array, "*b length half"]]:
        """Returns cosines and sines of the angles of `length` positions from `start`.

        `start` may be an array [b], with the first position of each of b sequences.

        The angle of position p and pair i is p times the frequency of the pair, which
        is `theta ** (-2 * i / head_dim)` without scaling.
        """
        if self.scaling is None:
            return angles(length, head_dim, self.theta, start)
        frequency = self.scaling.scaled(frequencies(head_dim, self.theta))
        return angles_of(frequency, length, start)
