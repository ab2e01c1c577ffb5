"""COAT in JAX: FP8 optimizer states and FP8 activations for memory-efficient training.

The method is that of COAT (arXiv 2410.19313): Adam's moments in FP8 behind a dynamic
range expansion, and what the backward pass needs in FP8 at mixed granularity.
"""

import coat_jax.serialization  # noqa: F401 - registers with flax.serialization
from coat_jax.fused import fused_update
from coat_jax.linear import fp8_dot_general
from coat_jax.memory import memory_report, residual_report
from coat_jax.moments import moment_report
from coat_jax.optimizer import fp8_adamw, scale_by_fp8_adam
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
from coat_jax.remat import fp8_remat
from coat_jax.scaling import OverwriteWithGradient
from coat_jax.sharding import opt_state_sharding
from coat_jax.state import ScaleByFP8AdamState, from_optax_state, to_optax_state

__all__ = [
    "DE8",
    "E4M3",
    "E5M2",
    "Format",
    "OverwriteWithGradient",
    "PerBlock",
    "PerGroup",
    "PerTensor",
    "QuantizedArray",
    "ScaleByFP8AdamState",
    "dequantize",
    "fp8_adamw",
    "fp8_dot_general",
    "fp8_remat",
    "from_optax_state",
    "fused_update",
    "memory_report",
    "moment_report",
    "opt_state_sharding",
    "quantize",
    "residual_report",
    "scale_by_fp8_adam",
    "to_optax_state",
]
