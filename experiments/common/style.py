"""The looks of figures: colors, lines, markers and hatches of recipes, and frames.

Lines, markers and hatches tell recipes apart where colors do not, as in grayscale.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from matplotlib.axes import Axes

from coat_jax.layers.recipes import RecipeName

RECIPE_COLORS: dict[RecipeName, str] = {
    "bf16": "#33415c",
    "te": "#2a9d8f",
    "coat": "#d1495b",
    "coat_max": "#edae49",
    "coat_block": "#7b4ea3",
    "coat_bf16": "#3a86c8",
}
# Lines, markers and bars differ in grayscale, too.
RECIPE_LINES: dict[RecipeName, str | tuple[int, tuple[float, ...]]] = {
    "bf16": "-",
    "te": (0, (4, 1.5)),
    "coat": (0, (6, 1, 1, 1)),
    "coat_max": (0, (1, 1)),
    "coat_block": (0, (4, 1, 1, 1, 1, 1)),
    "coat_bf16": (0, (8, 2)),
}
RECIPE_MARKERS: dict[RecipeName, str] = {
    "bf16": "o",
    "te": "s",
    "coat": "^",
    "coat_max": "D",
    "coat_block": "v",
    "coat_bf16": "P",
}
RECIPE_HATCHES: dict[RecipeName, str] = {
    "bf16": "",
    "te": "////",
    "coat": "...",
    "coat_max": "xxx",
    "coat_block": "---",
    "coat_bf16": "\\\\\\\\",
}


def framed(axes: Axes, grid: Literal["both", "x"] | None = "both") -> None:
    """Removes the top and right lines of the frame, and draws a light grid, if any."""
    if grid is not None:
        axes.grid(axis=grid, color="0.9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def draw_shares(
    axes: Axes,
    shares: Mapping[str, Sequence[tuple[float, float, float]]],
    kinds: Sequence[str],
) -> None:
    """Draws percentages as bars with intervals: a group per kind, a bar per recipe.

    Args:
      axes: The axes to draw on.
      shares: The bars by recipe: for each kind, the percentage and both ends of its
        interval. Bars with other names than recipes are grey.
      kinds: The names of the groups.
    """
    width = 0.8 / len(shares)
    for number, (recipe, of_kinds) in enumerate(shares.items()):
        heights, low, high = np.array(of_kinds).T
        # Rounding may put a share outside its interval by 1e-14.
        ends = np.maximum([heights - low, high - heights], 0)
        axes.bar(
            np.arange(len(kinds)) + (number - (len(shares) - 1) / 2) * width,
            heights,
            width,
            yerr=ends,
            error_kw={"elinewidth": 0.8, "ecolor": "0.3"},
            color=dict(RECIPE_COLORS).get(recipe, "0.85"),
            hatch=dict(RECIPE_HATCHES).get(recipe, ""),
            edgecolor="white",
            label=recipe,
        )
    axes.set_xticks(range(len(kinds)), kinds)
    axes.legend(frameon=False, ncols=len(shares), loc="upper center")
