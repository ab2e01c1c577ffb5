"""Backward passes that read FP8 copies of what autodiff saved.

COAT's mixed granularity (arXiv 2410.19313, section 5.1) for any function. How a
residual of `jax.vjp` is kept follows from where it comes from in the forward program
and who reads it in the backward program:

  arguments that are parameters    by reference, never copied
  what follows from those alone    not at all: recomputed (casts, transposes, tables)
  large floating activations       FP8: a scale a tensor where only matrix products
                                   read it, else a scale a group of 16
  everything else                  as it is: integers, masks, per-row statistics, what
                                   backward takes the exponential of
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from flax.core import lift
from jax import lax
from jax.dtypes import float0
from jax.extend import core
from jax.interpreters import partial_eval as pe

from coat_jax.quantized import (
    E4M3,
    Format,
    PerGroup,
    PerTensor,
    QuantizedArray,
    quantize,
)
from coat_jax.residuals import (
    FP8_SCOPE,
    PRODUCTS,
    Linearized,
    all_eqns,
    is_foreign,
    linearize,
)

# The paper's groups of activations (section 5.1), along the last axis.
_GROUP = PerGroup(16)
# A smaller residual saves less than the two operations more are worth.
_MIN_SIZE = 4096


def fp8_remat(
    target: Any, *, params_argnums: int | Sequence[int] = 0, format: Format = E4M3
) -> Any:
    """Lets the backward pass of a function or Flax module read FP8 residuals.

    The forward program is unchanged. What autodiff saves of it is kept in a third to a
    half of the bytes: see the head of this file for which residual is kept how. To
    recompute more, compose with `jax.checkpoint`: `fp8_remat(jax.checkpoint(f))` saves
    nothing but f's activations, in FP8. Works under jit, scan, vmap, shard_map and
    jax.checkpoint, and inside of itself; not under forward-mode differentiation.

    Args:
      target: A function, a Linen or NNX module, or a Linen or NNX module class. A class
        gives a class of the same name and an unbound module one of the same fields, so
        that parameters keep their paths; an NNX module shares its variables with the
        result. Variables are parameters, call arguments activations. A Linen module
        that is already part of another becomes a function.
      params_argnums: For functions, the positional arguments that are parameters: kept
        by reference, neither copied nor quantized. By default the first, as in
        `f(params, x)`. What a function closes over always counts as parameters.
        Arguments that are no arrays are static.
      format: Format of the residuals.

    Returns:
      What `target` is, with the same signature.

    Raises:
      TypeError: If `target` is none of these.

    Example:
      >>> import coat_jax as coat, jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> mlp = nn.Sequential([nn.Dense(256), nn.gelu, nn.Dense(64)])
      >>> light = coat.fp8_remat(mlp)
      >>> params = light.init(jax.random.key(0), jnp.ones((32, 64)))
      >>> grads = jax.grad(lambda p: light.apply(p, jnp.ones((32, 64))).sum())(params)
    """
    if isinstance(target, type) and issubclass(target, nnx.Module):
        return _nnx_class(target, format)
    if isinstance(target, nnx.Module):
        wrapped = object.__new__(_nnx_class(type(target), format))
        vars(wrapped).update(vars(target))
        return wrapped
    if isinstance(target, type) and issubclass(target, nn.Module):
        return _linen_class(target, format)
    if isinstance(target, nn.Module):
        return _linen_module(target, format)
    if callable(target) and not isinstance(target, type):
        return _fp8_function(target, params_argnums, format)
    raise TypeError(
        "fp8_remat takes a function, a Flax module or a Flax module class, got "
        f"{target!r}"
    )


def fp8_inputs(
    fn: Callable, *, params_argnums: int | Sequence[int] = 0, format: Format = E4M3
) -> Callable:
    """Saves nothing but the activations that go into `fn`, in FP8, and recomputes it.

    What it recomputes from differs from what it computed, so that XLA can't merge the
    two and `jax.checkpoint` need not prevent it.
    """
    recomputed = jax.checkpoint(fn, prevent_cse=False)
    return fp8_remat(recomputed, params_argnums=params_argnums, format=format)


def _nnx_class(cls: type[nnx.Module], format: Format) -> type[nnx.Module]:
    method = cls.__call__

    @wraps(method)
    def call(self, *args, **kwargs):
        graph, params, rest = nnx.split(self, nnx.Param, ...)

        def pure(params, rest, *args, **kwargs):
            module = nnx.merge(graph, params, rest)
            out = method(module, *args, **kwargs)
            return out, nnx.state(module, nnx.Not(nnx.Param))

        light = _fp8_function(pure, (0, 1), format)
        out, rest = light(params, rest, *args, **kwargs)
        nnx.update(self, rest)
        return out

    return type(cls)(cls.__name__, (cls,), {"__call__": call, "__doc__": cls.__doc__})


def _linen_class(cls: type[nn.Module], format: Format) -> type[nn.Module]:
    light = nn.transforms.lift_transform(_lifted, cls, format=format)
    # Submodules are named after their class: parameters keep their paths.
    light.__name__ = cls.__name__
    return light


def _linen_module(module: nn.Module, format: Format) -> nn.Module | Callable:
    if module.scope is not None or module.parent is not None:
        return _lifted_call(module, format)
    fields = [f.name for f in dataclasses.fields(module) if f.init]
    attributes = {name: getattr(module, name) for name in fields}
    return _linen_class(type(module), format)(**attributes)


def _lifted_call(module: nn.Module, format: Format) -> Callable:
    def apply(module, args, kwargs):
        return module(*args, **kwargs)

    def transform(fn, scopes, *args):
        return _lifted(fn, format=format)(scopes, *args)

    def call(*args, **kwargs):
        lift_direct = nn.transforms.lift_direct_transform
        return lift_direct(transform, (apply,), module, args, kwargs)

    return call


def _lifted(fn: Callable, *, format: Format) -> Callable:
    """`fp8_remat` of a function of a Linen scope; its variables are parameters."""

    def inner(scope_fn, repack_fn, variable_groups, rng_groups, *args, **kwargs):
        def pure(variable_groups, rng_groups, *args, **kwargs):
            scope = scope_fn(variable_groups, rng_groups)
            return fn(scope, *args, **kwargs), repack_fn(scope)

        light = _fp8_function(pure, (0, 1), format)
        return light(variable_groups, rng_groups, *args, **kwargs)

    return lift.pack(
        inner, (True,), (True,), (True,), name="fp8_remat", enable_kwargs=True
    )


def _fp8_function(
    fn: Callable, params_argnums: int | Sequence[int], format: Format
) -> Callable:
    """`fp8_remat` of a function; arguments that are no arrays are static."""
    argnums = (params_argnums,) if isinstance(params_argnums, int) else params_argnums

    @wraps(fn)
    def wrapped(*args, **kwargs):
        leaves, tree = jax.tree.flatten((args, kwargs))
        dynamic = [isinstance(x, jax.Array | np.ndarray | np.generic) for x in leaves]

        def flat_fn(*arrays):
            given = iter(arrays)
            every = [
                next(given) if d else x for x, d in zip(leaves, dynamic, strict=True)
            ]
            args, kwargs = jax.tree.unflatten(tree, every)
            return fn(*args, **kwargs)

        params = {n + len(args) if n < 0 else n for n in argnums}
        marks = [
            jax.tree.map(lambda _, i=i: i in params, a) for i, a in enumerate(args)
        ]
        marks = jax.tree.leaves((marks, jax.tree.map(lambda _: False, kwargs)))
        arrays = [x for x, d in zip(leaves, dynamic, strict=True) if d]
        is_param = [m for m, d in zip(marks, dynamic, strict=True) if d]
        # What fn closes over may be differentiated too: it becomes an argument.
        jaxpr, out = jax.make_jaxpr(flat_fn, return_shape=True)(*arrays)
        flat = core.jaxpr_as_fun(pe.convert_constvars_jaxpr(jaxpr))
        is_param = [True] * len(jaxpr.consts) + is_param
        results = _with_fp8_residuals(flat, is_param, format)(*jaxpr.consts, *arrays)
        return jax.tree.unflatten(jax.tree.structure(out), results)

    return wrapped


def _with_fp8_residuals(
    fn: Callable, is_param: Sequence[bool], format: Format
) -> Callable:
    """`fn` from arrays to a list of arrays, with a backward pass that reads FP8."""

    @jax.custom_vjp
    def run(*args):
        return fn(*args)

    def forward(*args):
        traced = linearize(fn, *args)
        plan = _plan(traced, is_param)
        values = core.jaxpr_as_fun(traced.forward)(*args)

        def save(index, x):
            kept = plan.kept[index]
            if isinstance(kept, PerTensor | PerGroup):
                return _fp8_copy(x, kept, format, traced.asked_by(index))
            return x if kept == "wide" else None

        saved = [save(i, x) for i, x in enumerate(values[traced.num_outputs :])]
        references = [a if n else None for a, n in zip(args, plan.needed, strict=True)]
        return values[: traced.num_outputs], (references, saved, plan)

    def backward(residuals, cotangents):
        references, saved, plan = residuals
        saved, cotangents = _after(saved, cotangents)
        recomputed = iter(plan.recompute(references))

        def restore(kept, x):
            if isinstance(kept, PerTensor | PerGroup):
                return _scales_as_bits(x).dequantize()
            if isinstance(kept, int):
                return references[kept]
            return next(recomputed) if kept == "recompute" else x

        leaves = [restore(kept, x) for kept, x in zip(plan.kept, saved, strict=True)]
        return jax.tree.unflatten(plan.vjp_tree, leaves)(cotangents)

    run.defvjp(forward, backward)
    return run


def _fp8_copy(
    x: jax.Array, granularity: PerTensor | PerGroup, format: Format, asked_by: str
) -> QuantizedArray:
    # The scopes tell profiles and `residual_report` whom the copy is for.
    with jax.named_scope(f"{FP8_SCOPE}codes for {asked_by};"):
        q = quantize(x, format=format, granularity=granularity)
    with jax.named_scope(f"{FP8_SCOPE}scales for {asked_by};"):
        return _scales_as_bits(q)


def _after(saved: Any, cotangents: Any) -> tuple[Any, Any]:
    """Ties both together, or XLA may widen every layer's copies before backward."""
    leaves, tree = jax.tree.flatten((saved, cotangents))
    given = [i for i, leaf in enumerate(leaves) if leaf.dtype != float0]
    for i, leaf in zip(
        given, lax.optimization_barrier([leaves[i] for i in given]), strict=True
    ):
        leaves[i] = leaf
    return jax.tree.unflatten(tree, leaves)


_BITS = {"bfloat16": "uint16", "float32": "uint32"}
_BITS |= {bits: dtype for dtype, bits in _BITS.items()}


def _scales_as_bits(q: QuantizedArray) -> QuantizedArray:
    """Scales as integers, which an fp8_remat around keeps exactly; and back."""
    bits = lax.bitcast_convert_type(q.scale, _BITS[q.scale.dtype.name])
    return dataclasses.replace(q, scale=bits)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Plan:
    """How every residual of a function is kept, and how it comes back.

    Attributes:
      kept: Per residual: the argument it is, "recompute", "wide", or the granularity of
        its FP8 copy.
      needed: Per argument: whether the backward pass reads it by reference.
      recompute: From the needed arguments to the residuals kept as "recompute".
      vjp_tree: Structure of the function that `jax.vjp` returns.
    """

    kept: tuple[int | Literal["recompute", "wide"] | PerTensor | PerGroup, ...]
    needed: tuple[bool, ...]
    recompute: Callable[[Sequence[Any]], Sequence[Any]]
    vjp_tree: Any


def _plan(traced: Linearized, is_param: Sequence[bool]) -> _Plan:
    jaxpr = traced.forward.jaxpr
    params = {v: i for i, v in enumerate(jaxpr.invars) if is_param[i]}
    kept: list[Any] = []
    for index, var in enumerate(traced.residuals):
        if not isinstance(var, core.Literal) and var in params:
            kept.append(params[var])
        elif _is_cheap(_restricted(traced, [index]), is_param):
            kept.append("recompute")
        else:
            kept.append(_granularity(traced, index) or "wide")
    recomputed = [i for i, how in enumerate(kept) if how == "recompute"]
    program, used = _restricted(traced, recomputed)
    return _Plan(
        kept=tuple(kept),
        needed=tuple(u or i in kept for i, u in enumerate(used)),
        recompute=lambda args: core.jaxpr_as_fun(program)(
            *[a for a, u in zip(args, used, strict=True) if u]
        ),
        vjp_tree=traced.vjp_tree,
    )


def _restricted(
    traced: Linearized, indices: Sequence[int]
) -> tuple[core.Jaxpr, list[bool]]:
    """The part of the forward program behind some residuals, and the inputs it uses."""
    wanted = [traced.num_outputs + i for i in indices]
    mask = [i in wanted for i in range(len(traced.forward.jaxpr.outvars))]
    return pe.dce_jaxpr(traced.forward.jaxpr, mask)


def _is_cheap(
    restricted: tuple[core.Jaxpr, list[bool]], is_param: Sequence[bool]
) -> bool:
    """Whether a program needs parameters only and does no work to speak of."""
    program, used = restricted
    from_params = all(p for p, u in zip(is_param, used, strict=True) if u)
    return from_params and not any(
        eqn.primitive.name in PRODUCTS | {"while"} or is_foreign(eqn)
        for eqn in all_eqns(program)
    )


def _granularity(traced: Linearized, index: int) -> PerTensor | PerGroup | None:
    """The scales of a residual's FP8 copy, or None where it has to stay wide."""
    aval = traced.residuals[index].aval
    if (
        not jnp.issubdtype(aval.dtype, jnp.floating)
        or aval.dtype.itemsize == 1
        or aval.size < _MIN_SIZE
        or aval.shape[-1] < _GROUP.size
        or traced.feeds_exponential(index)
    ):
        return None
    readers = traced.readers(index)
    if aval.dtype == jnp.float32 and any(is_foreign(eqn) for eqn in readers):
        # By convention statistics of the kernel, such as attention's log-sum-exp.
        return None
    only_products = all(eqn.primitive.name in PRODUCTS for eqn in readers)
    return PerTensor() if readers and only_products else _GROUP
