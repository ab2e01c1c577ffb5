"""The look of figures."""

from coat_jax.layers.recipes import RecipeName

RECIPE_COLORS: dict[RecipeName, str] = {
    "bf16": "#33415c",
    "te": "#2a9d8f",
    "coat": "#d1495b",
    "coat_max": "#edae49",
    "coat_block": "#7b4ea3",
}
# Lines and bars differ in grey, too.
RECIPE_LINES: dict[RecipeName, str | tuple] = {
    "bf16": "-",
    "te": "--",
    "coat": "-.",
    "coat_max": ":",
    "coat_block": (0, (5, 1, 1, 1, 1, 1)),
}
RECIPE_HATCHES: dict[RecipeName, str] = {
    "bf16": "",
    "te": "////",
    "coat": "...",
    "coat_max": "xxx",
    "coat_block": "---",
}
