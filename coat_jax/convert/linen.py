"""Converts the blocks of Linen models while the models are applied.

Submodules of a Linen model exist only during a call. So a converted model intercepts
the methods of its blocks when it is called, and runs them with FP8 matmuls and FP8
residuals.
"""

import contextvars
import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from flax import linen as nn

from coat_jax.convert.matmuls import OF_LINEN, Conversion
from coat_jax.convert.objects import has_arrays
from coat_jax.convert.record import ModelRecord, Shapes, current
from coat_jax.convert.rules import Rules, below, chosen_blocks, modules_of, shapes_of
from coat_jax.remat.classes import method_names
from coat_jax.remat.modules import fields_of, linen_method
from coat_jax.remat.options import Options

# Methods that are no calls by the user: Linen calls `setup`, and a converted call runs
# as a method of the name `fp8_block`.
_NOT_CALLED = ("setup", "fp8_block")


def linen_model(model: nn.Module, rules: Rules, options: Options) -> nn.Module:
    """Returns a model with the same fields and with methods that convert its blocks."""
    convert = _Convert(rules, options)
    members = {
        name: convert.method(getattr(type(model), name))
        for name in method_names(type(model))
        if name == "__call__" or not name.startswith("_")
    }
    members |= {"__doc__": type(model).__doc__, "__module__": type(model).__module__}
    cls = type(type(model))(type(model).__name__, (type(model),), members)
    return cls(**fields_of(model))


class _Convert:
    """Wraps the methods of a Linen model, so that each call converts its blocks.

    Calls within another call, and calls that initialize parameters, convert nothing.
    """

    def __init__(self, rules: Rules, options: Options):
        self._rules, self._options = rules, options
        # True while a method runs: the methods that it calls do not convert again.
        self._active = contextvars.ContextVar("active", default=False)
        self._models: dict[Any, ModelRecord] = {}

    def method(self, method: Callable) -> Callable:
        @wraps(method)
        def call(module, *args, **kwargs):
            is_setup = method.__name__ == "setup"
            if is_setup or module.is_initializing() or self._active.get():
                return method(module, *args, **kwargs)
            blocks = self._blocks(module)
            token = self._active.set(True)
            try:
                with nn.intercept_methods(blocks):
                    y = method(module, *args, **kwargs)
            finally:
                self._active.reset(token)
            blocks.finish(method.__name__)
            return y

        return call

    def _blocks(self, module: nn.Module) -> "_Blocks":
        """Returns the interceptor that converts the blocks of an applied module."""
        shapes = shapes_of(module.variables.get("params", {}))
        paths = chosen_blocks(shapes, modules_of(shapes), self._rules.blocks)
        inside = {path: below(shapes, path) for path in paths}
        kinds = frozenset(frozenset(names.items()) for names in inside.values())
        if kinds not in self._models:
            self._models[kinds] = ModelRecord.of(self._rules, inside.values())
        record, depth = self._models[kinds], len(module.path)
        return _Blocks(inside, record, depth, self._rules, self._options)


class _Blocks:
    """An interceptor of Linen methods that converts the calls of a model's blocks."""

    def __init__(
        self,
        blocks: dict[str, Shapes],
        model: ModelRecord,
        depth: int,
        rules: Rules,
        options: Options,
    ):
        """Makes the conversion of each block.

        Args:
          blocks: The shapes of the parameters of each block, by its path.
          model: The record of the blocks.
          depth: The number of modules that contain the model.
          rules: The rules of the conversion.
          options: The options of `fp8_remat`.
        """
        self._conversions = {
            path: Conversion.of_block(rules, model, path, shapes, OF_LINEN)
            for path, shapes in blocks.items()
        }
        self._model, self._rules = model, rules
        self._depth, self._options = depth, options
        self._in_block = False
        if (records := current.get()) is not None:
            records.blocks |= dict.fromkeys(blocks)

    def __call__(
        self, next_call: Callable, args: Any, kwargs: Any, context: Any
    ) -> Any:
        module, name = context.module, context.method_name
        path = "/".join(module.path[self._depth :])
        if self._in_block or name in _NOT_CALLED or path not in self._conversions:
            return next_call(*args, **kwargs)
        # Methods of Flax's lifted classes are intercepted for the class that is lifted.
        if not _is_method(context.orig_method.func, type(module), name):
            return next_call(*args, **kwargs)
        if name != "__call__" and not has_arrays((args, kwargs)):
            return next_call(*args, **kwargs)
        self._model.called = True

        def fp8_block(module, *args, **kwargs):
            self._in_block = True
            try:
                return getattr(module, name)(*args, **kwargs)
            finally:
                self._in_block = False

        options = self._options.after(self._conversions[path].logged())
        light = linen_method(fp8_block, options)
        return light(module, *args, **kwargs)

    def finish(self, method: str) -> None:
        """Raises an error, or warns, if the model has called no block.

        Args:
          method: The name of the model's method that has run.

        Raises:
          ValueError: If no block was called and the method is `__call__`.
        """
        if self._model.called or current.get() is not None:
            return
        message = (
            f"coat.fp8 with {self._rules} converts no matmul: {method} calls no block, "
            f"of {', '.join(self._conversions)}; name modules that are called with "
            "blocks=, and convert before nn.jit traces a model"
        )
        if method == "__call__":
            raise ValueError(message)
        self._model.warn(message)


def _is_method(method: Callable, cls: type, name: str) -> bool:
    """Returns whether `method` is `cls.name`, and not a function that a scan runs."""
    of_class = getattr(cls, name, None)
    return of_class is not None and inspect.unwrap(of_class) is inspect.unwrap(method)
