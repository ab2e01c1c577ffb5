"""Scenes: pictures on colored tiles in a grid, on a part of a photograph.

A scene is an annotation; `render` makes an image of it. A hash of the things of a scene
and their cells determines whether the scene is for training or for tests. Therefore no
scene for training has the same things in the same cells as a scene for tests. Scenes
for tests also have new handwriting and new parts of photographs.
"""

import dataclasses
import zlib

import numpy as np
from jaxtyping import Float32, UInt8
from PIL import Image

from experiments.vlm.pictures import DIGIT, Pictures

COLORS: dict[str, tuple[float, float, float]] = {
    "red": (0.92, 0.35, 0.32),
    "green": (0.45, 0.75, 0.40),
    "blue": (0.40, 0.60, 0.95),
    "yellow": (0.98, 0.88, 0.35),
    "purple": (0.68, 0.45, 0.82),
    "white": (0.97, 0.97, 0.97),
}
MOST_DIGITS = 3
# The pixels by which a cell is larger than a picture, so that its position can vary.
MARGIN = 4
_PLACES = {
    2: ("top left", "top right", "bottom left", "bottom right"),
    3: (
        *("top left", "top", "top right", "left", "center", "right"),
        *("bottom left", "bottom", "bottom right"),
    ),
}
# One in so many scenes is for tests.
_TEST_SHARE = 5
_DIGIT_SHARE = 0.3
# The weight of photographs, which are blended with white.
_PHOTO_STRENGTH = 0.6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thing:
    """A drawing or a handwritten digit in a scene.

    Attributes:
      name: The drawing's name, or the digit.
      category: The drawing's category, or "digit".
      color: The color of the thing's tile.
      cell: The cell of the grid, counted row by row.
    """

    name: str
    category: str
    color: str
    cell: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scene:
    """The annotation of an image.

    Attributes:
      grid: The number of cells in a row, which is also the number of rows.
      things: The things, in the order of their cells. All names are different.
    """

    grid: int
    things: tuple[Thing, ...]

    @property
    def is_test(self) -> bool:
        """True if scenes with these things in these cells are for tests."""
        placed = ",".join(f"{thing.cell} {thing.name}" for thing in self.things)
        return zlib.crc32(placed.encode()) % _TEST_SHARE == 0

    @property
    def digits(self) -> list[int]:
        """The values of the scene's digits."""
        return [int(x.name) for x in self.things if x.category == DIGIT]


def places(grid: int) -> tuple[str, ...]:
    """Returns the names of a grid's cells, row by row.

    Raises:
      ValueError: If the grid has neither two nor three rows.
    """
    if grid not in _PLACES:
        raise ValueError(f"grid must be 2 or 3, got {grid}")
    return _PLACES[grid]


def draw_scene(
    rng: np.random.Generator, pictures: Pictures, grid: int, most_things: int
) -> Scene:
    """Draws a random scene, for tests if `pictures` are for tests.

    Args:
      rng: The source of random choices.
      pictures: The pictures to choose from.
      grid: The number of cells in a row.
      most_things: The largest number of things.
    """
    while True:
        scene = _any_scene(rng, pictures, grid, most_things)
        if scene.is_test == pictures.is_test:
            return scene


def _any_scene(
    rng: np.random.Generator, pictures: Pictures, grid: int, most_things: int
) -> Scene:
    count = rng.integers(1, most_things + 1)
    cells = np.sort(rng.choice(grid**2, count, replace=False))
    digits = min(rng.binomial(count, _DIGIT_SHARE), MOST_DIGITS)
    names = [
        *map(str, rng.choice(10, digits, replace=False)),
        *rng.choice(list(pictures.drawings), count - digits, replace=False),
    ]
    things = tuple(
        Thing(
            name=str(name),
            category=pictures.categories.get(name, DIGIT),
            color=str(rng.choice(list(COLORS))),
            cell=int(cell),
        )
        for name, cell in zip(rng.permutation(names), cells, strict=True)
    )
    return Scene(grid=grid, things=things)


def render(
    rng: np.random.Generator, scene: Scene, pictures: Pictures
) -> UInt8[np.ndarray, "size size 3"]:
    """Renders a scene with random sizes, positions and handwriting of digits.

    The image has cells of `pictures.size + MARGIN` pixels in height and width.
    """
    cell = pictures.size + MARGIN
    image = _background(rng, pictures, scene.grid * cell)
    for thing in scene.things:
        top, left = (cell * i for i in divmod(thing.cell, scene.grid))
        _put(image[top : top + cell, left : left + cell], rng, thing, pictures)
    return np.round(255 * image).astype(np.uint8)


def _background(
    rng: np.random.Generator, pictures: Pictures, size: int
) -> Float32[np.ndarray, "size size 3"]:
    """Returns a random part of a photograph, blended with white."""
    photo = pictures.photographs[rng.integers(len(pictures.photographs))]
    side = int(rng.integers(min(photo.shape[:2]) // 3, min(photo.shape[:2])))
    top, left = (int(rng.integers(n - side + 1)) for n in photo.shape[:2])
    crop = Image.fromarray(photo[top : top + side, left : left + side])
    crop = np.asarray(crop.resize((size, size), reducing_gap=2.0), np.float32) / 255
    return 1 - _PHOTO_STRENGTH * (1 - crop)


def _put(
    cell: Float32[np.ndarray, "size size 3"],
    rng: np.random.Generator,
    thing: Thing,
    pictures: Pictures,
) -> None:
    """Draws a thing on its tile into the pixels of a cell, in place."""
    cell[1:-1, 1:-1] = COLORS[thing.color]
    if thing.category == DIGIT:
        digit = rng.choice(np.flatnonzero(pictures.labels == int(thing.name)))
        ink = pictures.digits[digit]
        picture = np.stack([np.zeros_like(ink)] * 3 + [ink], axis=-1)
    else:
        picture = pictures.drawings[thing.name]
    size = pictures.size - int(rng.integers(pictures.size // 8 + 1))
    picture = _shrunk(picture, size)
    top, left = rng.integers(1, len(cell) - size, 2)
    target = cell[top : top + size, left : left + size]
    alpha = picture[..., 3:]
    target[...] = alpha * picture[..., :3] + (1 - alpha) * target


def _shrunk(picture: np.ndarray, size: int) -> Float32[np.ndarray, "size size 4"]:
    image = Image.fromarray(np.round(255 * picture).astype(np.uint8))
    small = image.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(small, np.float32) / 255
