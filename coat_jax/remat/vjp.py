"""The custom derivative of a function whose backward pass reads FP8 residuals."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.dtypes import float0
from jax.extend import core

from coat_jax.quantization.array import QuantizedArray, undifferentiated
from coat_jax.quantization.formats import E4M3
from coat_jax.quantization.rounding import random_bits
from coat_jax.remat.copies import fp8_copy, read_copy
from coat_jax.remat.merge import merged
from coat_jax.remat.notes import Note
from coat_jax.remat.plan import Copy, Options, Wide, plan
from coat_jax.remat.trace import SAVED_NAME, Linearized, linearize
from pallas_kernels import placement
from pallas_kernels.numerics import GROUP


def fp8_function(fn: Callable, argnums: Sequence[int], options: Options) -> Callable:
    """Applies `fp8_remat` to a function; arguments that are not arrays are static."""

    @wraps(fn)
    def wrapped(*args, **kwargs):
        paths, tree = jax.tree.flatten_with_path((args, kwargs))
        leaves = [x for _, x in paths]
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
        program = jaxpr.jaxpr
        if options.rewrite is not None:
            keys = [key for (key, _), d in zip(paths, dynamic, strict=True) if d]
            program = options.rewrite(program, keys, is_param)
        program = merged(program, is_param, gates=_are_default(options))
        closed_over = sorted(jaxpr.consts, key=_is_traced)  # Constants come first.
        traced = [_is_traced(x) for x in jaxpr.consts]
        constants = traced.count(False)

        def flat(*args):
            fixed, given = iter(args[:constants]), iter(args[constants:])
            consts = [next(given if t else fixed) for t in traced]
            return core.jaxpr_as_fun(core.ClosedJaxpr(program, consts))(*given)

        is_param = [True] * len(closed_over) + is_param
        # The key is an argument: functions that JAX keeps must not hold its tracer.
        keyless = dataclasses.replace(options, key=None)
        light = _with_fp8_residuals(flat, is_param, keyless, constants)
        results = light(options.key, *closed_over, *arrays)
        return jax.tree.unflatten(jax.tree.structure(out), results)

    return wrapped


def _are_default(options: Options) -> bool:
    """Returns whether residuals are saved as kernels save the inputs of gates."""
    others = options.where, options.policy, options.key
    same = options.format == E4M3 and options.group == GROUP
    return same and all(option is None for option in others)


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
        _, values = placement.with_common_mesh((args, values))
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
                values = read_copy(_scales_as_bits(x), fused=kept.fused)
                if kept.merged:
                    values = values.reshape(*values.shape[:-1], *kept.merged)
                return values
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
    if copy.merged:
        x = x.reshape(*x.shape[: -len(copy.merged)], -1)
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
