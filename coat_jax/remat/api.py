"""Backward passes that read FP8 copies of what autodiff saved.

COAT's mixed granularity (arXiv 2410.19313, section 5.1) for any function. How a
residual of `jax.vjp` is kept follows from where it comes from in the forward program
and who reads it in the backward program:

  arguments that are parameters    by reference, never copied
  what follows from those alone    not at all: recomputed (casts, transposes, tables)
  large floating activations       FP8 with a scale a group: groups of 16, or where only
                                   matrix products read it of up to 128
  what follows from what is kept   not at all: recomputed if elementwise arithmetic does
  everything else                  as it is: integers, masks, per-row statistics, what
                                   backward takes the exponential of or divides by

So a norm has a copy of its input, beside its statistics, and a gate one of what its
product returned, of which it and what it multiplies are parts.
`coat_jax.remat.recompute` says which arithmetic is repeated: none that makes the errors
of copies grow.

In the paper what products read has one scale a tensor, for FP8 products. These products
are not in FP8, and groups need no maximum over an array that devices share.
"""

import dataclasses
import itertools
import operator
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax import nnx
from flax.core import lift
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.dtypes import float0
from jax.extend import core

from coat_jax.quantization.array import E4M3, Format, QuantizedArray, undifferentiated
from coat_jax.quantization.rounding import random_bits
from coat_jax.remat.copies import fp8_copy, read_copy
from coat_jax.remat.plan import Copy, Options, Wide, plan
from coat_jax.remat.trace import FP8_SCOPE, SAVED_NAME, Linearized, Residual, linearize


def fp8_remat(
    target: Any,
    *,
    params_argnums: int | Sequence[int] = 0,
    format: Format = E4M3,
    group: int = 16,
    where: Callable[[Residual], Any] | None = None,
    policy: Callable[..., Any] | None = None,
    key: jax.Array | None = None,
) -> Any:
    """Lets the backward pass of a function or Flax module read FP8 residuals.

    The forward program is unchanged. What autodiff saves of it is kept in a tenth to a
    third of the bytes: see the head of this file for which residual is kept how, and
    `coat.residual_report` for all that is saved. Works under jit, scan, vmap,
    shard_map and jax.checkpoint, and inside of itself; not under forward-mode
    differentiation, nor differentiated twice. Residuals of sharded arrays are sharded
    alike, and nothing moves between devices where each has whole groups of the last
    axis.

    Args:
      target: A function, a Linen or NNX module, or a Linen or NNX module class. A class
        gives a class of the same name and an unbound module one of the same fields, so
        that parameters keep their paths; an NNX module shares its variables with the
        result, and what a call changes of NNX objects is kept, but for their
        parameters. Variables are parameters, call arguments activations. A Linen module
        that is already bound, as within `nn.compact`, becomes a function.
      params_argnums: For functions, the positional arguments that are parameters: kept
        by reference, neither copied nor quantized. By default the first, as in
        `f(params, x)`. What a function closes over always counts as parameters, and so
        do NNX objects. Arguments that are no arrays are static.
      format: Format of the residuals.
      group: Elements that share a scale, neighbours on the last axis; at least as many
        where only matrix products read them. Kernels take 16, 32, 64, 128 and 256.
      where: Which residuals to quantize of those that can be; by default all. It is
        called with a `Residual`: its shape, its dtype, its `checkpoint_name`, the
        operation that asks for it. The others stay wide. A group with an infinity
        becomes NaN: leave additive masks out, or close over them.
      policy: What to save, a policy of `jax.checkpoint`; the backward pass recomputes
        the rest. By default what autodiff saves, and nothing is recomputed but what
        follows elementwise from that: no product, no kernel, no sum over an axis. With
        `jax.checkpoint_policies.nothing_saveable` the activations that come in.
      key: Rounds stochastically: to one of the two codes next to a number, on average
        to the number itself. All calls of the result share the key, so wrap where there
        is a fresh one, as in a training step: `fp8_remat(model, key=key)(x)`.

    Returns:
      What `target` is, with the same signature.

    Raises:
      TypeError: If `target` is none of these.
      ValueError: If an option is not what it should be, or, where it is called, a
        function has no argument that `params_argnums` names.

    Example:
      >>> import coat_jax as coat, jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> mlp = nn.Sequential([nn.Dense(256), nn.gelu, nn.Dense(64)])
      >>> light = coat.fp8_remat(mlp)
      >>> params = light.init(jax.random.key(0), jnp.ones((32, 64)))
      >>> grads = jax.grad(lambda p: light.apply(p, jnp.ones((32, 64))).sum())(params)

      Only what the products write, and what is tagged "h" or has no name:

      >>> light = coat.fp8_remat(
      ...     mlp,
      ...     policy=jax.checkpoint_policies.dots_saveable,
      ...     where=lambda residual: residual.name in ("h", None),
      ... )
    """
    options = Options(format=format, group=group, where=where, policy=policy, key=key)
    try:
        argnums = tuple(map(operator.index, np.atleast_1d(params_argnums)))
    except (TypeError, ValueError):
        raise ValueError(
            f"params_argnums must be an int or several, got {params_argnums!r}"
        ) from None
    if isinstance(target, type) and issubclass(target, nnx.Module):
        return _nnx_class(target, options)
    if isinstance(target, nnx.Module):
        wrapped = object.__new__(_nnx_class(type(target), options))
        vars(wrapped).update(vars(target))
        return wrapped
    if isinstance(target, type) and issubclass(target, nn.Module):
        return _linen_class(target, options)
    if isinstance(target, nn.Module):
        return _linen_module(target, options)
    if callable(target) and not isinstance(target, type):
        return _over_nodes(target, argnums, options)
    raise TypeError(
        "fp8_remat takes a function, a Flax module or a Flax module class, got "
        f"{target!r}"
    )


def fp8_inputs(
    fn: Callable, *, params_argnums: int | Sequence[int] = 0, format: Format = E4M3
) -> Callable:
    """Saves nothing of `fn` but the activations that go in, in FP8; recomputes it."""
    nothing = jax.checkpoint_policies.nothing_saveable
    return fp8_remat(fn, params_argnums=params_argnums, format=format, policy=nothing)


def _nnx_class(cls: type[nnx.Module], options: Options) -> type[nnx.Module]:
    call = _over_nodes(cls.__call__, (), options)
    return type(cls)(cls.__name__, (cls,), {"__call__": call, "__doc__": cls.__doc__})


@dataclasses.dataclass(frozen=True)
class _Place:
    """Stands for one of the NNX objects among the arguments of a call."""

    number: int


def _over_nodes(fn: Callable, argnums: Sequence[int], options: Options) -> Callable:
    """`fp8_remat` of a function that may change NNX objects among its arguments.

    Their variables are parameters. Of what changes all is seen outside but parameters.
    """

    @wraps(fn)
    def call(*args, **kwargs):
        for n in argnums:
            if not -len(args) <= n < len(args) and n != 0:
                raise ValueError(
                    f"params_argnums must name positional arguments, of which there "
                    f"are {len(args)}, got {n}"
                )
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=_is_node)
        nodes = [leaf for leaf in leaves if _is_node(leaf)]
        if not nodes:
            return _fp8_function(fn, argnums, options)(*args, **kwargs)
        graph, params, rest = nnx.split(nodes, nnx.Param, ...)

        def pure(params, rest, *args, **kwargs):
            nodes = nnx.merge(graph, params, rest)
            leaves = tree.flatten_up_to((args, kwargs))
            every = [nodes[x.number] if isinstance(x, _Place) else x for x in leaves]
            args, kwargs = jax.tree.unflatten(tree, every)
            return fn(*args, **kwargs), nnx.state(nodes, nnx.Not(nnx.Param))

        numbers = itertools.count()
        places = [_Place(next(numbers)) if _is_node(x) else x for x in leaves]
        placed, kwargs = jax.tree.unflatten(tree, places)
        marked = (0, 1, *(n + 2 if n >= 0 else n for n in argnums))
        out, rest = _fp8_function(pure, marked, options)(
            params, rest, *placed, **kwargs
        )
        nnx.update(nodes, rest)
        return out

    return call


def _is_node(x: Any) -> bool:
    return isinstance(x, nnx.Pytree)


def _linen_class(cls: type[nn.Module], options: Options) -> type[nn.Module]:
    light = nn.transforms.lift_transform(_lifted, cls, options=options)
    # Submodules are named after their class: parameters keep their paths.
    light.__name__ = cls.__name__
    return light


def _linen_module(module: nn.Module, options: Options) -> nn.Module | Callable:
    if module.scope is not None:
        return _lifted_call(module, options)
    fields = [f.name for f in dataclasses.fields(module) if f.init]
    attributes = {name: getattr(module, name) for name in fields}
    return _linen_class(type(module), options)(**attributes)


def _lifted_call(module: nn.Module, options: Options) -> Callable:
    def apply(module, args, kwargs):
        return module(*args, **kwargs)

    def transform(fn, scopes, *args):
        return _lifted(fn, options=options)(scopes, *args)

    def call(*args, **kwargs):
        lift_direct = nn.transforms.lift_direct_transform
        return lift_direct(transform, (apply,), module, args, kwargs)

    return call


def _lifted(fn: Callable, *, options: Options) -> Callable:
    """`fp8_remat` of a function of a Linen scope; its variables are parameters."""

    def inner(scope_fn, repack_fn, variable_groups, rng_groups, *args, **kwargs):
        def pure(variable_groups, rng_groups, *args, **kwargs):
            scope = scope_fn(variable_groups, rng_groups)
            return fn(scope, *args, **kwargs), repack_fn(scope)

        # Where parameters are made nothing is differentiated, and `nn.scan` wants to
        # see that those it shares depend on nothing else.
        scopes = jax.tree.leaves(scope_fn(variable_groups, rng_groups))
        if any(scope.is_mutable_collection("params") for scope in scopes):
            return pure(variable_groups, rng_groups, *args, **kwargs)
        light = _fp8_function(pure, (0, 1), options)
        return light(variable_groups, rng_groups, *args, **kwargs)

    return lift.pack(
        inner, (True,), (True,), (True,), name="fp8_remat", enable_kwargs=True
    )


def _fp8_function(fn: Callable, argnums: Sequence[int], options: Options) -> Callable:
    """`fp8_remat` of a function; arguments that are no arrays are static."""

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
        # What fn closes over becomes an argument: it is differentiated unless it is a
        # constant, and is kept by reference.
        jaxpr, out = jax.make_jaxpr(flat_fn, return_shape=True)(*arrays)
        closed_over = sorted(jaxpr.consts, key=_is_traced)  # Constants first.
        traced = [_is_traced(x) for x in jaxpr.consts]
        constants = traced.count(False)

        def flat(*args):
            fixed, given = iter(args[:constants]), iter(args[constants:])
            consts = [next(given if t else fixed) for t in traced]
            return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr.jaxpr, consts))(*given)

        is_param = [True] * len(closed_over) + is_param
        light = _with_fp8_residuals(flat, is_param, options, constants)
        results = light(options.key, *closed_over, *arrays)
        return jax.tree.unflatten(jax.tree.structure(out), results)

    return wrapped


def _is_traced(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


def _with_fp8_residuals(
    fn: Callable, is_param: Sequence[bool], options: Options, constants: int
) -> Callable:
    """`fn` from arrays to a list of arrays, with a backward pass that reads FP8.

    Before its arguments the result takes the key of stochastic rounding, or None. The
    first `constants` arguments have no gradients.
    """
    if options.policy is not None:
        # What is recomputed from differs from what was computed, or comes after it
        # (`_after`): XLA can't merge the two, and need not be kept from it.
        fn = jax.checkpoint(fn, policy=options.policy, prevent_cse=False)

    @jax.custom_vjp
    def run(key, *args):
        return fn(*args)

    def forward(key, *args):
        traced = linearize(fn, *args, constants=constants)
        how = plan(traced, is_param, options)
        program = traced.with_outputs([extra.var for extra in how.extras])
        values = core.jaxpr_as_fun(program)(*args)
        outputs, given = values[: traced.num_outputs], values[traced.num_outputs :]
        own = zip(traced.residuals, how.kept, strict=True)
        ways = [(index, *way) for index, way in enumerate(own)]
        ways += [(extra.index, extra.var, extra.copy) for extra in how.extras]
        save = partial(_save, traced, key=key, options=options)
        saved = [
            save(number, *way, x)
            for number, (way, x) in enumerate(zip(ways, given, strict=True))
        ]
        references = [a if n else None for a, n in zip(args, how.needed, strict=True)]
        return outputs, (references, saved, how)

    def backward(residuals, cotangents):
        references, saved, how = residuals
        saved, cotangents = _after(saved, cotangents)

        def read(kept, x):
            if isinstance(kept, Copy):
                return read_copy(_scales_as_bits(x), fused=kept.fused)
            return references[kept] if isinstance(kept, int) else x

        ways = *how.kept, *(extra.copy for extra in how.extras)
        values = [read(kept, x) for kept, x in zip(ways, saved, strict=True)]
        recomputed = iter(how.recompute(references, values))
        leaves = [
            next(recomputed) if kept == "recompute" else x
            for kept, x in zip(how.kept, values, strict=False)
        ]
        gradients = jax.tree.unflatten(how.vjp_tree, leaves)(cotangents)
        return None, *[None] * constants, *gradients

    run.defvjp(forward, backward)
    return run


def _save(
    traced: Linearized,
    number: int,
    index: int,
    var: core.Var | core.Literal,
    kept: Any,
    x: jax.Array,
    *,
    key: jax.Array | None,
    options: Options,
) -> Any:
    """What there is between the passes of residual `index`, or of an extra for it.

    No other array has its `number`.
    """
    if isinstance(kept, Copy):
        if key is not None:
            key = jax.random.fold_in(key, number)
        # Kernels read what was widened before it was.
        narrow = undifferentiated(x).astype(traced.source_dtype(var))
        q = _fp8_copy(narrow, kept, key, options, traced.asked_by(index))
        return dataclasses.replace(q, dtype=x.dtype)
    if not isinstance(kept, Wide):
        return None
    if traced.is_argument(index) or traced.scope(index):
        return x  # As it is; or an fp8_remat within said why.
    with jax.named_scope(
        f"{FP8_SCOPE}wide, {kept.reason} for {traced.asked_by(index)};"
    ):
        return checkpoint_name(x, SAVED_NAME)


def _fp8_copy(
    x: jax.Array, how: Copy, key: jax.Array | None, options: Options, asked_by: str
) -> QuantizedArray:
    noise = None if key is None else random_bits(key, x.shape, like=x)
    size = how.granularity.size
    # The scopes tell profiles and `residual_report` whom the copy is for.
    with jax.named_scope(
        f"{FP8_SCOPE}{options.format}, groups of {size} for {asked_by};"
    ):
        q = fp8_copy(x, format=options.format, granularity=how.granularity, noise=noise)
    with jax.named_scope(f"{FP8_SCOPE}scales of groups of {size} for {asked_by};"):
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


_BITS = {"bfloat16": "uint16", "uint16": "bfloat16"}


def _scales_as_bits(q: QuantizedArray) -> QuantizedArray:
    """Scales as integers, which an fp8_remat around keeps exactly; and back."""
    bits = lax.bitcast_convert_type(q.scale, _BITS[q.scale.dtype.name])
    return dataclasses.replace(q, scale=bits)
