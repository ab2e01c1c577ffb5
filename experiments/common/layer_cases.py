"""One Llama layer in all the ways that are compared: recipes, and BF16 remat policies.

A case is a recipe and what the layer is wrapped in; a shape is the layer's and its
input's. `bench_layer` times layers alone, `bench_e2e` whole models of them.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

import coat_jax as coat
from coat_jax.layers.decoder import DecoderLayer, Scaling
from coat_jax.layers.recipes import RecipeName
from coat_jax.remat.policies import products_saveable

Apply = Callable[[Any, Float[Array, "b s h"]], Float[Array, "b s h"]]
_policies = jax.checkpoint_policies


def _products(primitive, *_, **__) -> bool:
    # Saved itself a product would run twice in a loop: see `layers.matmul.once`.
    return primitive.name == "optimization_barrier"


def _products_and_attention(primitive, *_, **__) -> bool:
    # Flash attention is no matrix product to the usual policies, which run it again.
    return _products(primitive) or "dot_product_attention" in primitive.name


def _checkpoint(policy: Callable[..., bool]) -> Callable[[Apply, bool], Apply]:
    def wrap(layer, in_scan):
        return jax.checkpoint(layer, policy=policy, prevent_cse=not in_scan)

    return wrap


class LayerState(NamedTuple):
    """What a layer is a function of, besides its input.

    Attributes:
      params: Its parameters.
      histories: Of delayed scaling; empty without it. Their gradients are the next.
    """

    params: nnx.State
    histories: nnx.State


class Case(NamedTuple):
    """What is compared.

    Attributes:
      recipe: Of the layer.
      wrap: From the layer, and whether `scan` runs it, to what is differentiated.
      scaling: Of the layer.
    """

    recipe: RecipeName
    wrap: Callable[[Apply, bool], Apply] = lambda layer, in_scan: layer
    scaling: Scaling = "just_in_time"


CASES: dict[str, Case] = {
    "bf16": Case("bf16"),
    "bf16, products and attention saved": Case(
        "bf16", _checkpoint(_products_and_attention)
    ),
    "bf16, products saved": Case("bf16", _checkpoint(_products)),
    "bf16, nothing saved": Case("bf16", _checkpoint(_policies.nothing_saveable)),
    "bf16, fp8_remat": Case("bf16", lambda layer, in_scan: coat.fp8_remat(layer)),
    "bf16, fp8_remat of products": Case(
        "bf16",
        lambda layer, in_scan: coat.fp8_remat(layer, policy=products_saveable),
    ),
    "te": Case("te"),
    "coat": Case("coat"),
    "coat, delayed scaling": Case("coat", scaling="delayed"),
    "coat_max": Case("coat_max"),
}
# What JAX offers for BF16 without this library.
PLAIN = tuple(name for name in CASES if name.startswith("bf16") and "fp8" not in name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a layer and of its input.

    Attributes:
      hidden: Of the residual stream.
      seq: Tokens of a sequence.
      batch: Sequences.
      intermediate: Of the MLP's inside.
      kv_heads: Key and value heads.
      head_dim: Size of a head; `hidden / head_dim` are the query heads.
    """

    hidden: int
    seq: int
    batch: int
    intermediate: int
    kv_heads: int
    head_dim: int

    @property
    def unit(self) -> int:
        """U: bytes of the residual stream in BF16."""
        return self.batch * self.seq * self.hidden * 2

    def input(self) -> jax.ShapeDtypeStruct:
        """The residual stream."""
        shape = self.batch, self.seq, self.hidden
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def llama_intermediate(hidden: int) -> int:
    """The MLP's inside as Llama has it: 8/3 of `hidden`, in multiples of 128."""
    return -(-hidden * 8 // (3 * 128)) * 128


def layer(case: Case, shape: Shape) -> tuple[Apply, LayerState]:
    """A case's layer as a function of its state and input, and its abstract state."""

    def module():
        return DecoderLayer(
            shape.hidden,
            shape.intermediate,
            shape.hidden // shape.head_dim,
            shape.kv_heads,
            shape.head_dim,
            recipe=case.recipe,
            scaling=case.scaling,
            param_dtype=jnp.bfloat16,
            rngs=nnx.Rngs(0),
        )

    graph, *state = nnx.split(nnx.eval_shape(module), nnx.Param, ...)
    apply = case.wrap(lambda state, x: nnx.merge(graph, *state)(x), False)
    return apply, LayerState(*state)


def forward_backward(apply: Apply) -> Callable:
    """From state, input and cotangent to the output and both gradients."""

    def run(state, x, dy):
        y, vjp = jax.vjp(apply, state, x)
        return y, vjp(dy)

    return run


def first_histories(abstract: nnx.State) -> nnx.State:
    """Ones, which are enough for weights, and for gradients no more than E5M2 bears."""
    return jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), abstract)


def random_params(abstract: Any) -> Any:
    """Weights as they are initialized: normal numbers, and ones for norms.

    One array at a time, so that no more than one exists in a wider dtype.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(abstract)
    drawn = [
        jnp.ones(x.shape, x.dtype)
        if "norm" in jax.tree_util.keystr(path)
        else 0.02 * normal(seed, x)
        for seed, (path, x) in enumerate(leaves)
    ]
    return treedef.unflatten(drawn)


@partial(jax.jit, static_argnums=1)
def normal(seed: int, like: jax.ShapeDtypeStruct) -> Array:
    """Normal numbers of a shape and dtype."""
    return jax.random.normal(jax.random.key(seed), like.shape, like.dtype)
