"""A small Llama, with layers of any recipe.

`coat_jax.models.llama` takes recipes by name, and the same recipe for all layers. Here
recipes are objects, and the first and the last layer may have another recipe.
"""

import dataclasses
import operator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

import coat_jax as coat
from coat_jax.fp8.matmul import fp8_matmul
from coat_jax.layers.parts import Heads, Norm
from coat_jax.layers.recipe import Recipe
from coat_jax.models.loss import token_shares, weighted_loss
from experiments.studies.fidelity.variants import Forward

VOCAB_SIZE = 384  # Bytes and a separator, in whole tiles of a matmul.
_NORM = Norm(kind="rms", eps=1e-5)
Params = dict[str, Array | dict[str, Array]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a model, with tied embeddings.

    Attributes:
      layers: The number of layers, at least 3.
      hidden: The size of the residual stream, h.
      intermediate: The size of the MLP's hidden layer, f.
      head_dim: The size of a head.
    """

    layers: int
    hidden: int
    intermediate: int
    head_dim: int = 64

    @property
    def heads(self) -> Heads:
        """The attention heads; each query head has its own key and value head."""
        count = self.hidden // self.head_dim
        return Heads(num_kv_heads=count, head_dim=self.head_dim, theta=10_000.0)


def init(shape: Shape, key: PRNGKeyArray) -> Params:
    """Returns float32 parameters; weights are [out, in], and stacked for layers."""
    h, f, n = shape.hidden, shape.intermediate, shape.layers
    weights = {"qkv": (3 * h, h), "out": (h, h), "gate_up": (2, f, h), "down": (h, f)}
    keys = iter(jax.random.split(key, 1 + len(weights)))

    def weight(*size: int) -> Array:
        return 0.02 * jax.random.normal(next(keys), size)

    layers = {name: weight(n, *size) for name, size in weights.items()}
    layers |= {f"{name}_norm": jnp.ones((n, h)) for name in ("attention", "mlp")}
    return {"embedding": weight(VOCAB_SIZE, h), "norm": jnp.ones(h), "layers": layers}


def loss(
    params: Params, windows: Int[Array, "b length+1"], *, shape: Shape, forward: Forward
) -> Float[Array, ""]:
    """Computes the mean loss in nats per token, with activations in BF16.

    Args:
      params: The parameters of `init`.
      windows: Token windows.
      shape: The model's shape.
      forward: The recipes of layers, and the precision of the logits.
    """
    tokens, targets = windows[:, :-1], windows[:, 1:]
    x = params["embedding"][tokens].astype(jnp.bfloat16)
    layers, recipe = params["layers"], forward.recipe
    if forward.ends == recipe:
        x = _apply(recipe, layers, x, shape)
    else:
        parts = slice(1), slice(1, -1), slice(-1, None)
        of_parts = forward.ends, recipe, forward.ends
        for part, of in zip(parts, of_parts, strict=True):
            x = _apply(of, jax.tree.map(operator.itemgetter(part), layers), x, shape)
    hidden = recipe.norm(_NORM)(params["norm"], x)
    if forward.head == "fp8":
        return _fp8_loss(hidden, params["embedding"], targets)
    shares = token_shares(targets, None, VOCAB_SIZE)
    return weighted_loss(hidden, params["embedding"].T, targets, shares, None)


def _apply(
    recipe: Recipe, layers: dict[str, Array], x: Float[Array, "b s h"], shape: Shape
) -> Float[Array, "b s h"]:
    """Applies stacked layers of one recipe to the residual stream `x`."""

    def layer(params, x):
        inputs = {"norm": params["attention_norm"], "qkv": params["qkv"]}
        attended = recipe.attention_in(inputs, x, norm=_NORM, heads=shape.heads)
        x = recipe.attention_out({"out": params["out"]}, *attended)
        mlp = {name: params[name] for name in ("gate_up", "down")}
        return recipe.gated_mlp({"norm": params["mlp_norm"], **mlp}, x, norm=_NORM)

    return recipe.leave(coat.scan_layers(layer, recipe.enter(x), layers))


def _fp8_loss(
    hidden: Float[Array, "b s h"],
    head: Float[Array, "vocab h"],
    targets: Int[Array, "b s"],
) -> Float[Array, ""]:
    """Computes the mean loss with logits from a matmul in FP8, in both passes."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    logits = fp8_matmul(rows, head, jnp.float32, 1)
    of_target = jnp.take_along_axis(logits, targets.reshape(-1, 1), axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - of_target)
