"""The look of figures, which is to be told apart in grey as well."""

from coat_jax.layers.recipes import RecipeName

RECIPE_COLORS: dict[RecipeName, str] = {
    "bf16": "#33415c",
    "te": "#2a9d8f",
    "coat": "#d1495b",
    "coat_max": "#edae49",
    "coat_block": "#7b4ea3",
}
# Lines, markers and bars differ in grey, too.
RECIPE_LINES: dict[RecipeName, str | tuple[int, tuple[float, ...]]] = {
    "bf16": "-",
    "te": (0, (4, 1.5)),
    "coat": (0, (6, 1, 1, 1)),
    "coat_max": (0, (1, 1)),
    "coat_block": (0, (4, 1, 1, 1, 1, 1)),
}
RECIPE_MARKERS: dict[RecipeName, str] = {
    "bf16": "o",
    "te": "s",
    "coat": "^",
    "coat_max": "D",
    "coat_block": "v",
}
RECIPE_HATCHES: dict[RecipeName, str] = {
    "bf16": "",
    "te": "////",
    "coat": "...",
    "coat_max": "xxx",
    "coat_block": "---",
}
