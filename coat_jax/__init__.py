"""COAT in JAX: FP8 optimizer states and FP8 activations for memory-efficient training.

The method is that of COAT (arXiv 2410.19313): Adam's moments in FP8 behind a dynamic
range expansion, and what the backward pass needs in FP8 at mixed granularity.
"""

from coat_jax.quantized import (
    DE8,
    E4M3,
    E5M2,
    Format,
    PerBlock,
    PerGroup,
    PerTensor,
    QuantizedArray,
    dequantize,
    quantize,
)

__all__ = [
    "DE8",
    "E4M3",
    "E5M2",
    "Format",
    "PerBlock",
    "PerGroup",
    "PerTensor",
    "QuantizedArray",
    "dequantize",
    "quantize",
]
