"""Optimizers whose moving averages are kept in 8 bits (COAT, arXiv 2410.19313).

`with_quantized_state` does it to any optax transformation; `fp8_adamw` is AdamW with a
fused step.
"""
