"""COAT in JAX: FP8 optimizer states and FP8 activations for memory-efficient training.

The method is COAT (arXiv 2410.19313). Adam's moments are stored in FP8 with
dynamic range expansion. Activations that the backward pass needs are saved in FP8, with
a granularity (per-tensor or per-group scales) chosen for each of them.

Each name is imported when it is first read, so that a program that uses the optimizer
alone imports neither Flax nor the Pallas kernels.
"""

from typing import TYPE_CHECKING

from pallas_kernels import lazy

if TYPE_CHECKING:
    from coat_jax.convert.api import fp8
    from coat_jax.convert.report import fp8_report
    from coat_jax.fp8.dot_general import fp8_dot_general
    from coat_jax.fp8.ragged_dot import fp8_ragged_dot
    from coat_jax.layers.attention import attention
    from coat_jax.memory.api import estimate_memory, largest_batch
    from coat_jax.models.generation import Generated, generate
    from coat_jax.optimizers.adam import fp8_adamw, scale_by_fp8_adam
    from coat_jax.optimizers.checkpoint import from_optax_state, to_optax_state
    from coat_jax.optimizers.fused import fused_update
    from coat_jax.optimizers.health import health_report
    from coat_jax.optimizers.moment import Moment
    from coat_jax.optimizers.report import moment_report
    from coat_jax.optimizers.sharding import opt_state_sharding
    from coat_jax.optimizers.state import QuantizedState
    from coat_jax.optimizers.wrapper import with_quantized_state
    from coat_jax.quantization.array import QuantizedArray, dequantize, quantize
    from coat_jax.quantization.delayed import OverwriteWithGradient
    from coat_jax.quantization.formats import DE8, E4M3, E5M2, LOG8, UE4M4, Format
    from coat_jax.quantization.granularity import PerBlock, PerGroup, PerTensor
    from coat_jax.release.api import value_and_update
    from coat_jax.release.layers import apply_layer, scan_layers
    from coat_jax.remat.api import fp8_remat
    from coat_jax.remat.gradients import gradient_report
    from coat_jax.remat.report import memory_report, residual_report

__version__ = "0.1.0"
__all__ = [
    "DE8",
    "E4M3",
    "E5M2",
    "LOG8",
    "UE4M4",
    "Format",
    "Generated",
    "Moment",
    "OverwriteWithGradient",
    "PerBlock",
    "PerGroup",
    "PerTensor",
    "QuantizedArray",
    "QuantizedState",
    "apply_layer",
    "attention",
    "dequantize",
    "estimate_memory",
    "fp8",
    "fp8_adamw",
    "fp8_dot_general",
    "fp8_ragged_dot",
    "fp8_remat",
    "fp8_report",
    "from_optax_state",
    "fused_update",
    "generate",
    "gradient_report",
    "health_report",
    "largest_batch",
    "memory_report",
    "moment_report",
    "opt_state_sharding",
    "quantize",
    "residual_report",
    "scale_by_fp8_adam",
    "scan_layers",
    "to_optax_state",
    "value_and_update",
    "with_quantized_state",
]

lazy.attach(
    __name__,
    {
        "coat_jax.convert.api": "fp8",
        "coat_jax.convert.report": "fp8_report",
        "coat_jax.fp8.dot_general": "fp8_dot_general",
        "coat_jax.fp8.ragged_dot": "fp8_ragged_dot",
        "coat_jax.layers.attention": "attention",
        "coat_jax.models.generation": "Generated generate",
        "coat_jax.memory.api": "estimate_memory largest_batch",
        "coat_jax.optimizers.adam": "fp8_adamw scale_by_fp8_adam",
        "coat_jax.optimizers.checkpoint": "from_optax_state to_optax_state",
        "coat_jax.optimizers.fused": "fused_update",
        "coat_jax.optimizers.health": "health_report",
        "coat_jax.optimizers.moment": "Moment",
        "coat_jax.optimizers.report": "moment_report",
        "coat_jax.optimizers.sharding": "opt_state_sharding",
        "coat_jax.optimizers.state": "QuantizedState",
        "coat_jax.optimizers.wrapper": "with_quantized_state",
        "coat_jax.quantization.array": "QuantizedArray dequantize quantize",
        "coat_jax.quantization.delayed": "OverwriteWithGradient",
        "coat_jax.quantization.formats": "DE8 E4M3 E5M2 LOG8 UE4M4 Format",
        "coat_jax.quantization.granularity": "PerBlock PerGroup PerTensor",
        "coat_jax.release.api": "value_and_update",
        "coat_jax.release.layers": "apply_layer scan_layers",
        "coat_jax.remat.api": "fp8_remat",
        "coat_jax.remat.gradients": "gradient_report",
        "coat_jax.remat.report": "memory_report residual_report",
    },
)
