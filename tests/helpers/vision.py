"""A plain model in NumPy and float64 of the image encoder and the projector."""

import numpy as np

from helpers import layers


def encoded(config, params, images):
    """Computes the encoder's output from images, patch by patch."""
    size, grid = config.patch_size, config.grid_size
    images = np.asarray(images, np.float64)
    patches = [
        images[:, size * i : size * (i + 1), size * j : size * (j + 1)]
        for i in range(grid)
        for j in range(grid)
    ]
    x = np.stack([patch.reshape(len(images), -1) for patch in patches], axis=1)
    x = _linear(params["patches"], x) + params["positions"]
    for i in range(config.num_layers):
        x = _block(config, _at(params["blocks"], i), x)
    return _norm(config, params["norm"], x)


def projected(config, params, features):
    """Computes image embeddings from the encoder's output, square by square."""
    side, grid = config.merge_size, config.vision.grid_size
    squares = []
    for top in range(0, grid, side):
        for left in range(0, grid, side):
            square = [
                features[:, grid * (top + i) + left + j]
                for i in range(side)
                for j in range(side)
            ]
            squares.append(np.concatenate(square, axis=-1))
    x = np.stack(squares, axis=1)
    return _linear(params["down"], layers.gelu(_linear(params["up"], x)))


def _block(config, params, x):
    y = _linear(params["qkv"], _norm(config, params["attention_norm"], x))
    shape = (*x.shape[:2], config.num_heads, -1)
    q, k, v = (piece.reshape(shape) for piece in np.split(y, 3, axis=-1))
    attended = layers.attention(q, k, v, causal=False).reshape(x.shape)
    x = x + _linear(params["out"], attended)
    y = _linear(params["up"], _norm(config, params["mlp_norm"], x))
    return x + _linear(params["down"], layers.gelu(y))


def _linear(params, x):
    return x @ params["kernel"] + params["bias"]


def _norm(config, params, x):
    scale, bias = params["scale"], params["bias"]
    return layers.norm(x, scale, bias, kind="layer", eps=config.norm_eps)


def _at(tree, i):
    if isinstance(tree, dict):
        return {name: _at(value, i) for name, value in tree.items()}
    return tree[i]
