"""COAT in JAX: FP8 optimizer states and FP8 activations for memory-efficient training.

The method is that of COAT (arXiv 2410.19313): Adam's moments in FP8 behind a dynamic
range expansion, and what the backward pass needs in FP8 at mixed granularity.
"""

from coat_jax.optimizer import ScaleByFP8AdamState, fp8_adamw, scale_by_fp8_adam
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
    "ScaleByFP8AdamState",
    "dequantize",
    "fp8_adamw",
    "quantize",
    "scale_by_fp8_adam",
]
