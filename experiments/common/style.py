"""The look of figures."""

from coat_jax.layers.recipes import RecipeName

RECIPE_COLORS: dict[RecipeName, str] = {
    "bf16": "#33415c",
    "te": "#2a9d8f",
    "coat": "#d1495b",
    "coat_max": "#edae49",
    "coat_block": "#7b4ea3",
}
