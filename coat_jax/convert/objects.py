"""Converts the blocks of NNX models and of callable pytrees."""

import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any

import jax
from flax import nnx

from coat_jax.convert.matmuls import OF_FUNCTION, Conversion
from coat_jax.convert.record import Label, ModelRecord, Shapes
from coat_jax.convert.rules import (
    Rules,
    below,
    chosen_blocks,
    is_matrix,
    numbered,
    path_of,
    shapes_of,
)
from coat_jax.remat.classes import REBUILD, is_callable, method_names
from coat_jax.remat.modules import nnx_module, over_nodes
from coat_jax.remat.options import Options
from coat_jax.remat.pytrees import (
    has_arrays,
    has_shape,
    is_pytree,
    one_level,
    pytree_module,
    recast,
)
from coat_jax.remat.vjp import is_array

# The name of the attribute with the `Label` of an NNX module that is a block.
LABEL = "_fp8_label"

# True while the method of a block runs: the methods that it calls are parts of it.
_in_block = contextvars.ContextVar("in_block", default=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Converting:
    """A function that wraps the methods of a block's class, to convert their matmuls.

    Attributes:
      conversion: The conversion of the class's blocks.
      options: The options of `fp8_remat`.
    """

    conversion: Conversion
    options: Options

    def __call__(self, cls: type, name: str) -> Callable:
        """Returns the method `name` of `cls`, with its matmuls converted."""
        method = getattr(cls, name)

        @wraps(method)
        def call(self_, *args, **kwargs):
            is_call = name == "__call__" or has_arrays((args, kwargs))
            if _in_block.get() or not is_call:
                return method(self_, *args, **kwargs)
            conversion = self.conversion
            label = getattr(self_, LABEL, None)
            if label is not None:
                conversion = dataclasses.replace(
                    conversion, model=label.model, where=label.path
                )
            light = self.options.after(conversion.logged())
            token = _in_block.set(True)
            try:
                return over_nodes(method, (0,), light)(self_, *args, **kwargs)
            finally:
                _in_block.reset(token)

        return call


def can_be_block(x: Any) -> bool:
    """Returns whether an object is a module with methods that users may call."""
    if isinstance(x, nnx.Variable) or not isinstance(x, nnx.Pytree):
        is_module = is_pytree(x) and not isinstance(x, nnx.Variable)
        is_class = is_callable(type(x)) or dataclasses.is_dataclass(x)
        return is_module and is_class and bool(method_names(type(x)))
    return type(x) not in (nnx.List, nnx.Dict) and bool(method_names(type(x)))


def objects_of(
    model: Any, path: str = "", above: tuple[int, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Yields the path and the object of each part of a model, outer parts first.

    An object that the model contains several times is yielded with each of its paths.

    `path` is the path of `model` itself, and `above` has the `id`s of the objects that
    contain it.
    """
    yield path, model
    if id(model) in above or is_array(model):
        return
    for name, child in _children(model).items():
        inner = f"{path}/{name}".lstrip("/")
        yield from objects_of(child, inner, (*above, id(model)))


def parameters_of(model: Any) -> dict[str, tuple[int, ...]]:
    """Returns shapes of parameters by path; a shared parameter has several paths."""
    if not isinstance(model, nnx.Pytree):
        return {p: x.shape for p, x in objects_of(model) if has_shape(x)}
    shapes = {}
    for path, x in objects_of(model):
        if isinstance(x, nnx.Param):
            leaves = jax.tree.leaves_with_path(x.get_raw_value())
            names = (f"{path}/{path_of(keys)}".rstrip("/") for keys, _ in leaves)
            shapes |= {n: v.shape for n, (_, v) in zip(names, leaves, strict=True)}
    return shapes


def _children(x: Any) -> Mapping[Any, Any]:
    if isinstance(x, nnx.Pytree):
        names = [n for n in vars(x) if not str(n).startswith("_pytree__")]
        return {n: vars(x)[n] for n in names}  # Lists had numbers before flax 0.12.9.
    if isinstance(x, nnx.Variable) or not is_pytree(x):
        return {}
    return {_name(path): child for path, child in one_level(x)[0]}


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def with_blocks(
    model: Any, paths: Mapping[str, Any], light: Callable[[Any, str], Any]
) -> Any:
    """Returns a model like `model` with converted blocks; all else is shared.

    Args:
      model: An NNX module or a callable pytree.
      paths: The paths of the blocks, as keys.
      light: A function of a block and its path, which returns the converted block.
    """
    objects = list(objects_of(model))
    # A module with several paths stays one module, which is a block at all of them.
    modules = {
        id(x) for path, x in objects if path in paths and isinstance(x, nnx.Pytree)
    }
    blocks = {path for path, x in objects if path in paths or id(x) in modules}
    above = {path[:i] for path in blocks for i, c in enumerate(path) if c == "/"}
    copies: dict[int, Any] = {}

    def replaced(x: Any, path: str) -> Any:
        if isinstance(x, nnx.Pytree) and id(x) in copies:
            return copies[id(x)]
        if path in blocks:
            copies[id(x)] = light(x, path)
            return copies[id(x)]
        return rebuilt(x, path) if path in above or not path else x

    def rebuilt(x: Any, path: str) -> Any:
        def child(name, value):
            return replaced(value, f"{path}/{name}".lstrip("/"))

        if isinstance(x, nnx.Pytree):
            new = copies[id(x)] = object.__new__(type(x))
            vars(new).update(vars(x))
            vars(new).update({n: child(n, v) for n, v in _children(x).items()})
            return new
        children, tree = one_level(x)
        return jax.tree.unflatten(tree, [child(_name(p), v) for p, v in children])

    return replaced(model, "")


def object_model(model: Any, rules: Rules, options: Options) -> Any:
    """Returns an NNX model or a callable pytree with converted blocks.

    Raises:
      ValueError: If there is no block, or if a block cannot be called.
    """
    shapes = parameters_of(model)
    blocks = _blocks(model, shapes, rules)
    inside = {path: _parameters_within(x, shapes, path) for path, x in blocks.items()}
    record = ModelRecord.of(rules, inside.values())
    if not isinstance(model, nnx.Pytree):
        kinds = frozenset(frozenset(names.items()) for names in inside.values())
        record = _record_of(type(model), str(rules), rules.keep_matmuls, kinds)

    def light(x: Any, path: str) -> Any:
        # Further paths of a shared module are not in `inside`.
        names = inside.get(path) or _parameters_within(x, shapes, path)
        conversion = Conversion.of_block(rules, record, path, names, OF_FUNCTION)
        if not isinstance(x, nnx.Pytree):
            return _light_pytree(x, conversion, options)
        # The label holds the record, so that equal models have blocks of one class.
        shared = dataclasses.replace(conversion, model=None)
        new = nnx_module(x, options, Converting(conversion=shared, options=options))
        vars(new)[LABEL] = Label(path, record)
        return new

    return with_blocks(model, blocks, light)


def _light_pytree(x: Any, conversion: Conversion, options: Options) -> Any:
    return pytree_module(x, options, Converting(conversion=conversion, options=options))


def conversion_of(x: Any) -> Conversion | None:
    """Returns the conversion of a pytree, or None if it is not a converted block."""
    rebuild = getattr(type(x), REBUILD, None)
    wrap = rebuild[-1] if rebuild and not isinstance(x, nnx.Pytree) else None
    return wrap.conversion if isinstance(wrap, Converting) else None


def with_conversion(x: Any, conversion: Conversion) -> Any:
    """Returns a copy of a converted pytree block that has another conversion."""
    _, cls, options, _ = getattr(type(x), REBUILD)
    return _light_pytree(recast(x, cls), conversion, options)


@functools.lru_cache(maxsize=256)
def _record_of(
    cls: type, rules: str, keep_matmuls: bool, blocks: frozenset[Any]
) -> ModelRecord:
    """Returns the record that pytrees with equal blocks, class and rules share."""
    del cls
    return ModelRecord(rules, map(dict, blocks), keep_matmuls=keep_matmuls)


def _parameters_within(x: Any, shapes: Shapes, path: str) -> Shapes:
    if isinstance(x, nnx.Pytree):
        return shapes_of(nnx.state(x, nnx.Param))
    return below(shapes, path)


def _blocks(model: Any, shapes: Shapes, rules: Rules) -> dict[str, Any]:
    """Returns the blocks of a model by path: the chosen modules, or modules in them."""
    is_flax = isinstance(model, nnx.Pytree)
    if rules.blocks is None and not is_flax and not numbered(shapes):
        return {"": model}
    objects = dict(objects_of(model))
    inner = (path for path, x in objects.items() if is_flax or path)
    blocks = {}
    for path in chosen_blocks(shapes, inner, rules.blocks):
        blocks |= _callable_within(objects, shapes, path)
        if not any(b == path or b.startswith(f"{path}/") for b in blocks):
            raise ValueError(
                f"a block must be a module with a method to call, or contain such "
                f"modules, but blocks={rules.blocks!r} chooses {path!r}, "
                f"a {type(objects.get(path)).__name__}"
            )
    return {"": model} if "" in blocks else blocks


def _callable_within(
    objects: Mapping[str, Any], shapes: Shapes, path: str
) -> dict[str, Any]:
    """Returns the outermost modules at or below a path that can be blocks."""
    if can_be_block(objects.get(path)):
        return {path: objects[path]}
    blocks = {}
    for name, x in objects.items():
        is_outer = not any(name.startswith(f"{block}/") for block in blocks)
        if is_outer and name.startswith(f"{path}/") and can_be_block(x):
            parameters = below(shapes, name)
            if any(map(is_matrix, parameters, parameters.values())):
                blocks[name] = x
    return blocks
