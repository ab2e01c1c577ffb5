"""Parts of transformers in NumPy and float64, with which tests compare."""

import numpy as np


def norm(x, weight=None, bias=None, *, kind: str, eps: float):
    """Computes an RMSNorm along the last axis, or a LayerNorm if `kind` is "layer"."""
    if kind == "layer":
        x = x - x.mean(-1, keepdims=True)
    y = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def silu(x):
    return x / (1 + np.exp(-x))


def gelu(x):
    return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2


def angles(length: int, half: int, theta: float):
    """Returns RoPE's angles [length, half]."""
    return np.arange(length)[:, None] * theta ** (-np.arange(half) / half)


def rotate(x, angles):
    """Applies RoPE to heads [b, s, n, 2 h]: halves are parts of complex numbers."""
    first, second = np.split(x, 2, axis=-1)
    turned = (first + 1j * second) * np.exp(1j * angles)[..., None, :]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def split_heads(y, angles, num_kv_heads: int):
    """Splits [b, s, columns] into queries, keys and values, and applies RoPE.

    The columns are grouped by key head: first its queries, then its key and its value.
    """
    b, s, _ = y.shape
    dim = 2 * angles.shape[-1]
    y = y.reshape(b, s, num_kv_heads, -1, dim)
    q, k, v = y[..., :-2, :].reshape(b, s, -1, dim), y[..., -2, :], y[..., -1, :]
    return rotate(q, angles), rotate(k, angles), v


def attention(q, k, v, *, causal: bool):
    """Computes softmax attention, one query head at a time."""
    out = np.zeros_like(q)
    for head in range(q.shape[2]):
        key = head // (q.shape[2] // k.shape[2])
        scores = q[:, :, head] @ k[:, :, key].swapaxes(1, 2) / np.sqrt(q.shape[-1])
        if causal:
            future = np.triu(np.ones(scores.shape[1:], bool), 1)
            scores = np.where(future, -np.inf, scores)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, :, head] = p / p.sum(-1, keepdims=True) @ v[:, :, key]
    return out


def llama(config, params, tokens):
    """Computes a Llama's logits, layer by layer."""
    x = params["embedding"][tokens]
    half = config.size_of_heads // 2
    turns = angles(tokens.shape[1], half, config.rope_theta)
    activation = {"silu": silu, "gelu": gelu}[config.gate]

    def normed(x, weight):
        return norm(x, weight, kind=config.norm, eps=config.norm_eps)

    for i in range(config.num_layers):
        layer = {name: p[i] for name, p in params["layers"].items()}
        y = normed(x, layer.get("attention_norm")) @ layer["qkv"].T
        q, k, v = split_heads(y, turns, config.num_kv_heads)
        attended = attention(q, k, v, causal=True)
        x = x + attended.reshape(*x.shape[:2], -1) @ layer["out"].T
        y = normed(x, layer.get("mlp_norm"))
        gate, up = (y @ w.T for w in layer["gate_up"])
        x = x + (activation(gate) * up) @ layer["down"].T
    head = params["embedding"].T if config.tie_embeddings else params["head"]
    return normed(x, params.get("norm")) @ head
