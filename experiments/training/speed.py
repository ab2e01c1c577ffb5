"""The speed of a training: FLOPs per token, and the share of the peak FLOP/s."""

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

    Each weight counts six FLOPs: a multiplication and an addition, once in the forward
    pass and twice in the backward pass. The output head counts as a weight, the
    embedding does not. A token attends to half of the sequence on average.
    Recomputation is not counted.
    """
    head_dim = config.size_of_heads
    attended = config.num_heads * head_dim
    heads = config.num_heads + 2 * config.num_kv_heads
    experts, hidden_layer = config.experts, 3 * config.intermediate_size
    if experts is not None:  # The experts of a token, and the router.
        hidden_layer = experts.choices * hidden_layer + experts.num_experts
    layer = config.hidden_size * (heads * head_dim + attended + hidden_layer)
    weights = config.num_layers * layer + config.vocab_size * config.hidden_size
    return 6 * (weights + config.num_layers * attended * seq_len)


def utilization(
    tokens_per_s: float, flops_per_token: int, devices: int
) -> float | None:
    """Returns the model's FLOP/s as a fraction of the devices' BF16 peak.

    The fraction may exceed 1 with FP8 matmuls. None means that the peak is not known.

    Args:
      tokens_per_s: The tokens per second of all devices.
      flops_per_token: The FLOPs of a token.
      devices: The number of devices.
    """
    peak = PEAKS.get(jax.devices()[0].device_kind)
    return None if peak is None else tokens_per_s * flops_per_token / (devices * peak)
