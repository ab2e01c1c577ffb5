"""Colors and line styles of figures, which also differ in grey."""

from typing import Literal

from matplotlib.axes import Axes

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


def framed(axes: Axes, grid: Literal["both", "x"] | None = "both") -> None:
    """Draws a light grid, if any, and removes the frame above and on the right."""
    if grid is not None:
        axes.grid(axis=grid, color="0.9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
