"""Weights of FP8 matmuls, in the order of axes in which a program stores them."""

import dataclasses
import math
from typing import Any

import jax
from jaxtyping import Array, Float

from coat_jax.fp8.matmul import matmul_codes, quantize_tensor, quantize_tokens
from coat_jax.quantization.formats import E4M3
from pallas_kernels import Scaled
from pallas_kernels.dispatch import devices


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stored:
    """A weight w [*batch, k, n] of `x @ w`, perhaps stored as its transpose [*n, k].

    The array itself is never transposed: codes and gradients are computed in the order
    of storage. A transpose may have several output axes, as a stack of gate and up has.

    Attributes:
      array: The weight, or its transpose.
      is_transposed: Whether `array` is the transpose.
    """

    array: Any
    is_transposed: bool = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of w, with its output axes merged to one."""
        if not self.is_transposed:
            return self.array.shape
        *outputs, k = self.array.shape
        return k, math.prod(outputs)

    def for_outputs(self) -> Scaled:
        """Returns the E4M3 codes [n, k] that the forward pass reads, and their scales.

        If `array` is the transpose, each output feature is a row and has a scale, so
        that one pass over the array quantizes it. Otherwise there is one scale. Several
        devices may shard the array along any axis, so they always use one scale.
        """
        if self.is_transposed and devices.is_alone():
            return quantize_tokens(self._matrix)
        copies = "row" if self.is_transposed else "transposed"
        codes = quantize_tensor(self._matrix, E4M3, copies=copies)
        return Scaled(getattr(codes, copies), codes.scale)

    def for_inputs(self, scale: Float[Array, ""], after: Array | None) -> Array:
        """Returns the E4M3 codes [k, n] that the backward pass reads.

        `scale` is their per-tensor scale. `after` is an array that must be computed
        before the codes, or None.
        """
        copies = "transposed" if self.is_transposed else "row"
        options = {"scale": scale, "after": after}
        codes = quantize_tensor(self._matrix, E4M3, copies=copies, **options)
        return getattr(codes, copies)

    def gradient(self, x: Scaled, dy: Scaled) -> "Stored":
        """Computes the gradient of w from codes x [k, tokens] and dy [n, tokens]."""
        first, second = (dy, x) if self.is_transposed else (x, dy)
        codes, scales = (first.codes, second.codes), (first.scale, second.scale)
        product = matmul_codes(*codes, *scales, dtype=self.array.dtype)
        return Stored(product.reshape(self.array.shape), self.is_transposed)

    @property
    def _matrix(self) -> Array:
        """The array, with its output axes merged to one."""
        if not self.is_transposed:
            return self.array
        return self.array.reshape(-1, self.array.shape[-1])
