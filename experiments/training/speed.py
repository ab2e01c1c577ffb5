"""Speeds of a training: tokens a second, and the share of the chip's peak."""

import jax

from coat_jax.models import llama

# Dense BF16 FLOP/s by JAX's name of the device, from NVIDIA's data sheets.
PEAKS = {
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA H100 NVL": 835.5e12,
    "NVIDIA H100 PCIe": 756.0e12,
    "NVIDIA A100-SXM4-80GB": 312.0e12,
    "NVIDIA A100-SXM4-40GB": 312.0e12,
}


def flops_per_token(config: llama.LlamaConfig, seq_len: int) -> int:
    """Returns the FLOPs of a model's matmuls for one token, forward and backward.

    Weights count six times: a multiplication and an addition, in forward and twice in
    backward. The head is a weight, the embedding is not. A token attends to half of the
    sequence in the mean. Recomputation is no work of the model.
    """
    head_dim = config.size_of_heads
    attended = config.num_heads * head_dim
    heads = config.num_heads + 2 * config.num_kv_heads
    experts, hidden_layer = config.experts, 3 * config.intermediate_size
    if experts is not None:  # A token's own, and the router.
        hidden_layer = experts.choices * hidden_layer + experts.num_experts
    layer = config.hidden_size * (heads * head_dim + attended + hidden_layer)
    weights = config.num_layers * layer + config.vocab_size * config.hidden_size
    return 6 * (weights + config.num_layers * attended * seq_len)


def utilization(
    tokens_per_s: float, flops_per_token: int, devices: int
) -> float | None:
    """Returns the model's FLOP/s as a part of the devices' BF16 peak.

    It may exceed 1 with FP8 matmuls. None means that the device's peak is not known.

    Args:
      tokens_per_s: The tokens a second of all devices.
      flops_per_token: The FLOPs of a token.
      devices: The number of devices.
    """
    peak = PEAKS.get(jax.devices()[0].device_kind)
    return None if peak is None else tokens_per_s * flops_per_token / (devices * peak)
