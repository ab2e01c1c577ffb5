"""The state of a transformation, with its moving averages in 8 bits."""

import dataclasses
import functools
import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import GetAttrKey, keystr, tree_leaves_with_path
from jax.typing import DTypeLike

from coat_jax import serialization
from coat_jax.optimizers.moment import KNOWN, Moment
from coat_jax.optimizers.places import Path, fields_of
from coat_jax.optimizers.trees import (
    by_path,
    check_structure,
    in_boxes,
    is_box,
    is_quantized,
)
from coat_jax.quantization.array import QuantizedArray
from coat_jax.quantization.granularity import PerGroup

if TYPE_CHECKING:
    import chex

# The version of `QuantizedState`. States of version 0 had bfloat16 scales.
VERSION = 1
_BITS_OF_VERSION = 8
Rounding = Literal["stochastic", "nearest"]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Layout:
    """The storage of the fields of a state; a pytree without leaves.

    Attributes:
      moments: The paths of the fields with quantized averages, and their storage.
      rounding: The rounding of codes, "stochastic" or "nearest".
    """

    moments: tuple[tuple[Path, Moment], ...]
    rounding: Rounding

    @property
    def version(self) -> int:
        """The `version` of states with this layout: `VERSION` and a checksum.

        The lowest 8 bits are `VERSION`. The 23 bits above are a checksum of the
        moments' storage, which is never zero. States that were saved before there was a
        checksum have zero there.
        """
        parts = [
            f"{keystr(field)} {m.format.name} {m.power} {m.over_root_of}"
            for field, m in self.moments
        ]
        checksum = zlib.crc32("\n".join(parts).encode()) >> 9 or 1
        return VERSION | checksum << _BITS_OF_VERSION

    def as_dict(self) -> dict[str, str]:
        """Returns the layout as a dict of strings, for messages and files."""
        moments = {keystr(field): str(moment) for field, moment in self.moments}
        return moments | {"rounding": self.rounding}

    def split(self, path: Path) -> tuple[Path, Moment | None, Path]:
        """Splits a leaf's path into its field's path and the parameter's path.

        Returns:
          The field's path, the storage of its averages, and the parameter's path. If
          the leaf is in no field of averages, these are the leaf's path, None and ().
        """
        moments = dict(self.moments)
        for end in range(1, len(path) + 1):
            if path[:end] in moments:
                return path[:end], moments[path[:end]], path[end:]
        return path, None, ()

    def second_moment(self, path: Path) -> Path | None:
        """Returns the path of the second moment that divides a leaf, or None."""
        field, moment, place = self.split(path)
        if moment is None or moment.over_root_of is None:
            return None
        return (*field[:-1], GetAttrKey(moment.over_root_of), *place)


class QuantizedState(NamedTuple):
    """The state of `with_quantized_state`.

    Other attributes are read from the inner state: `state.mu` is
    `state.inner_state.mu`.

    Attributes:
      inner_state: The state of the inner transformation. Its averages are
        `QuantizedArray`s, or float32 arrays if they are small or masked out.
      rounding_step: The number of updates so far, int32. The random bits of rounding
        depend on it.
      version: `layout.version`, int32: the version of the state's format, and a
        checksum of `layout.moments`. Readers that know arrays alone, such as orbax,
        keep it while they cast codes to the dtypes of another layout.
      layout: The storage of the fields.
    """

    inner_state: Any
    rounding_step: "chex.Array"
    version: "chex.Array"
    layout: Layout

    @property
    def count(self) -> Any:
        """The inner state's `count`.

        Tuples have a method of this name, so `__getattr__` would not be called for it.
        """
        return self.inner_state.count

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.inner_state, name)


def is_state(node: Any) -> bool:
    """Returns whether a node of a tree is a quantized state."""
    return isinstance(node, QuantizedState)


def wrong_version(version: int, layout: Layout) -> str | None:
    """Returns what is wrong with a state's `version`, or None if it fits its layout."""
    number = version % (1 << _BITS_OF_VERSION)
    if number != VERSION:
        return (
            f"version must be {VERSION}, got {number}: was the state saved by another "
            "version of coat_jax?"
        )
    if version not in (VERSION, layout.version):
        moments = layout.as_dict()
        del moments["rounding"]
        return (
            f"version must be {layout.version} for moments {moments}, got {version}: "
            "the state was saved with other formats, and its codes were cast. Restore "
            "it with the optimizer's options that it was saved with, and convert it by "
            "coat.from_optax_state(coat.to_optax_state(state), tx.init(params))"
        )
    return None


def states_in(tree: Any) -> list[QuantizedState]:
    """Returns the quantized states that a tree contains."""
    return [s for s in jax.tree.leaves(tree, is_leaf=is_state) if is_state(s)]


def next_state(state: QuantizedState, inner_state: Any, given: Any) -> QuantizedState:
    """Returns the state after a step.

    Averages are put into boxes, such as NNX variables, if the gradients `given` are in
    such boxes.
    """
    boxes = by_path(given, is_leaf=is_box)
    inner_state = in_boxes(inner_state, boxes)
    step = state.rounding_step + 1
    return state._replace(inner_state=inner_state, rounding_step=step)


class Choices(NamedTuple):
    """The arguments of `with_quantized_state` that say how moments are stored."""

    moments: Mapping[str, Moment | None]
    quantize_mask: Any
    granularity: PerGroup
    rounding: Rounding

    def of(self, record: str, field: str) -> Moment | str | None:
        """Returns a field's storage: a `Moment`, None for float32, or "unknown".

        Args:
          record: The type name of the named tuple that has the field.
          field: The name of the field.
        """
        if field in self.moments:
            return self.moments[field]
        return KNOWN.get(record, {}).get(field, "unknown")

    def check(self, state: Any) -> None:
        """Raises ValueError unless `state` is quantized, and stored as chosen here.

        Fields that `moments` does not name, and moments that are not quantized, stay as
        they are stored.
        """
        serialization.register()
        if not isinstance(state, QuantizedState):
            kind = type(state).__name__
            raise ValueError(
                f"the state must be a coat.QuantizedState, got {kind}. Go on from a "
                "state of optax with coat.from_optax_state(state, tx.init(params))"
            )
        layout, leaves = state.layout, jax.tree.leaves(state, is_leaf=is_quantized)
        options = [("rounding", layout.rounding, self.rounding)]
        for field, moment in layout.moments:
            name = field[-1].name
            options.append((f"{name} as", moment, self.moments.get(name, moment)))
        sizes = {leaf.granularity for leaf in leaves if is_quantized(leaf)}
        options += [("granularity", size, self.granularity) for size in sizes]
        for name, stored, chosen in options:
            if stored != chosen:
                raise ValueError(
                    f"the state has {name} {stored}, but the optimizer has {chosen}. "
                    "To change it, pass coat.from_optax_state("
                    "coat.to_optax_state(state), tx.init(params))"
                )


def check_gradients(grads: Any, state: QuantizedState) -> None:
    """Raises ValueError unless gradients match the moments by path and shape.

    Gradients must also be floating, and in a tree of the same structure. Quantized
    moments must have arrays in the dtypes in which optimizers store them.
    """
    found = by_path(grads)
    for path, grad in found.items():
        if not jnp.issubdtype(jnp.result_type(grad), jnp.floating):
            raise ValueError(
                f"gradient{keystr(path)} must be floating, got {jnp.result_type(grad)}"
            )
    for field, path, moment in moments_of(state):
        if path not in found:
            raise ValueError(
                f"there is no gradient{keystr(path)}, but the state has its "
                f"{field[-1].name}"
            )
        if (shape := jnp.shape(found[path])) != moment.shape:
            raise ValueError(
                f"gradient{keystr(path)} must have the shape {moment.shape} of its "
                f"{field[-1].name}, got {shape}"
            )
        if is_quantized(moment):
            _check_dtypes(moment, f"{field[-1].name}{keystr(path)}")
    _check_structure(grads, state)


def _check_dtypes(moment: QuantizedArray, name: str) -> None:
    stored = {
        "codes": (moment.codes, moment.format.dtype),
        "scales": (moment.scale, jnp.float32),
        "exponents": (moment.exponent, jnp.uint8),
    }
    for kind, (x, dtype) in stored.items():
        if x is not None and x.dtype != dtype:
            reason = without_dtype(x, dtype) or (
                f"{kind} must not be cast; coat.to_optax_state(state) has the moments "
                "as numbers"
            )
            raise ValueError(
                f"the {kind} of {name} must be {jnp.dtype(dtype)}, got {x.dtype}: "
                f"{reason}"
            )


def without_dtype(x: Any, dtype: DTypeLike) -> str | None:
    """Returns what to do with an array that a file of NumPy has without its `dtype`.

    It is None for other arrays.
    """
    if getattr(x, "dtype", None) != np.dtype("V1"):
        return None
    return (
        "files of NumPy do not name FP8 dtypes, so that arrays are read as bytes; "
        f"array.view(jnp.{jnp.dtype(dtype)}) has the codes again"
    )


def _check_structure(grads: Any, state: QuantizedState) -> None:
    """Raises ValueError unless gradients have the structure of optax's averages.

    Averages of a part of the parameters, next to masks, have another structure.
    """
    types = dict(fields_of(state.inner_state))
    for field, _ in state.layout.moments:
        average = functools.reduce(_child, field, state.inner_state)
        name = field[-1].name
        is_known = name in KNOWN.get(types.get(field), ())
        if is_known and not any(
            map(_is_mask, jax.tree.leaves(average, is_leaf=_is_mask))
        ):
            check_structure(
                grads,
                average,
                name="the tree of gradients",
                is_leaf=is_quantized,
                like_name=name,
            )


def _child(node: Any, key: Any) -> Any:
    children, _ = jax.tree.flatten_with_path(node, is_leaf=lambda x: x is not node)
    return dict(children)[(key,)]


def _is_mask(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)


def moments_of(state: QuantizedState) -> Iterator[tuple[Path, Path, Any]]:
    """Yields the field's path, the parameter's path and the value of each average."""
    leaves = tree_leaves_with_path(state.inner_state, is_leaf=is_quantized)
    for path, leaf in leaves:
        field, moment, place = state.layout.split(path)
        if moment is not None:
            yield field, place, leaf
