"""Pallas kernels for NVIDIA Hopper GPUs, as functions of JAX arrays.

Each public name is imported when it is first read.
"""

from typing import TYPE_CHECKING

from pallas_kernels import lazy

if TYPE_CHECKING:
    from pallas_kernels.dispatch.operations import Choice, Explanation, explain
    from pallas_kernels.mosaic.rows import Tuning as NormTuning
    from pallas_kernels.mosaic.strips import Tuning as ElementwiseTuning
    from pallas_kernels.numerics import Codes, NormKind, Scaled
    from pallas_kernels.ops.adam.api import adam
    from pallas_kernels.ops.adam.reference import AdamScalars, Moments
    from pallas_kernels.ops.attention.api import attention, attention_grad
    from pallas_kernels.ops.attention.plan import Tiles as AttentionTiles
    from pallas_kernels.ops.attention.plan import Tuning as AttentionTuning
    from pallas_kernels.ops.gate.api import gated, gated_grad
    from pallas_kernels.ops.gate.grouped import WeightedGradients, weighted_gate_grad
    from pallas_kernels.ops.gate.reference import Activation, Gated
    from pallas_kernels.ops.grouped_matmul.api import (
        group_tiles,
        grouped_matmul,
        grouped_weight_gradient,
    )
    from pallas_kernels.ops.grouped_matmul.copies import copy_rows
    from pallas_kernels.ops.grouped_matmul.sums import sum_rows
    from pallas_kernels.ops.grouped_matmul.tiles import GroupTiles, padded_rows
    from pallas_kernels.ops.grouped_matmul.transposed import grouped_transpose
    from pallas_kernels.ops.matmul.api import matmul, matmul_heads
    from pallas_kernels.ops.norm.api import norm, norm_grad
    from pallas_kernels.ops.norm.reference import Normed, NormGrads
    from pallas_kernels.ops.quantize.blocks import Block, quantize_blocks
    from pallas_kernels.ops.quantize.columns import quantize_columns
    from pallas_kernels.ops.quantize.groups import (
        dequantize_groups,
        quantize_groups,
        quantize_rows,
    )
    from pallas_kernels.ops.quantize.tensor import (
        Bound,
        maxima,
        quantize_tensor,
        tensor_scales,
        transpose,
    )
    from pallas_kernels.ops.rope.api import join_heads

__all__ = [
    "Activation",
    "AdamScalars",
    "AttentionTiles",
    "AttentionTuning",
    "Block",
    "Bound",
    "Choice",
    "Codes",
    "ElementwiseTuning",
    "Explanation",
    "Gated",
    "GroupTiles",
    "Moments",
    "NormGrads",
    "NormKind",
    "NormTuning",
    "Normed",
    "Scaled",
    "WeightedGradients",
    "adam",
    "attention",
    "attention_grad",
    "copy_rows",
    "dequantize_groups",
    "explain",
    "gated",
    "gated_grad",
    "group_tiles",
    "grouped_matmul",
    "grouped_transpose",
    "grouped_weight_gradient",
    "join_heads",
    "matmul",
    "matmul_heads",
    "maxima",
    "norm",
    "norm_grad",
    "padded_rows",
    "quantize_blocks",
    "quantize_columns",
    "quantize_groups",
    "quantize_rows",
    "quantize_tensor",
    "sum_rows",
    "tensor_scales",
    "transpose",
    "weighted_gate_grad",
]

lazy.attach(
    __name__,
    {
        "pallas_kernels.dispatch.operations": "Choice Explanation explain",
        "pallas_kernels.mosaic.rows": "Tuning:NormTuning",
        "pallas_kernels.mosaic.strips": "Tuning:ElementwiseTuning",
        "pallas_kernels.numerics": "Codes NormKind Scaled",
        "pallas_kernels.ops.adam.api": "adam",
        "pallas_kernels.ops.adam.reference": "AdamScalars Moments",
        "pallas_kernels.ops.attention.api": "attention attention_grad",
        "pallas_kernels.ops.attention.plan": "Tiles:AttentionTiles "
        "Tuning:AttentionTuning",
        "pallas_kernels.ops.gate.api": "gated gated_grad",
        "pallas_kernels.ops.gate.grouped": "WeightedGradients weighted_gate_grad",
        "pallas_kernels.ops.gate.reference": "Activation Gated",
        "pallas_kernels.ops.grouped_matmul.api": "group_tiles grouped_matmul "
        "grouped_weight_gradient",
        "pallas_kernels.ops.grouped_matmul.tiles": "GroupTiles padded_rows",
        "pallas_kernels.ops.grouped_matmul.copies": "copy_rows",
        "pallas_kernels.ops.grouped_matmul.sums": "sum_rows",
        "pallas_kernels.ops.grouped_matmul.transposed": "grouped_transpose",
        "pallas_kernels.ops.matmul.api": "matmul matmul_heads",
        "pallas_kernels.ops.norm.api": "norm norm_grad",
        "pallas_kernels.ops.norm.reference": "Normed NormGrads",
        "pallas_kernels.ops.quantize.blocks": "Block quantize_blocks",
        "pallas_kernels.ops.quantize.columns": "quantize_columns",
        "pallas_kernels.ops.quantize.groups": "dequantize_groups quantize_groups "
        "quantize_rows",
        "pallas_kernels.ops.quantize.tensor": "Bound maxima quantize_tensor "
        "tensor_scales transpose",
        "pallas_kernels.ops.rope.api": "join_heads",
    },
)
