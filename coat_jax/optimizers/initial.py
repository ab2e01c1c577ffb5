"""The first state of a transformation, with its moving averages in 8 bits."""

import itertools
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core
from jax.interpreters import partial_eval as pe
from jax.tree_util import GetAttrKey, keystr, tree_leaves_with_path

from coat_jax import serialization
from coat_jax.optimizers.codec import quantized
from coat_jax.optimizers.moment import KNOWN, SIGNED, Moment
from coat_jax.optimizers.places import Path, field_of, fields_of
from coat_jax.optimizers.sharding import nbytes, zeros_like
from coat_jax.optimizers.state import Choices, Layout, QuantizedState
from coat_jax.optimizers.trees import (
    broadcast,
    by_path,
    in_boxes,
    is_box,
    is_quantized,
    unboxed,
)
from coat_jax.programs.graph import dependences
from coat_jax.programs.primitives import Operand
from coat_jax.quantization.granularity import PerGroup

# Parameters of fewer elements have float32 moments. These are the scales of norms and
# biases, a fraction of a percent of a model and its most sensitive parameters. XLA
# computes the steps of all of them in one kernel.
MIN_QUANTIZED_SIZE = 8192


def initial_state(
    inner: optax.GradientTransformation, params: optax.Params, choices: Choices
) -> QuantizedState:
    """Returns the state of `inner` before the first step, with averages in 8 bits."""
    serialization.register()
    arrays = unboxed(params)
    for path, x in tree_leaves_with_path(arrays):
        if jnp.iscomplexobj(x):
            raise ValueError(
                f"parameters must be real, got {x.dtype} at parameter{keystr(path)}"
            )
    arrays_by_path = by_path(arrays)
    allowed = by_path(unboxed(_resolved_mask(choices.quantize_mask, params)))
    wide = jax.tree.map(_float32, arrays)
    program, abstract = jax.make_jaxpr(inner.init, return_shape=True)(wide)
    leaves, treedef = jax.tree.flatten_with_path(abstract)
    fields = dict(fields_of(abstract))
    moments = {
        path: choice
        for path, record in fields.items()
        if isinstance(choice := choices.of(record, path[-1].name), Moment)
    }
    _check_names(choices.moments, fields)
    if others := _of_other_shapes(leaves, moments, arrays_by_path, fields):
        _warn_of_shapes([f"{fields[field]}.{field[-1].name}" for field in others])
        moments = {f: moment for f, moment in moments.items() if f not in others}
    by_default = {
        field: moment
        for field, moment in moments.items()
        if field[-1].name not in choices.moments
    }
    of_ratios = _averages_of_ratios(inner, wide, abstract, by_default)
    moments |= dict.fromkeys(of_ratios, SIGNED)
    layout = Layout(tuple(moments.items()), choices.rounding)
    chosen, unknown, named = {}, set(), set()
    for path, leaf in leaves:
        field, place = field_of(path, leaf.shape, arrays_by_path, fields)
        if field not in fields or not jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        record, name = fields[field], field[-1].name
        if field in moments:
            chosen[path] = place, moments[field] if allowed[place] else None
            if name not in KNOWN.get(record, {}):
                named.add(path)
        elif choices.of(record, name) == "unknown" and allowed[place]:
            unknown.add((record, name))
    paths = [path for path, _ in leaves]
    nonzero = chosen.keys() - _zeros_at_first(inner, arrays, program, paths, chosen)
    for path in sorted(nonzero & named, key=keystr):
        raise ValueError(
            f"moments names {keystr(path)}, which does not start at zero: only moving "
            "averages can be kept in 8 bits"
        )
    _warn_of(unknown)
    wanted = [path not in chosen or path in nonzero for path in paths]
    computed = itertools.compress(paths, wanted)
    values = dict(zip(computed, _initial(program, arrays, wanted), strict=True))
    first = {path: values[path] for path in nonzero}
    dtypes = {path: leaf.dtype for path, leaf in leaves}
    zeros = _shared(zeros_like)
    wide = _not_smaller(chosen, arrays_by_path, choices.granularity, dtypes)
    for path, (place, moment) in chosen.items():
        param, dtype = arrays_by_path[place], dtypes[path]
        moment = None if place in wide else moment
        values[path] = zeros(param, moment, choices.granularity, dtype)
    state = treedef.unflatten([values[path] for path in paths])
    state = _started(state, first, layout) if first else state
    state = in_boxes(state, by_path(params, is_leaf=is_box))
    zero = jnp.zeros([], jnp.int32)
    return QuantizedState(state, zero, zero + layout.version, layout)


def _of_other_shapes(
    leaves: Sequence[tuple[Path, Any]],
    moments: Collection[Path],
    params: Mapping[Path, Any],
    fields: Mapping[Path, str],
) -> list[Path]:
    """Returns the fields that average something else than whole gradients.

    The averages of `optax.contrib.galore`, for example, are of projected gradients.

    Args:
      leaves: The arrays of the state, with their paths.
      moments: The paths of the fields to look at.
      params: The parameters by their paths.
      fields: The state's `fields_of`, as a dict.
    """
    # A field within an average is a part of the parameters' container.
    strange = {
        path
        for path, leaf in leaves
        if field_of(path, leaf.shape, params, fields)[0] is None
    }
    return [f for f in moments if any(path[: len(f)] == f for path in strange)]


def _averages_of_ratios(
    inner: optax.GradientTransformation,
    params: Any,
    state: Any,
    moments: Mapping[Path, Moment],
) -> list[Path]:
    """Returns the fields with an average that reads the second moment in a step.

    A first moment is stored divided by the root of a second one, because it averages
    gradients. ADOPT has Adam's state, but averages gradients that it has divided.

    Args:
      inner: The transformation.
      params: The parameters, in float32.
      state: The types of the transformation's state.
      moments: The storage of each field to look at, by its path.
    """
    roots = {
        field: (*field[:-1], GetAttrKey(moment.over_root_of))
        for field, moment in moments.items()
        if moment.over_root_of is not None
    }
    if not roots:
        return []
    arguments = params, state, params
    try:
        step = jax.make_jaxpr(inner.update, return_shape=True)
        program, after = step(*arguments)
    except Exception:  # A step may need arguments that only the caller has.
        return []

    def is_in(key, field):
        return key[0].idx == 1 and key[1 : len(field) + 1] == field

    keys, results = (
        [key for key, _ in tree_leaves_with_path(tree)] for tree in (arguments, after)
    )
    reads = dependences(program.jaxpr, [frozenset({i}) for i in range(len(keys))])
    of_ratios = []
    for field, root in roots.items():
        pairs = zip(results, reads, strict=True)
        read = {i for key, indices in pairs if is_in(key, field) for i in indices}
        if any(is_in(keys[i], root) for i in read):
            of_ratios.append(field)
    return of_ratios


def _not_smaller(
    chosen: Mapping[Path, tuple[Path, Moment | None]],
    params: Mapping[Path, Any],
    granularity: PerGroup,
    dtypes: Mapping[Path, np.dtype],
) -> set[Path]:
    """Returns the paths of parameters with moments that 8 bits would not make smaller.

    If the last axis has one element, for example, there is a scale for each code.

    Args:
      chosen: The path of the parameter and the storage, None for float32, of each
        average, by the average's path in the state.
      params: The parameters by their paths.
      granularity: The groups of elements that share a scale.
      dtypes: The dtype of each array of the unquantized state, by its path.
    """
    saved_bytes: dict[Path, int] = defaultdict(int)
    for path, (place, moment) in chosen.items():
        shape = jnp.shape(params[place])
        saved_bytes[place] += math.prod(shape) * dtypes[path].itemsize
        if moment is not None:
            saved_bytes[place] -= nbytes(moment, granularity, shape)
    return {place for place, saved in saved_bytes.items() if saved <= 0}


def _shared(zeros: Callable) -> Callable:
    """Wraps `zeros` to return the same arrays for all parameters of one type.

    Arrays are shared only if parameters are tracers, that is under jit. XLA then
    compiles zeros once for each type, and each result still has its own memory.
    """
    known: dict[Any, Any] = {}

    def of(param, *others):
        if not isinstance(param, jax.core.Tracer):
            return zeros(param, *others)
        key = jax.typeof(param), *others
        if key not in known:
            known[key] = zeros(param, *others)
        return known[key]

    return of


def _float32(x: Any) -> Any:
    """Returns the type of a float32 array with a parameter's shape and sharding."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, jnp.float32)
    return jax.typeof(x).update(dtype=jnp.dtype(jnp.float32), weak_type=False)


def _check_names(moments: Mapping, fields: dict[Path, str]) -> None:
    """Raises ValueError unless the state has a field of every name in `moments`."""
    names = {path[-1].name for path in fields}
    for field in moments:
        if field not in names:
            raise ValueError(
                f"moments names the field {field!r}, but the state has {sorted(names)}"
            )


def _zeros_at_first(
    inner: optax.GradientTransformation,
    params: Any,
    program: core.ClosedJaxpr,
    paths: Sequence[Path],
    chosen: Collection[Path],
) -> set[Path]:
    """Returns the paths of a state's arrays that are zero before the first step.

    Arrays that are not `chosen` may be missing.

    Args:
      inner: The transformation.
      params: The parameters.
      program: The program of `inner.init`.
      paths: The paths of its results, in their order.
      chosen: The paths to look at.
    """
    zeros = {
        v
        for eqn in program.jaxpr.eqns
        if eqn.primitive.name == "broadcast_in_dim" and _is_zero(eqn.invars[0])
        for v in eqn.outvars
    }
    results = program.jaxpr.outvars
    sure = {
        path
        for path, v in zip(paths, results, strict=True)
        if (_is_zero(v) if isinstance(v, core.Literal) else v in zeros)
    }
    if sure.issuperset(chosen):
        return sure
    with jax.ensure_compile_time_eval():
        small = jax.tree.map(lambda p: jnp.ones((1,) * np.ndim(p)), params)
        values = by_path(inner.init(small))
        return {path for path in paths if not jnp.any(values[path])}


def _is_zero(v: Operand) -> bool:
    return isinstance(v, core.Literal) and np.ndim(v.val) == 0 and v.val == 0


def _started(state: Any, values: Mapping[Path, Any], layout: Layout) -> Any:
    """Replaces the averages at some paths of a state of zeros by float32 values."""
    leaves, treedef = jax.tree.flatten_with_path(state, is_leaf=is_quantized)
    wide = [
        values.get(path, jnp.zeros(x.shape) if is_quantized(x) else x)
        for path, x in leaves
    ]
    new = quantized(treedef.unflatten(wide), state, layout)
    pairs = zip(leaves, treedef.flatten_up_to(new), strict=True)
    return treedef.unflatten(
        jax.tree.map(_placed_like, x, zero) if path in values else zero
        for (path, zero), x in pairs
    )


def _placed_like(x: Any, zero: Any) -> Any:
    """Returns an array on the devices of another one."""
    is_traced = isinstance(zero, jax.core.Tracer) or isinstance(x, jax.core.Tracer)
    return x if is_traced else jax.device_put(x, zero.sharding)


def _warn_of(unknown: set[tuple[str, str]]) -> None:
    """Warns about fields that may be averages, but are not quantized.

    `unknown` has the type name of the named tuple and the name of each field.
    """
    if not unknown:
        return
    names = ", ".join(f"{record}.{field}" for record, field in sorted(unknown))
    fields = sorted({field for _, field in unknown})
    warnings.warn(
        f"{names} has the parameters' shapes, and is not known to be a moving average: "
        f"it stays as it is. Name what it is, moments={{{fields[0]!r}: "
        f"coat.Moment(...)}}, or None if it is none",
        stacklevel=4,
    )


def _warn_of_shapes(names: Sequence[str]) -> None:
    """Warns about known averages, which are not quantized for their shapes."""
    warnings.warn(
        f"shapes of {', '.join(names)} are not the parameters', as for averages of "
        "projected or flattened gradients, so that they stay as they are. Quantize the "
        "state of the transformation that averages, as in optax.contrib."
        "scale_by_galore(base_optimizer=coat.with_quantized_state(optax.scale_by_adam()"
        "))",
        stacklevel=4,
    )


def _initial(
    program: core.ClosedJaxpr, params: Any, wanted: Sequence[bool]
) -> list[Any]:
    """Computes only those results of `inner.init` for which `wanted` is true."""
    pruned, used = pe.dce_jaxpr(program.jaxpr, wanted)
    fn = core.jaxpr_as_fun(core.ClosedJaxpr(pruned, program.consts))
    given = [x for x, u in zip(jax.tree.leaves(params), used, strict=True) if u]

    def run(given):
        return fn(*(jnp.asarray(x, jnp.float32) for x in given))

    # Abstract parameters have no values, and are replaced by zeros.
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in given):
        return jax.jit(lambda: run([jnp.zeros(x.shape) for x in given]))()
    return jax.jit(run)(given)


def _resolved_mask(mask: Any, params: optax.Params) -> Any:
    """Returns a tree of bools: whether the mask and a parameter's size allow 8 bits."""
    mask = True if mask is None else mask(params) if callable(mask) else mask
    for path, allowed in tree_leaves_with_path(mask):
        dtype = getattr(allowed, "dtype", type(allowed))
        if dtype not in (bool, np.bool_) or np.shape(allowed):
            raise ValueError(
                f"quantize_mask{keystr(path)} must be a bool, got {allowed!r}"
            )
    return jax.tree.map(
        lambda allowed, p: bool(allowed) and np.size(p) >= MIN_QUANTIZED_SIZE,
        broadcast(mask, params, name="quantize_mask"),
        params,
    )
