"""FP8 matmuls and FP8 residuals in a model that the user did not write."""

import contextvars
import functools
import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from flax import linen as nn
from flax import nnx

from coat_jax.convert.matmuls import Conversion
from coat_jax.convert.rules import (
    Rule,
    chooser,
    chosen_blocks,
    modules_of,
    shapes_of,
)
from coat_jax.quantization.formats import E4M3, Format
from coat_jax.remat.modules import linen_method, nnx_class, over_nodes
from coat_jax.remat.plan import Options
from coat_jax.remat.trace import Residual

# The numbers of keys that come before a parameter's path, in the arguments of functions
# that `coat_jax.remat.modules` wraps: functions, and those of NNX and Linen modules.
_FUNCTION, _NNX, _LINEN = 2, 2, 5


def fp8[Model](
    model: Model,
    *,
    blocks: Rule | None = None,
    matmuls: Rule | None = None,
    format: Format = E4M3,
    group: int = 16,
    where: Callable[[Residual], Any] | None = None,
    policy: Callable[..., Any] | None = None,
    rerun_attention: bool = False,
) -> Model:
    """Converts a model: matmuls of its blocks run in FP8, and save FP8 residuals.

    It applies `fp8_dot_general` and `fp8_remat` to the blocks of a model, such as the
    layers of a transformer, without a change of the model's code. All matmuls of an
    activation and a parameter count, as `nn.Dense`, `nnx.Einsum` or `x @ w` make them.
    Embeddings, the head and anything else outside the blocks stay as they are.

    Args:
      model: A Linen or NNX module, or a function f(params, ...), which is one block.
      blocks: The paths of the modules that are blocks, as regular expressions that a
        whole path matches, or a function of a path. By default the outermost numbered
        modules with two or more matrices, such as "layers/0" or "encoderblock_3".
        Layers that a scan runs are not numbered: name them, as in `blocks="layers"`.
      matmuls: The paths of the parameters whose matmuls run in FP8, such as
        ".*/(up|down)/kernel"; a rule like `blocks`. By default all matmuls with at
        least 128 inputs and outputs that are multiples of 16. Those within a loop, a
        `jax.checkpoint` or a custom derivative stay as they are, with a warning.
      format: The format of saved copies; see `fp8_remat` for this and what follows.
      group: The number of neighbours that share a scale of a saved copy.
      where: Selects the residuals that are quantized.
      policy: A policy of `jax.checkpoint`.
      rerun_attention: Whether flash attention runs again on FP8 copies.

    Returns:
      A model of the same kind, whose parameters have the same paths. An NNX model
      shares its variables with the result.

    Raises:
      TypeError: If `model` is neither a module nor a function.
      ValueError: If a rule or an option is invalid, or no block is found. A Linen
        module has parameters only when it is applied, and raises it then.

    Example:
      >>> import coat_jax as coat, jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> class Block(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         return x + nn.Dense(128)(nn.gelu(nn.Dense(512)(x)))
      >>> model = coat.fp8(nn.Sequential([Block(), Block(), nn.Dense(10)]))
      >>> x = jnp.ones((4, 128))
      >>> params = model.init(jax.random.key(0), x)
      >>> model.apply(params, x).shape
      (4, 10)
    """
    for name, rule in (("blocks", blocks), ("matmuls", matmuls)):
        if rule is not None:
            chooser(name, rule)
    options = partial(
        Options,
        format=format,
        group=group,
        where=where,
        policy=policy,
        key=None,
        rerun_attention=rerun_attention,
    )
    options()  # Raises errors of the options here.
    if isinstance(model, nnx.Module):
        return _nnx(model, blocks, matmuls, options)
    if isinstance(model, nn.Module):
        return _linen(model, blocks, matmuls, options)
    if callable(model) and not isinstance(model, type):
        chosen = None if matmuls is None else chooser("matmuls", matmuls)
        rewrite = Conversion(depth=_FUNCTION, chosen=chosen, where="the function")
        return over_nodes(model, (0,), options(rewrite=rewrite))
    raise TypeError(f"fp8 takes a Flax module or a function, got {model!r}")


def _conversion(
    depth: int, matmuls: Rule | None, shapes: dict[str, tuple[int, ...]], block: str
) -> Conversion:
    """Returns the conversion of a block whose parameters have `shapes`."""
    if matmuls is None:
        return Conversion(depth=depth, chosen=None, where=block)
    chosen = chooser("matmuls", matmuls)
    names = frozenset(path for path in shapes if chosen(f"{block}/{path}".lstrip("/")))
    return Conversion(depth=depth, chosen=names, where=block)


def _below(
    shapes: dict[str, tuple[int, ...]], block: str
) -> dict[str, tuple[int, ...]]:
    """Returns the parameters of a block, by their paths within it."""
    if not block:
        return shapes
    prefix = f"{block}/"
    return {p[len(prefix) :]: s for p, s in shapes.items() if p.startswith(prefix)}


def _nnx(
    model: nnx.Module,
    rule: Rule | None,
    matmuls: Rule | None,
    options: Callable[..., Options],
) -> nnx.Module:
    """Returns an NNX model with converted blocks, which shares its variables."""
    modules = ["/".join(map(str, path)) for path, _ in nnx.iter_modules(model)]
    shapes = shapes_of(nnx.state(model, nnx.Param))
    blocks = {*chosen_blocks(shapes, modules, rule)}
    # An object that stands in several places stays one object.
    done: dict[int, Any] = {}

    @functools.cache
    def light_class(cls: type[nnx.Module], conversion: Conversion) -> type[nnx.Module]:
        return nnx_class(cls, options(rewrite=conversion))

    def converted(x: Any, path: str) -> Any:
        if id(x) not in done:
            done[id(x)] = block(x, path) if path in blocks else rebuilt(x, path)
        return done[id(x)]

    def block(module: nnx.Module, path: str) -> nnx.Module:
        conversion = _conversion(_NNX, matmuls, _below(shapes, path), path)
        return _copy(light_class(type(module), conversion), vars(module))

    def rebuilt(x: Any, path: str) -> Any:
        def child(name, value):
            return converted(value, f"{path}/{name}".lstrip("/"))

        if isinstance(x, nnx.Pytree):
            members = vars(x).items()
            new = {n: v if n.startswith("_") else child(n, v) for n, v in members}
            return x if _same(new, vars(x)) else _copy(type(x), new)
        if type(x) is dict:
            new = {name: child(name, v) for name, v in x.items()}
            return x if _same(new, x) else new
        if type(x) in (list, tuple):
            new = rebuilt(dict(enumerate(x)), path)
            return x if _same(new, dict(enumerate(x))) else type(x)(new.values())
        return x

    return converted(model, "")


def _same(new: dict[Any, Any], old: dict[Any, Any]) -> bool:
    return all(new[name] is x for name, x in old.items())


def _copy(cls: type, members: dict[str, Any]) -> Any:
    new = object.__new__(cls)
    vars(new).update(members)
    return new


def _linen(
    model: nn.Module,
    rule: Rule | None,
    matmuls: Rule | None,
    options: Callable[..., Options],
) -> nn.Module:
    """Returns a Linen module of a subclass whose methods convert the model's blocks."""
    # Methods that call each other convert once.
    active = contextvars.ContextVar("active", default=False)

    def converting(method: Callable) -> Callable:
        @wraps(method)
        def call(self, *args, **kwargs):
            if self.is_initializing() or active.get():
                return method(self, *args, **kwargs)
            shapes = shapes_of(self.variables.get("params", {}))
            blocks = chosen_blocks(shapes, modules_of(shapes), rule)
            convert = _Blocks({b: _below(shapes, b) for b in blocks}, matmuls, options)
            token = active.set(True)
            try:
                with nn.intercept_methods(partial(convert, len(self.path))):
                    return method(self, *args, **kwargs)
            finally:
                active.reset(token)

        return call

    members = {
        name: converting(method)
        for name, method in inspect.getmembers(type(model), inspect.isfunction)
        if name == "__call__" or not (name.startswith("_") or hasattr(nn.Module, name))
    }
    members |= {"__doc__": type(model).__doc__, "__module__": type(model).__module__}
    cls = type(type(model))(type(model).__name__, (type(model),), members)
    fields = [name for name, f in cls.__dataclass_fields__.items() if f.init]
    return cls(**{name: getattr(model, name) for name in fields})


class _Blocks:
    """Converts the calls of a Linen model's blocks, as an interceptor of methods."""

    def __init__(
        self,
        blocks: dict[str, dict[str, tuple[int, ...]]],
        matmuls: Rule | None,
        options: Callable[..., Options],
    ):
        self._options = {
            path: options(rewrite=_conversion(_LINEN, matmuls, shapes, path))
            for path, shapes in blocks.items()
        }
        self._inside = False

    def __call__(
        self, depth: int, next_call: Callable, args: Any, kwargs: Any, context: Any
    ) -> Any:
        module, name = context.module, context.method_name
        path = "/".join(module.path[depth:])
        # A lifted loop calls the block itself, in its own scope.
        lifted = type(module).__name__.startswith(("Scan", "Vmap"))
        if self._inside or lifted or name != "__call__" or path not in self._options:
            return next_call(*args, **kwargs)

        def block(module, *args, **kwargs):
            self._inside = True
            try:
                return module(*args, **kwargs)
            finally:
                self._inside = False

        light = linen_method(block, self._options[path])
        return light(module, *args, **kwargs)
