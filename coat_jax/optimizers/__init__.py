"""Optimizers that store their moving averages in 8 bits (COAT, arXiv 2410.19313).

`with_quantized_state` works with any optax transformation. `fp8_adamw` is AdamW with a
fused step.
"""
