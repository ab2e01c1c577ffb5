"""The recipes that train with `coat.fp8_adamw`, and optimizers in float32."""

import jax
import jax.numpy as jnp
import optax

import coat_jax as coat
from coat_jax.layers.recipes import RECIPES
from coat_jax.layers.recipes import RecipeName as Recipe

# The recipes with `coat.fp8_adamw` as their optimizer.
COAT_RECIPES: tuple[Recipe, ...] = tuple(
    name for name, recipe in RECIPES.items() if recipe.optimizer is coat.fp8_adamw
)


def without_fp8_matmuls(recipe: Recipe) -> Recipe:
    """Returns the recipe with BF16 matmuls and the optimizer of `recipe`."""
    return "coat_bf16" if recipe in COAT_RECIPES else "bf16"


def in_float32(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns `tx` computed in float32, for parameters of any dtype.

    Its moments are float32, too. Unchanged, `optax.adamw` stores the moments of BF16
    parameters in BF16.
    """

    def wide(tree):
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def update(updates, state, params=None):
        return tx.update(wide(updates), state, wide(params))

    return optax.GradientTransformation(lambda params: tx.init(wide(params)), update)
