"""Trains models of Equinox, dm-haiku, penzai and jraph, and two in plain Flax NNX."""

import functools

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import jraph
import numpy as np
from ecosystem.harness import TreeRun, compare, main, next_token_loss, tokens
from flax import nnx
from penzai import pz
from penzai.models.transformer import variants

_BATCH, _LENGTH, _VOCAB, _WIDTH = 8, 64, 128, 128
_batch = functools.partial(tokens, batch=_BATCH, length=_LENGTH, vocab=_VOCAB)
_CAUSAL = np.tril(np.ones((_LENGTH, _LENGTH), bool))


class _EquinoxBlock(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    norms: tuple

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(4, _WIDTH, key=keys[0])
        self.up = eqx.nn.Linear(_WIDTH, 4 * _WIDTH, key=keys[1])
        self.down = eqx.nn.Linear(4 * _WIDTH, _WIDTH, key=keys[2])
        self.norms = (eqx.nn.LayerNorm(_WIDTH), eqx.nn.LayerNorm(_WIDTH))

    def __call__(self, x):
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y, mask=_CAUSAL)
        y = jax.vmap(self.norms[1])(x)
        return x + jax.vmap(lambda v: self.down(jax.nn.gelu(self.up(v))))(y)


class _EquinoxModel(eqx.Module):
    embed: eqx.nn.Embedding
    places: jax.Array
    blocks: list
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 5)
        self.embed = eqx.nn.Embedding(_VOCAB, _WIDTH, key=keys[0])
        self.places = 0.02 * jax.random.normal(keys[1], (_LENGTH, _WIDTH))
        self.blocks = [_EquinoxBlock(key) for key in keys[2:4]]
        self.head = eqx.nn.Linear(_WIDTH, _VOCAB, key=keys[4])

    def __call__(self, row):
        x = jax.vmap(self.embed)(row) + self.places
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(x)


def equinox(tx):
    """Returns a run of an Equinox transformer."""
    params, static = eqx.partition(
        _EquinoxModel(jax.random.key(0)), eqx.is_inexact_array
    )

    def loss(params, batch):
        return next_token_loss(jax.vmap(eqx.combine(params, static))(batch), batch)

    return TreeRun(params, loss, _batch, tx)


def _haiku_forward(batch):
    x = hk.Embed(_VOCAB, _WIDTH)(batch)
    x += hk.get_parameter(
        "places", x.shape[1:], init=hk.initializers.RandomNormal(0.02)
    )
    for _ in range(2):
        y = hk.LayerNorm(-1, True, True)(x)
        init = hk.initializers.VarianceScaling(1.0)
        attention = hk.MultiHeadAttention(4, _WIDTH // 4, w_init=init)
        x += attention(y, y, y, mask=_CAUSAL[None, None])
        y = hk.LayerNorm(-1, True, True)(x)
        x += hk.nets.MLP([4 * _WIDTH, _WIDTH], activation=jax.nn.gelu)(y)
    return hk.Linear(_VOCAB)(x)


def haiku(tx):
    """Returns a run of a Haiku transformer."""
    model = hk.without_apply_rng(hk.transform(_haiku_forward))
    params = model.init(jax.random.key(0), _batch(0))

    def loss(params, batch):
        return next_token_loss(model.apply(params, batch), batch)

    return TreeRun(params, loss, _batch, tx)


def penzai(tx):
    """Returns a run of penzai's Llama-like transformer."""
    config = variants.llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=4,
        query_head_multiplier=1,
        embedding_dim=_WIDTH,
        projection_dim=_WIDTH // 4,
        mlp_hidden_dim=4 * _WIDTH,
        num_decoder_blocks=2,
        vocab_size=_VOCAB,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
        rope_wavelength=10_000,
        parameter_dtype=jnp.float32,
    )
    model = variants.llamalike_common.build_llamalike_transformer(
        config, init_base_rng=jax.random.key(0)
    )
    model, params = pz.unbind_params(model, freeze=True)

    def loss(params, batch):
        bound = pz.bind_variables(model, [p.unfreeze_as_copy() for p in params])
        named = pz.nx.wrap(batch).tag("batch", "seq")
        logits = bound(named, token_positions=pz.nx.arange("seq", _LENGTH)).unwrap(
            "batch", "seq", "vocabulary"
        )
        return next_token_loss(logits, batch)

    return TreeRun(params, loss, _batch, tx)


def graph_network(tx):
    """Returns a run of a jraph network that learns a function of random graphs."""
    nodes, edges = 128, 512

    @jraph.concatenated_args
    def update(x):
        y = hk.nets.MLP([_WIDTH, _WIDTH], activation=jax.nn.gelu)(x)
        return hk.LayerNorm(-1, True, True)(y)

    def forward(graph):
        embed = jraph.GraphMapFeatures(hk.Linear(_WIDTH), hk.Linear(_WIDTH))
        for _ in range(2):
            network = jraph.GraphNetwork(update, update, update)
            graph = network(embed(graph) if graph.nodes.shape[-1] == 8 else graph)
        return hk.Linear(1)(graph.nodes)[:, 0]

    def batch(number):
        rng = np.random.default_rng(number)
        senders, receivers = rng.integers(nodes, size=(2, edges))
        x = rng.normal(size=(nodes, 8)).astype(np.float32)
        graph = jraph.GraphsTuple(
            nodes=x,
            edges=rng.normal(size=(edges, 8)).astype(np.float32),
            senders=senders,
            receivers=receivers,
            globals=np.zeros((1, _WIDTH), np.float32),
            n_node=np.array([nodes]),
            n_edge=np.array([edges]),
        )
        target = np.zeros(nodes, np.float32)
        np.add.at(target, receivers, np.tanh(x[senders, 0]))
        noise = rng.normal(size=nodes).astype(np.float32)
        return graph, target + noise

    model = hk.without_apply_rng(hk.transform(forward))
    params = model.init(jax.random.key(0), batch(0)[0])

    def loss(params, batch):
        graph, target = batch
        return jnp.mean((model.apply(params, graph) - target) ** 2)

    return TreeRun(params, loss, batch, tx)


class _Attention(nnx.Module):
    """Qwen3's attention: grouped queries, RoPE, and norms of queries and keys."""

    def __init__(self, width, heads, kv_heads, *, rngs):
        self.heads, self.kv_heads, self.head = heads, kv_heads, width // heads
        sizes = (heads * self.head, kv_heads * self.head, kv_heads * self.head)
        self.q, self.k, self.v = (
            nnx.Linear(width, size, use_bias=False, rngs=rngs) for size in sizes
        )
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.q_norm = nnx.RMSNorm(self.head, rngs=rngs)
        self.k_norm = nnx.RMSNorm(self.head, rngs=rngs)

    def __call__(self, x):
        batch, length, _ = x.shape

        def split(linear, heads):
            return linear(x).reshape(batch, length, heads, self.head)

        q = _rotated(self.q_norm(split(self.q, self.heads)))
        k = _rotated(self.k_norm(split(self.k, self.kv_heads)))
        v = split(self.v, self.kv_heads)
        o = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.out(o.reshape(batch, length, -1))


def _rotated(x):
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None] / 1e6 ** (np.arange(half) / half)
    sin, cos = np.sin(angles)[:, None], np.cos(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return rotated.astype(x.dtype)


class _QwenLayer(nnx.Module):
    def __init__(self, width, *, rngs):
        self.attention = _Attention(width, 4, 2, rngs=rngs)
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(width, rngs=rngs)
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.gate, self.up = linear(width, 3 * width), linear(width, 3 * width)
        self.down = linear(3 * width, width)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        y = self.mlp_norm(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class _Qwen(nnx.Module):
    def __init__(self, *, rngs):
        self.embed = nnx.Embed(_VOCAB, _WIDTH, rngs=rngs)
        self.layers = nnx.List([_QwenLayer(_WIDTH, rngs=rngs) for _ in range(2)])
        self.norm = nnx.RMSNorm(_WIDTH, rngs=rngs)

    def __call__(self, batch):
        x = self.embed(batch)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(self.norm(x))


class _MiniLayer(nnx.Module):
    def __init__(self, *, rngs):
        self.attention = nnx.MultiHeadAttention(4, _WIDTH, decode=False, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(_WIDTH, rngs=rngs) for _ in range(2)])
        self.up = nnx.Linear(_WIDTH, 4 * _WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * _WIDTH, _WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        attended = self.attention(self.norms[0](x), mask=_CAUSAL)
        x = x + self.dropout(attended)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class _MiniGPT(nnx.Module):
    def __init__(self, *, rngs):
        self.embed = nnx.Embed(_VOCAB, _WIDTH, rngs=rngs)
        self.places = nnx.Embed(_LENGTH, _WIDTH, rngs=rngs)
        self.layers = nnx.List([_MiniLayer(rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(_WIDTH, _VOCAB, rngs=rngs)

    def __call__(self, batch):
        x = self.embed(batch) + self.places(np.arange(batch.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class NnxRun:
    """Trains an NNX model with an `nnx.Optimizer`."""

    def __init__(self, model, tx, batch_of=_batch):
        self._batch_of, self._model = batch_of, model
        self._optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, batch):
            def loss(model):
                return next_token_loss(model(batch), batch)

            value, grads = nnx.value_and_grad(loss)(model)
            optimizer.update(model, grads)
            return value

        self._step = step

    def step(self, number):
        """Trains on batch `number` and returns the loss."""
        batch = self._batch_of(number)
        return float(self._step(self._model, self._optimizer, batch))

    def arrays(self):
        """Returns the state of model and optimizer."""
        return nnx.state((self._model, self._optimizer))

    def restore(self, arrays):
        """Replaces the state of model and optimizer."""
        nnx.update((self._model, self._optimizer), arrays)

    def opt_state(self):
        """Returns the optimizer's state as arrays instead of `nnx.Variable`."""
        return nnx.as_pure(self._optimizer.opt_state)


def qwen(tx):
    """Returns a run of a Qwen3 in plain Flax."""
    return NnxRun(_Qwen(rngs=nnx.Rngs(0)), tx)


def mini_gpt(tx):
    """Returns a run of a MiniGPT in plain Flax, with dropout."""
    return NnxRun(_MiniGPT(rngs=nnx.Rngs(0)), tx)


def rows():
    """Trains all models of this program and returns a row of results for each."""
    return [
        compare("Equinox, a transformer", equinox, packages=["equinox"]),
        compare("dm-haiku, a transformer", haiku, packages=["dm-haiku"]),
        compare("penzai, LlamalikeTransformer", penzai, packages=["penzai"]),
        compare("jraph, GraphNetwork", graph_network, packages=["jraph"]),
        compare("Flax NNX, a MiniGPT with dropout", mini_gpt, packages=[]),
        compare("Flax NNX, a Qwen3", qwen, packages=[]),
    ]


if __name__ == "__main__":
    main(rows)
