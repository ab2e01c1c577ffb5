"""Backward passes that read FP8 copies of what autodiff saved.

This module applies COAT's mixed granularity (arXiv 2410.19313, section 5.1) to any
function. The format of a residual of `jax.vjp` depends on how the forward program
computes it and which operations of the backward program read it:

  parameters among the arguments   saved by reference, never copied
  arrays computed from parameters  not saved; recomputed if that is cheap (casts,
    alone                          transposes, tables)
  large floating activations       saved in FP8 with per-group scales: groups of 16, or
                                   of up to 128 if only matmuls read the array
  arrays that follow elementwise   not saved; recomputed from the saved arrays
    from saved arrays
  all other arrays                 saved unquantized: integers, masks, per-token
                                   statistics, arrays of which backward takes the
                                   exponential or by which it divides

A norm therefore saves an FP8 copy of its input, beside its statistics. A gate whose two
inputs are slices of one matmul's output saves one copy of that output.
`coat_jax.remat.recompute` defines which arithmetic is repeated. Arithmetic that would
amplify the rounding errors of the copies is never repeated.

The paper gives the operands of matmuls one scale per tensor, because its matmuls run in
FP8. `fp8_remat` does not run matmuls in FP8, so it can use per-group scales. They need
no amax over a whole array, which several devices may share.
"""

import dataclasses
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from flax.core import lift
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.dtypes import float0
from jax.extend import core

from coat_jax.quantization.array import QuantizedArray, undifferentiated
from coat_jax.quantization.formats import E4M3, Format
from coat_jax.quantization.rounding import random_bits
from coat_jax.remat.copies import fp8_copy, read_copy
from coat_jax.remat.notes import Note
from coat_jax.remat.plan import Copy, Options, Wide, plan
from coat_jax.remat.trace import SAVED_NAME, Linearized, Residual, linearize

_CONTEXT = "fp8_remat"  # The tag of Flax's records of changes to NNX objects.


def fp8_remat[Target](
    target: Target,
    *,
    params_argnums: int | Sequence[int] = 0,
    format: Format = E4M3,
    group: int = 16,
    where: Callable[[Residual], Any] | None = None,
    policy: Callable[..., Any] | None = None,
    key: jax.Array | None = None,
) -> Target:
    """Lets the backward pass of a function or Flax module read FP8 residuals.

    The forward program is unchanged. The activations that autodiff saves take a tenth
    to a third of the bytes. The docstring of this module lists the format of each
    residual; `coat.residual_report` lists all saved arrays.

    The result works under jit, scan, vmap, shard_map, jax.checkpoint and another
    `fp8_remat`. Forward-mode differentiation and second derivatives are not supported.
    Residuals of sharded arrays are sharded in the same way. No data moves between
    devices if every device has whole groups of the last axis.

    Args:
      target: A function, a Linen or NNX module, or a Linen or NNX module class. The
        variables of a module are parameters, and the arguments of its call are
        activations. A class becomes a class of the same name. An unbound Linen module
        becomes a module with the same fields, so parameters keep their paths. A Linen
        module that is already bound, as within `nn.compact`, becomes a function. An NNX
        module shares its variables with the result. Changes that a call makes to NNX
        objects persist, except changes to their parameters.
      params_argnums: For functions, the positional arguments that are parameters. They
        are saved by reference, neither copied nor quantized. The default is the first
        argument, as in `f(params, x)`. NNX objects and values that a function closes
        over always count as parameters. Arguments that are not arrays are static.
      format: The format of the FP8 copies.
      group: The number of neighbours on the last axis that share a scale. Residuals
        that only matmuls read may have larger groups. Kernels support 16, 32, 64, 128
        and 256.
      where: Selects which of the quantizable residuals are quantized; by default all.
        It is called with a `Residual`, which has the shape, dtype, `checkpoint_name`
        and reader of the residual. The other residuals stay unquantized. A group with
        an infinity becomes NaN, so exclude additive masks, or close over them.
      policy: A policy of `jax.checkpoint`, which selects the arrays to save; the
        backward pass recomputes the others. By default the arrays that autodiff saves
        are saved. Then only elementwise arithmetic on saved arrays is recomputed: no
        matmul, no kernel, no sum over an axis. With
        `jax.checkpoint_policies.nothing_saveable` only incoming activations are saved.
      key: A key for stochastic rounding. Each number is rounded to one of its two
        neighbouring codes, and is unchanged on average. All calls of the result share
        the key. So call `fp8_remat` where there is a fresh key, as in a training step:
        `fp8_remat(model, key=key)(x)`.

    Returns:
      An object of the same kind as `target`, with the same signature.

    Raises:
      TypeError: If `target` is not one of the kinds above.
      ValueError: If an option is invalid, or if a function is called without an
        argument that `params_argnums` names.

    Example:
      >>> import coat_jax as coat, jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> mlp = nn.Sequential([nn.Dense(256), nn.gelu, nn.Dense(64)])
      >>> light = coat.fp8_remat(mlp)
      >>> params = light.init(jax.random.key(0), jnp.ones((32, 64)))
      >>> grads = jax.grad(lambda p: light.apply(p, jnp.ones((32, 64))).sum())(params)

      Save only the outputs of matmuls, and quantize those without a name or named "h":

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
        owner = getattr(target, "__self__", None)
        if isinstance(owner, nn.Module) and owner.scope is not None:
            return partial(_linen_method(target.__func__, options), owner)
        return _over_nodes(target, argnums, options)
    raise TypeError(
        "fp8_remat takes a function, a Flax module or a Flax module class, got "
        f"{target!r}"
    )


def fp8_inputs(
    fn: Callable, *, params_argnums: int | Sequence[int] = 0, format: Format = E4M3
) -> Callable:
    """Saves only the incoming activations of `fn`, in FP8, and recomputes the rest."""
    nothing = jax.checkpoint_policies.nothing_saveable
    return fp8_remat(fn, params_argnums=params_argnums, format=format, policy=nothing)


def _nnx_class(cls: type[nnx.Module], options: Options) -> type[nnx.Module]:
    call = _over_nodes(cls.__call__, (), options)

    def reduce(self, protocol=None):
        return _unpickled, (cls, options, self.__getstate__())

    members = {"__call__": call, "__reduce_ex__": reduce, "__doc__": cls.__doc__}
    members |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    # Flax makes a class a strict pytree unless told otherwise.
    is_pytree = getattr(cls, "_pytree__is_pytree", True)
    return type(cls)(cls.__name__, (cls,), members, pytree=is_pytree)


def _unpickled(
    cls: type[nnx.Module], options: Options, state: dict[str, Any]
) -> nnx.Module:
    """Returns the module that was pickled; its class has no name of its own."""
    module = object.__new__(_nnx_class(cls, options))
    module.__setstate__(state)
    return module


@dataclasses.dataclass(frozen=True)
class _Place:
    """A placeholder for the NNX object `number` among the arguments of a call."""

    number: int


def _over_nodes(fn: Callable, argnums: Sequence[int], options: Options) -> Callable:
    """Applies `fp8_remat` to a function that may change NNX objects it is called with.

    The variables of the objects are parameters. Changes to the objects are written back
    to the caller's objects: values, new variables and static attributes. The exception
    are values of `nnx.Param` variables.
    """

    @wraps(fn)
    def call(*args, **kwargs):
        if args and isinstance(args[0], nn.Module) and args[0].scope is not None:
            return _linen_method(fn, options)(*args, **kwargs)
        _check_closure(fn)
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

        def on_nodes(nodes, *args, **kwargs):
            leaves = tree.flatten_up_to((args, kwargs))
            every = [nodes[x.number] if isinstance(x, _Place) else x for x in leaves]
            args, kwargs = jax.tree.unflatten(tree, every)
            return fn(*args, **kwargs)

        numbers = itertools.count()
        places = [_Place(next(numbers)) if _is_node(x) else x for x in leaves]
        placed, kwargs = jax.tree.unflatten(tree, places)
        return _updating(on_nodes, nodes, argnums, options)(*placed, **kwargs)

    return call


def _updating(
    fn: Callable, nodes: list[Any], argnums: Sequence[int], options: Options
) -> Callable:
    """Applies `fp8_remat` to a function of NNX objects, and updates the objects."""

    @nnx.update_context(_CONTEXT)
    def call(*args, **kwargs):
        with nnx.split_context(_CONTEXT) as context:
            graph, params, rest = context.split(nodes, nnx.Param, ...)

        def pure(params, rest, *args, **kwargs):
            with nnx.merge_context(_CONTEXT, inner=True) as context:
                inner = context.merge(graph, params, rest)
            structure = nnx.graphdef(inner)
            before = {path: _value(x) for path, x in _variables(inner)}
            out = fn(inner, *args, **kwargs)
            if nnx.graphdef(inner) == structure:
                # A value that was not set is the same object.
                changed = [
                    (path, x)
                    for path, x in _variables(inner)
                    if not isinstance(x, nnx.Param) and _value(x) is not before[path]
                ]
                return out, None, nnx.from_flat_state(changed)
            with nnx.split_context(_CONTEXT) as context:
                graph_after, params_after, rest = context.split(inner, nnx.Param, ...)
            # Parameters would be copied if they were results.
            found = nnx.to_flat_state(params_after)
            new = [(path, x) for path, x in found if path not in before]
            return out, graph_after, (nnx.from_flat_state(new), rest)

        marked = (0, 1, *(n + 2 if n >= 0 else n for n in argnums))
        light = _fp8_function(pure, marked, options)
        out, graph_after, changed = light(params, rest, *args, **kwargs)
        if graph_after is not None:
            with nnx.merge_context(_CONTEXT, inner=False) as context:
                context.merge(graph_after, params, *changed)
        elif jax.tree.leaves(changed):
            nnx.update(nodes, changed)
        return out

    return call


def _variables(nodes: list[Any]) -> list[tuple[Any, Any]]:
    return list(nnx.to_flat_state(nnx.state(nodes)))


def _value(x: Any) -> Any:
    return x.get_raw_value() if isinstance(x, nnx.Variable) else x


def _check_closure(fn: Callable) -> None:
    """Raises TypeError if a function closes over a Linen module that is bound.

    Variables that the function makes of it would leak out of the trace.
    """
    for cell in getattr(fn, "__closure__", None) or ():
        value = cell.cell_contents
        if isinstance(value, nn.Module) and value.scope is not None:
            raise TypeError(
                f"fp8_remat takes no function that closes over a bound Linen module, "
                f"as {fn.__qualname__} over {type(value).__name__}: make it a method, "
                "or give it the module as its first argument"
            )


def _is_node(x: Any) -> bool:
    return isinstance(x, nnx.Pytree | nnx.Variable)


def _linen_method(fn: Callable, options: Options) -> Callable:
    """Applies `fp8_remat` to a function whose first argument is a bound module."""
    return nn.transforms.lift_transform(_lifted, fn, options=options)


def _linen_class(cls: type[nn.Module], options: Options) -> type[nn.Module]:
    light = nn.transforms.lift_transform(_lifted, cls, options=options)
    # Linen names submodules after their class, so the name keeps parameter paths.
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
    """Applies `fp8_remat` to a function of a Linen scope, with variables as parameters.

    Calls that create parameters run `fn` unwrapped.
    """

    def inner(scope_fn, repack_fn, variable_groups, rng_groups, *args, **kwargs):
        def run(variable_groups, rng_groups, *args, **kwargs):
            scope = scope_fn(variable_groups, rng_groups)
            return fn(scope, *args, **kwargs), repack_fn(scope)

        def pure(*args, **kwargs):
            # Parameters would be copied if they were results.
            out, groups = run(*args, **kwargs)
            return out, [[_without_params(x) for x in group] for group in groups]

        # Calls that create parameters are not differentiated. `nn.scan` must also see
        # that the parameters which its steps share do not depend on other values.
        scopes = jax.tree.leaves(scope_fn(variable_groups, rng_groups))
        mutable = any(scope.is_mutable_collection("params") for scope in scopes)
        found = any(x.get("params") for group in variable_groups for x in group)
        if mutable and not found:
            return run(variable_groups, rng_groups, *args, **kwargs)
        light = _fp8_function(pure, (0, 1), options)
        return light(variable_groups, rng_groups, *args, **kwargs)

    return lift.pack(
        inner, (True,), (True,), (True,), name="fp8_remat", enable_kwargs=True
    )


def _without_params(collections: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in collections.items() if name != "params"}


def _fp8_function(fn: Callable, argnums: Sequence[int], options: Options) -> Callable:
    """Applies `fp8_remat` to a function; arguments that are not arrays are static."""

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
        # Values that fn closes over become arguments, which are saved by reference.
        # They are differentiated unless they are constants.
        jaxpr, out = jax.make_jaxpr(flat_fn, return_shape=True)(*arrays)
        closed_over = sorted(jaxpr.consts, key=_is_traced)  # Constants come first.
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
    """Gives `fn`, which returns a list of arrays, a backward pass that reads FP8.

    The first argument of the result is the key of stochastic rounding, or None. The
    arguments of `fn` follow; the first `constants` of them have no gradients.
    """
    if options.policy is not None:
        # Recomputation reads FP8 copies, or arrays behind the barrier of `_after`. XLA
        # cannot merge it with the forward pass, so prevent_cse is not needed.
        fn = jax.checkpoint(fn, policy=options.policy, prevent_cse=False)

    @jax.custom_vjp
    def run(key, *args):
        return fn(*args)

    def forward(key, *args):
        traced = linearize(fn, *args, constants=constants)
        planned = plan(traced, is_param, options)
        program = traced.with_outputs([extra.var for extra in planned.extras])
        values = core.jaxpr_as_fun(program)(*args)
        outputs, given = values[: traced.num_outputs], values[traced.num_outputs :]
        own = zip(traced.residuals, planned.kept, strict=True)
        ways = [(index, *way) for index, way in enumerate(own)]
        ways += [(extra.index, extra.var, extra.copy) for extra in planned.extras]
        save = partial(_save, traced, key=key, options=options)
        saved = [
            save(number, *way, x)
            for number, (way, x) in enumerate(zip(ways, given, strict=True))
        ]
        references = [
            a if n else None for a, n in zip(args, planned.needed, strict=True)
        ]
        return outputs, (references, saved, planned)

    def backward(residuals, cotangents):
        references, saved, planned = residuals
        saved, cotangents = _after(saved, cotangents)

        def read(kept, x):
            if isinstance(kept, Copy):
                return read_copy(_scales_as_bits(x), fused=kept.fused)
            return references[kept] if isinstance(kept, int) else x

        ways = *planned.kept, *(extra.copy for extra in planned.extras)
        values = [read(kept, x) for kept, x in zip(ways, saved, strict=True)]
        recomputed = iter(planned.recompute(references, values))
        leaves = [
            next(recomputed) if kept == "recompute" else x
            for kept, x in zip(planned.kept, values, strict=False)
        ]
        gradients = jax.tree.unflatten(planned.vjp_tree, leaves)(cotangents)
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
    """Returns what is saved of `x`: residual `index`, or an extra array for it.

    `number` differs for every saved array, so that each has its own random bits.
    """
    if isinstance(kept, Copy):
        if key is not None:
            key = jax.random.fold_in(key, number)
        # If `x` was cast from bfloat16, the cast back is exact, and kernels read half
        # the bytes.
        narrow = undifferentiated(x).astype(traced.source_dtype(var))
        q = _fp8_copy(narrow, kept, key, options, traced.asked_by(index))
        return dataclasses.replace(q, dtype=x.dtype)
    if not isinstance(kept, Wide):
        return None
    if traced.is_argument(index) or traced.note(index):
        # An argument needs no tag. A nested fp8_remat has tagged its arrays already.
        return x
    with Note(f"wide, {kept.reason}", traced.asked_by(index)).scope():
        return checkpoint_name(x, SAVED_NAME)


def _fp8_copy(
    x: jax.Array, copy: Copy, key: jax.Array | None, options: Options, reader: str
) -> QuantizedArray:
    noise = None if key is None else random_bits(key, x.shape, like=x)
    groups = f"groups of {copy.granularity.size}"
    with Note(f"{options.format}, {groups}", reader).scope():
        q = fp8_copy(
            x, format=options.format, granularity=copy.granularity, noise=noise
        )
    with Note(f"scales of {groups}", reader).scope():
        return _scales_as_bits(q)


def _after(saved: Any, cotangents: Any) -> tuple[Any, Any]:
    """Puts both behind one optimization barrier.

    Without it XLA may dequantize the copies of all layers before backward starts.
    """
    leaves, tree = jax.tree.flatten((saved, cotangents))
    # A cotangent may be a Python number.
    given = [i for i, leaf in enumerate(leaves) if jnp.result_type(leaf) != float0]
    for i, leaf in zip(
        given, lax.optimization_barrier([leaves[i] for i in given]), strict=True
    ):
        leaves[i] = leaf
    return jax.tree.unflatten(tree, leaves)


_BITS = {"bfloat16": "uint16", "uint16": "bfloat16"}


def _scales_as_bits(q: QuantizedArray) -> QuantizedArray:
    """Bitcasts the scales from bfloat16 to uint16, or from uint16 to bfloat16.

    An outer `fp8_remat` saves integers exactly.
    """
    bits = lax.bitcast_convert_type(q.scale, _BITS[q.scale.dtype.name])
    return dataclasses.replace(q, scale=bits)
