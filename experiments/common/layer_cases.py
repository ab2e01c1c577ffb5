"""The compared cases of a Llama layer: precision recipes and BF16 remat policies.

A case has a recipe and a wrapper of the layer. A shape has the sizes of the layer and
of its input. `experiments.bench.layer` times single layers, and `experiments.bench.e2e`
times full models.
"""

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

import coat_jax as coat
from coat_jax.layers.decoder import DecoderLayer
from coat_jax.layers.recipes import RecipeName, Scaling
from coat_jax.remat.policies import products_saveable
from experiments.common.programs import positive_int

# The most that a layer may save, by recipe, in U; see `Shape.unit`.
TARGET_UNITS = {"coat": 8.3, "coat_max": 6.5}
Apply = Callable[[Any, Float[Array, "b s h"]], Float[Array, "b s h"]]
_policies = jax.checkpoint_policies


def _products(primitive, *_, **__) -> bool:
    # The barrier after a matmul is saved. If the matmul itself were saved, it would
    # run twice in a loop; see `fp8.matmul.once`.
    return primitive.name == "optimization_barrier"


def _products_and_attention(primitive, *_, **__) -> bool:
    # JAX's policies do not count flash attention as a matmul, and run it again.
    return _products(primitive) or "dot_product_attention" in primitive.name


def _checkpoint(policy: Callable[..., bool]) -> Callable[[Apply, bool], Apply]:
    def wrap(layer, in_scan):
        return jax.checkpoint(layer, policy=policy, prevent_cse=not in_scan)

    return wrap


class LayerState(NamedTuple):
    """The variables of a layer: the first argument of the function from `layer`.

    Attributes:
      params: The parameters.
      histories: The amax histories of delayed scaling, empty for other scaling. Their
        gradients are the histories of the next step.
    """

    params: nnx.State
    histories: nnx.State


class LayerCase(NamedTuple):
    """A variant of the layer that is compared with other variants.

    Attributes:
      recipe: The precision recipe of the layer.
      wrap: A function that wraps the layer before it is differentiated. It takes the
        layer, and whether `scan` runs it.
      scaling: The scaling of the layer's gradients.
    """

    recipe: RecipeName
    wrap: Callable[[Apply, bool], Apply] = lambda layer, in_scan: layer
    scaling: Scaling = "just_in_time"


CASES: dict[str, LayerCase] = {
    "bf16": LayerCase("bf16"),
    "bf16, products and attention saved": LayerCase(
        "bf16", _checkpoint(_products_and_attention)
    ),
    "bf16, products saved": LayerCase("bf16", _checkpoint(_products)),
    "bf16, nothing saved": LayerCase("bf16", _checkpoint(_policies.nothing_saveable)),
    "bf16, fp8_remat": LayerCase("bf16", lambda layer, in_scan: coat.fp8_remat(layer)),
    "bf16, fp8_remat of products": LayerCase(
        "bf16", lambda layer, in_scan: coat.fp8_remat(layer, policy=products_saveable)
    ),
    "te": LayerCase("te"),
    "coat": LayerCase("coat"),
    "coat, delayed scaling": LayerCase("coat", scaling="delayed"),
    "coat_max": LayerCase("coat_max"),
    "coat_block": LayerCase("coat_block"),
    "coat_bf16": LayerCase("coat_bf16"),
}
# The BF16 cases that JAX offers without this library.
PLAIN = tuple(name for name in CASES if name.startswith("bf16") and "fp8" not in name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a layer and of its input.

    Attributes:
      hidden: The size of the residual stream.
      seq: The number of tokens in a sequence.
      batch: The number of sequences.
      intermediate: The size of the MLP's hidden layer.
      kv_heads: The number of key and value heads.
      head_dim: The size of a head. There are `hidden / head_dim` query heads.
    """

    hidden: int
    seq: int
    batch: int
    intermediate: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        heads, uneven = divmod(self.hidden, self.head_dim)
        if uneven or not heads or heads % self.kv_heads:
            raise ValueError(
                "hidden / head_dim, the number of heads, must be a multiple of "
                f"kv_heads, got {self.hidden} / {self.head_dim} and {self.kv_heads}"
            )

    @property
    def unit(self) -> int:
        """The unit U of memory: the bytes of the residual stream in BF16."""
        return self.batch * self.seq * self.hidden * 2

    def input(self) -> jax.ShapeDtypeStruct:
        """Returns the abstract input, the residual stream in BF16."""
        shape = self.batch, self.seq, self.hidden
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


# The defaults of benchmarks: layers of two models at 4 x 2,048 tokens.
LLAMA_2_7B = Shape(
    hidden=4096, seq=2048, batch=4, intermediate=11_008, kv_heads=32, head_dim=128
)
LLAMA_3_8B = dataclasses.replace(LLAMA_2_7B, intermediate=14_336, kv_heads=8)


def add_sizes(parser: argparse.ArgumentParser, default: Shape) -> None:
    """Adds the options that `shape_of` reads to a parser, with their defaults."""
    for name, size in dataclasses.asdict(default).items():
        text = "of gated MLPs" if name == "intermediate" else None
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=positive_int, default=size, help=text)


def shape_of(args: argparse.Namespace) -> Shape:
    """Returns the shape with sizes from command-line options of the same names."""
    fields = dataclasses.fields(Shape)
    return Shape(**{field.name: getattr(args, field.name) for field in fields})


def llama_intermediate(hidden: int) -> int:
    """Returns Llama's MLP size: 8/3 of `hidden`, rounded up to a multiple of 128."""
    return -(-hidden * 8 // (3 * 128)) * 128


def layer(case: LayerCase, shape: Shape, **options: Any) -> tuple[Apply, LayerState]:
    """Returns a case's layer as a function of state and input, and its abstract state.

    Parameters are in BF16. `options` are further arguments of `DecoderLayer`, for
    models other than Llama.
    """

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
            **options,
        )

    graph, *state = nnx.split(nnx.eval_shape(module), nnx.Param, ...)
    apply = case.wrap(lambda state, x: nnx.merge(graph, *state)(x), False)
    return apply, LayerState(*state)


def forward_backward(apply: Apply) -> Callable:
    """Returns a function that computes a layer's output and its gradients.

    The function takes the state, the input and the gradient of the output. It returns
    the output, and the gradients of state and input.
    """

    def run(state, x, dy):
        y, vjp = jax.vjp(apply, state, x)
        return y, vjp(dy)

    return run


def first_histories(abstract: nnx.State) -> nnx.State:
    """Returns amax histories of the abstract shapes, filled with ones.

    E5M2 codes with the scale for an amax of 1 can hold gradients below 1.
    """
    return jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), abstract)


def random_params(abstract: Any) -> Any:
    """Draws parameters as a model initializes them: normal weights, ones for norms.

    Arrays are drawn one after another, because drawing BF16 numbers takes temporary
    arrays of 32 bits.
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
    """Draws normal numbers with the shape, dtype and any mesh sharding of `like`."""
    drawn = jax.random.normal(jax.random.key(seed), like.shape, like.dtype)
    if isinstance(like.sharding, NamedSharding):
        drawn = jax.lax.with_sharding_constraint(drawn, like.sharding)
    return drawn
