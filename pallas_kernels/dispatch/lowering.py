"""Kernels that are lowered once in a process, wherever a program calls them.

JAX lowers a Pallas kernel again for every program, and on a mesh again for every call:
XLA's partitioner lowers each partitioned operation by itself. Each lowering takes 0.3 s
of Python. Here a kernel is one primitive of the traced program. Its first lowering
keeps the custom call that Pallas emits, and all later lowerings emit it again. With
JAX's persistent compilation cache, later processes do so, too; see `storage`.

The kernel in a custom call is MLIR's bytecode with a hash. XLA assembles kernels of the
same hash once. So line numbers, paths, and JAX's count of kernels, which differ between
equal kernels and between checkouts, are removed from the bytecode. Profiles show the
names of kernels, but no source lines.

It is not documented how Pallas emits custom calls. A kernel in a form that is not
expected here is lowered in JAX's own way, with one warning.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.interpreters import batching, mlir

from pallas_kernels import versions
from pallas_kernels.checks import warn_once
from pallas_kernels.dispatch import array_types, storage
from pallas_kernels.dispatch.custom_calls import Calls, read_calls, viewed


class _Launch:
    """A traced function that does nothing but run kernels.

    Attributes:
      program: The traced function.
      name: The kernels' name.
    """

    def __init__(self, program: core.ClosedJaxpr, name: str):
        self.program = program
        self.name = name
        self._lock = threading.Lock()
        self._lowered: dict[Any, Calls | None] = {}

    def __repr__(self) -> str:
        return self.name

    @property
    def function(self) -> Callable:
        """The traced function: it takes the program's operands, and returns a list."""
        return core.jaxpr_as_fun(self.program)

    def of_types(self, results: Sequence[Any] | None) -> Callable:
        """Returns `function` for operands of any types with the same memory.

        `results` are the types of the results; None means the program's own.
        """

        def run(*operands):
            types = self.program.in_avals, results or self.program.out_avals
            out = self.function(*map(viewed, operands, types[0]))
            return list(map(viewed, out, types[1]))

        return run

    def calls(self) -> Calls | None:
        """Returns the custom calls that run the kernels on the current target.

        They are lowered once for each target. Returns None, with a warning, if this
        version of JAX writes custom calls in a way that `read_calls` does not know.
        """
        # Kernels depend on the GPU that they are compiled for.
        target = jax.sharding.get_abstract_mesh().abstract_device
        with self._lock:
            if target not in self._lowered:
                self._lowered[target] = self._stored(target)
            return self._lowered[target]

    def _stored(self, target: Any) -> Calls | None:
        """Returns the calls that an earlier process stored, or stores new ones."""
        path = storage.path_of(self.program, target)
        if path is None:
            return self._calls()
        calls = storage.read(path)
        if calls is None and (calls := self._calls()) is not None:
            storage.write(path, calls)
        return calls

    def _calls(self) -> Calls | None:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.program.in_avals]
        with _alone():
            traced = jax.jit(self.function).trace(*shapes)
            module = traced.lower(lowering_platforms=("cuda",)).compiler_ir()
        try:
            return read_calls(module)
        # A later version of JAX may have other attributes, and other types of them.
        except Exception as error:
            warn_once(f"kernels are lowered again at every call: {error!s:.200}")
            return None


def once(launch: Callable, name: str) -> Callable:
    """Wraps a function that does nothing but run kernels, so that it is lowered once.

    Callers should be jitted: each trace of the wrapped function is lowered again.

    Args:
      launch: A function of arrays. It is called unchanged if an operand is not an array
        but a ref, or in Pallas's interpret mode.
      name: The name of the operation in profiles.
    """

    def run(*operands):
        leaves, tree = jax.tree.flatten(operands)
        if not all(isinstance(x, (jax.Array, np.ndarray)) for x in leaves):
            return launch(*operands)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        with _alone():
            trace = jax.make_jaxpr(
                lambda *leaves: launch(*tree.unflatten(leaves)), return_shape=True
            )
            program, out = trace(*shapes)
        if program.consts or program.effects or _is_interpreted(program.jaxpr):
            return launch(*operands)
        with jax.named_scope(name):
            results = KERNEL.bind(*leaves, launch=_Launch(program, name), results=None)
        return jax.tree.structure(out).unflatten(results)

    return run


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Makes JAX trace and lower for one device in this context, with 32-bit indices."""
    with array_types.alone(), jax.enable_x64(False):
        yield


def _is_interpreted(jaxpr: core.Jaxpr) -> bool:
    """Returns whether a program has a kernel in Pallas's interpret mode."""
    return any(
        eqn.params.get("interpret")
        or any(map(_is_interpreted, versions.bodies_in_params(eqn.params)))
        for eqn in jaxpr.eqns
    )


def _lower_again(ctx: Any, *operands: Any, launch: _Launch, results: Any) -> Any:
    """Lowers a launch in JAX's own way."""
    del results  # The context has the same types.
    rule = mlir.lower_fun(launch.of_types(ctx.avals_out), multiple_results=True)
    return rule(ctx, *operands)


def _lower_elsewhere(ctx: Any, *operands: Any, launch: _Launch, results: Any) -> Any:
    """Lowers a launch without kernels for a device that is not a GPU.

    Raises:
      ValueError: If the launch has a kernel.
    """
    try:
        return _lower_again(ctx, *operands, launch=launch, results=results)
    except ValueError as error:
        platforms = ", ".join(ctx.module_context.platforms)
        raise ValueError(
            f"{launch.name} is a kernel for a GPU, and its program is compiled for "
            f"{platforms}, where its arrays are; trace the program within "
            f"jax.default_device of that device, or move the arrays"
        ) from error


def _lower_once(ctx: Any, *operands: Any, launch: _Launch, results: Any) -> Any:
    """Lowers a launch for a GPU at its first call, and later emits the same calls."""
    # Exported programs have an older form of kernels, for later versions of JAX.
    calls = None if ctx.is_forward_compat() else launch.calls()
    if calls is None:
        return _lower_again(ctx, *operands, launch=launch, results=results)
    return calls.emit(ctx, operands)


def _batched(
    operands: Sequence[Any], axes: Sequence[Any], *, launch: _Launch, results: Any
) -> Any:
    """Returns the results of a launch under `vmap`, and the axes that are mapped.

    Pallas adds an axis to the kernels' grids.
    """
    mapped = jax.vmap(launch.of_types(results), in_axes=tuple(axes))
    results = once(mapped, launch.name)(*operands)
    return results, [0] * len(results)


def _kernel_primitive() -> core.Primitive:
    """Returns the primitive that runs a launch.

    Its parameter `results` has the types of the results; None means the types that the
    launch itself returns. Operands, too, may differ in type from the launch's operands.
    """
    primitive = core.Primitive("kernel")
    primitive.multiple_results = True

    def run(*operands, **params):
        return jax.jit(lambda *operands: primitive.bind(*operands, **params))(*operands)

    primitive.def_impl(run)
    primitive.def_abstract_eval(
        lambda *_, launch, results: [
            jax.core.ShapedArray(x.shape, x.dtype)
            for x in results or launch.program.out_avals
        ]
    )
    mlir.register_lowering(primitive, _lower_elsewhere)
    mlir.register_lowering(primitive, _lower_once, platform="cuda")
    batching.primitive_batchers[primitive] = _batched
    return primitive


KERNEL = _kernel_primitive()
