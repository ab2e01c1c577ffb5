"""Functions with derivative rules as single operations of programs.

A jitted function is known by its name alone, which any function may have. An operation
of our own is known by itself. It is cheap to trace, because the function runs only
when it is differentiated or compiled.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from coat_jax.programs.primitives import CLOSED
from pallas_kernels.dispatch import array_types, operations

Types = Sequence[jax.core.ShapedArray]


def new_primitive(
    name: str,
    function_of: Callable[..., Callable[..., list[Any]]],
    types_of: Callable[..., Types],
) -> core.Primitive:
    """Returns an operation that computes a function with a derivative rule.

    Args:
      name: The name of the operation in programs.
      function_of: Returns the function for parameters of the operation. It takes
        arrays, and returns a list of arrays.
      types_of: Returns the types of the results for types of the arrays, as positional
        arguments, and parameters.
    """
    primitive = core.Primitive(name)
    primitive.multiple_results = True
    CLOSED.add(primitive)

    def computed(*arrays, body, **params):
        return function_of(**params)(*arrays)

    def types(*arrays, body, **params):
        if operations.is_explaining():  # It lists what the function calls.
            jax.eval_shape(function_of(**params), *arrays)
        return list(types_of(*arrays, **params))

    def differentiated(primals, tangents, body, **params):
        tangents = tuple(map(ad.instantiate_zeros, tangents))
        return jax.jvp(function_of(**params), tuple(primals), tangents)

    def mapped(arrays, axes, body, **params):
        results = jax.vmap(function_of(**params), in_axes=tuple(axes))(*arrays)
        return results, [0] * len(results)

    primitive.def_impl(computed)
    primitive.def_abstract_eval(types)
    ad.primitive_jvps[primitive] = differentiated
    batching.primitive_batchers[primitive] = mapped
    mlir.register_lowering(primitive, mlir.lower_fun(computed, multiple_results=True))
    return primitive


def bind(
    primitive: core.Primitive,
    function: Callable[..., list[Any]],
    *arrays: Any,
    **params,
) -> list[Any]:
    """Adds an operation for `function` to the program that is being traced.

    On a mesh it contains the traced function. JAX looks into operations for parts that
    need to know the devices before they are lowered.
    """
    body = None
    if array_types.mesh_of(arrays) is not None:
        with operations.unexplained():
            body = jax.make_jaxpr(function)(*arrays)
    return primitive.bind(*arrays, body=body, **params)
