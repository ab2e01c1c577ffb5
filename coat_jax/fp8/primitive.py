"""JAX primitives that stand for functions with derivative rules.

In a jaxpr a jitted function can be recognized only by its name, and other functions may
have the same name. A new primitive is unique. It is cheap to trace, because its
function is traced only when it is differentiated, mapped or compiled.
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
    """Returns a primitive that computes a differentiable function.

    Args:
      name: The name of the primitive in jaxprs.
      function_of: A function of the primitive's parameters that returns the function to
        compute. The latter takes arrays and returns a list of arrays.
      types_of: A function that returns the types of the results. It takes the types of
        the arrays as positional arguments, and the parameters as keyword arguments.
    """
    primitive = core.Primitive(name)
    primitive.multiple_results = True
    CLOSED.add(primitive)

    def computed(*arrays, body, **params):
        return function_of(**params)(*arrays)

    def types(*arrays, body, **params):
        if operations.is_explaining():  # `explain` lists kernel calls.
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
    """Binds a primitive to arrays, as one equation of the program that is traced.

    On a mesh the equation contains the jaxpr of `function`. JAX searches the jaxprs of
    equations for operations that need to know the devices before they are lowered.
    """
    body = None
    if array_types.mesh_of(arrays) is not None:
        with operations.unexplained():
            body = jax.make_jaxpr(function)(*arrays)
    return primitive.bind(*arrays, body=body, **params)
