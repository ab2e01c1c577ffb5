"""Rules that choose blocks and parameters of a model by their paths."""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax.tree_util import GetAttrKey

# Regular expressions that match a whole path, such as ".*/(q|k|v)/kernel"; or a
# function of a path that returns whether the path is chosen.
Rule = str | Iterable[str] | Callable[[str], Any]
_NUMBERED = re.compile(r"(.*?)_?(\d+)")
# Blocks have at least this many matrices. A single matmul is no block.
_MATRICES = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules of a conversion, which `coat.fp8` documents.

    Several regular expressions become a tuple, because they are read more than once.
    """

    blocks: Rule | None
    matmuls: Rule | None

    def __post_init__(self) -> None:
        for name in ("blocks", "matmuls"):
            rule = getattr(self, name)
            is_one = isinstance(rule, str) or callable(rule)
            if isinstance(rule, Iterable) and not is_one:
                rule = tuple(rule)
                object.__setattr__(self, name, rule)
            if rule is not None:
                chooser(name, rule)

    def __str__(self) -> str:
        return f"blocks={self.blocks!r} and matmuls={self.matmuls!r}"

    @property
    def keep_matmuls(self) -> bool:
        """True if all matmuls stay as they are, because `matmuls` is an empty list."""
        return self.matmuls == ()


def below(
    shapes: Mapping[str, tuple[int, ...]], block: str
) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a block's parameters, by their paths within the block."""
    prefix = f"{block}/" if block else ""
    return {p[len(prefix) :]: s for p, s in shapes.items() if p.startswith(prefix)}


def chooser(name: str, rule: Rule) -> Callable[[str], bool]:
    """Returns a function that tells whether a rule chooses a path.

    `name` is the option that the rule was given for; errors name it.

    Raises:
      ValueError: If the rule is neither a function nor regular expressions.
    """
    if callable(rule):
        return lambda path: bool(rule(path))
    rules = [rule] if isinstance(rule, str) else rule
    try:
        patterns = [re.compile(pattern) for pattern in rules]
    except (TypeError, re.error) as error:
        raise ValueError(
            f"{name} must be regular expressions or a function of a path, got "
            f"{rule!r}: {error}"
        ) from None
    return lambda path: any(pattern.fullmatch(path) for pattern in patterns)


def path_of(keys: Iterable[Any]) -> str:
    """Returns the path of a parameter, such as "layers/0/mlp/up/kernel".

    The key `.value` of a variable that wraps the parameter is left out.
    """
    keys = tuple(keys)
    if len(keys) > 1 and keys[-1] == GetAttrKey("value"):
        keys = keys[:-1]
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def shapes_of(params: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter of a tree, by its path."""
    return {path_of(p): x.shape for p, x in jax.tree.leaves_with_path(params)}


def modules_of(paths: Iterable[str]) -> set[str]:
    """Returns the paths of the modules, at any depth, that contain parameters.

    `paths` are the paths of the parameters.
    """
    above = {path.rpartition("/")[0] for path in paths if path}
    return above | modules_of(above) if above else above


def chosen_blocks(
    shapes: Mapping[str, tuple[int, ...]], modules: Iterable[str], rule: Rule | None
) -> list[str]:
    """Returns the paths of a model's blocks; no block is within another block.

    Args:
      shapes: The shapes of the parameters by their paths.
      modules: The paths of the modules that a rule may choose.
      rule: The rule. None means the outermost modules that are numbered, such as
        "layers/0" or "block_0", and have `_MATRICES` matrices or more.

    Raises:
      ValueError: If there is no block.
    """
    if rule is None:
        blocks = numbered(shapes)
    else:
        chosen = chooser("blocks", rule)
        blocks = []
        for path in sorted(sorted(modules), key=len):
            if chosen(path) and not any(path.startswith(f"{b}/") for b in blocks):
                blocks.append(path)
    if not blocks:
        tops = ", ".join(sorted({path.split("/")[0] for path in shapes})) or "none"
        why = "no numbered module has several matrices"
        raise ValueError(
            f"{why if rule is None else 'no block matches'}, got blocks={rule!r} for a "
            f"model with the parameters below {tops}; name its blocks with blocks=, or "
            "take all of it as one block with blocks='.*'"
        )
    return blocks


def is_matrix(path: str, shape: tuple[int, ...]) -> bool:
    """Returns whether a parameter is a matrix, by its path and its shape."""
    # Biases and scales of stacked layers have two axes as well.
    return len(shape) > 1 and path.rpartition("/")[2] not in ("bias", "scale")


def numbered(shapes: Mapping[str, tuple[int, ...]], above: str = "") -> list[str]:
    """Returns the paths of the outermost numbered modules, such as "layers/0".

    Two or more modules are numbered if their names differ only in a final number, and
    each has `_MATRICES` matrices or more.

    Args:
      shapes: The shapes of the parameters, by their paths below `above`.
      above: The beginning of all returned paths, such as "encoder/".
    """
    children = defaultdict(dict)
    for path, shape in shapes.items():
        name, _, subpath = path.partition("/")
        if subpath:
            children[name][subpath] = shape
    families = defaultdict(list)
    for name, below in children.items():
        match = _NUMBERED.fullmatch(name)
        if match and sum(map(is_matrix, below, below.values())) >= _MATRICES:
            families[match[1]].append(name)
    blocks = {name for names in families.values() if len(names) > 1 for name in names}
    paths = []
    for name, below in children.items():
        path = f"{above}{name}"
        paths += [path] if name in blocks else numbered(below, f"{path}/")
    return paths
