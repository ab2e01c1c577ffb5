"""Pallas kernels for NVIDIA Hopper GPUs. Raw arrays in, raw arrays out."""

from pallas_kernels.adam_step import adam
from pallas_kernels.dispatch import Choice, Explanation, explain
from pallas_kernels.gate import gated, gated_grad
from pallas_kernels.heads import join_heads
from pallas_kernels.norm import norm, norm_grad
from pallas_kernels.norm_rows import Tuning as NormTuning
from pallas_kernels.products import matmul, matmul_groups, matmul_heads
from pallas_kernels.quantize import (
    dequantize_groups,
    dequantize_tensor,
    maxima,
    quantize_groups,
    quantize_rows,
    quantize_tensor,
    transpose,
)
from pallas_kernels.reference.adam import AdamScalars, Moments
from pallas_kernels.reference.gate import Gated
from pallas_kernels.reference.norm import Normed, NormGrads
from pallas_kernels.reference.quantize import Copies, Groups
from pallas_kernels.reference.residual import Summed
from pallas_kernels.residual import add_quantize_groups, add_quantize_tensor
from pallas_kernels.scales import Bound, tensor_scales
from pallas_kernels.strips import Tuning as ElementwiseTuning

__all__ = [
    "AdamScalars",
    "Bound",
    "Choice",
    "Copies",
    "ElementwiseTuning",
    "Explanation",
    "Gated",
    "Groups",
    "Moments",
    "NormGrads",
    "NormTuning",
    "Normed",
    "Summed",
    "adam",
    "add_quantize_groups",
    "add_quantize_tensor",
    "dequantize_groups",
    "dequantize_tensor",
    "explain",
    "gated",
    "gated_grad",
    "join_heads",
    "matmul",
    "matmul_groups",
    "matmul_heads",
    "maxima",
    "norm",
    "norm_grad",
    "quantize_groups",
    "quantize_rows",
    "quantize_tensor",
    "tensor_scales",
    "transpose",
]
