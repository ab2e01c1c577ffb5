"""Any optax transformation, with the moving averages of its state in 8 bits."""

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.tree_util import GetAttrKey, keystr, tree_leaves_with_path
from jaxtyping import Array

from coat_jax.optimizers.moment import KNOWN, Moment
from coat_jax.optimizers.noise import on_explicit_mesh, random_bits, random_words
from coat_jax.optimizers.sharding import zeros_like
from coat_jax.optimizers.trees import boxed, is_quantized, is_variable
from coat_jax.quantized import PerGroup, QuantizedArray, quantize_moment
from pallas_kernels.reference.adam import LARGEST_NU
from pallas_kernels.reference.quantize import TINY

# Below this many elements a parameter's moments stay in float32: together such
# parameters, norms and biases, are a fraction of a percent of a model, and they are its
# most sensitive. XLA does the steps of all of them in one kernel.
MIN_QUANTIZED_SIZE = 8192
# The version of `QuantizedState`. The states of version 0 had BF16 scales.
VERSION = 1
Rounding = Literal["stochastic", "nearest"]
Path = tuple[Any, ...]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Layout:
    """How the fields of a state are kept; a leafless part of it.

    Attributes:
      moments: The paths of the fields with quantized averages, and how these are kept.
      rounding: How codes are rounded.
    """

    moments: tuple[tuple[Path, Moment], ...]
    rounding: Rounding

    def split(self, path: Path) -> tuple[Path, Moment | None, Path]:
        """Cuts a leaf's path into its field's, how that is kept, and the parameter's.

        The latter two are None and empty where the leaf is in no field of averages.
        """
        moments = dict(self.moments)
        for end in range(1, len(path) + 1):
            if path[:end] in moments:
                return path[:end], moments[path[:end]], path[end:]
        return path, None, ()

    def second_moment(self, path: Path) -> Path | None:
        """Where the second moment is over whose root the leaf at `path` is stored."""
        field, moment, place = self.split(path)
        if moment is None or moment.over_root_of is None:
            return None
        return (*field[:-1], GetAttrKey(moment.over_root_of), *place)


class QuantizedState(NamedTuple):
    """State of `with_quantized_state`; `state.mu` is short for `inner_state.mu`.

    Attributes:
      inner_state: The state of the inner transformation, in which averages are
        `QuantizedArray`s, or float32 arrays where they are small or masked out.
      rounding_step: The number of updates so far, int32, on which the random bits of
        the rounding depend.
      version: The version of this form, int32.
      layout: What the fields hold.
    """

    inner_state: Any
    rounding_step: chex.Array
    version: chex.Array
    layout: Layout

    @property
    def count(self) -> Any:
        """The inner transformation's, as of any of its fields; tuples have another."""
        return self.inner_state.count

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.inner_state, name)


def with_quantized_state(
    inner: optax.GradientTransformation,
    *,
    moments: Mapping[str, Moment | None] | None = None,
    quantize_mask: Any | Callable[[optax.Params], Any] | None = None,
    granularity: PerGroup = PerGroup(128),
    rounding: Rounding = "stochastic",
) -> optax.GradientTransformationExtraArgs:
    """Keeps the moving averages of any optax transformation in 8 bits.

    Each step reads the averages as float32, does what `inner` does, and stores them
    quantized: 1.04 bytes an element for each instead of 4. What is an average, and how
    it is stored, is known of optax's own transformations (Adam, AdamW, Lion, Muon, SGD
    with momentum, RMSProp, AdaBelief, AdEMAMix, Adan, LAMB and what wraps them); of
    others the fields are named. Counts, keys and copies of parameters are left alone.

    An average of n steps follows the one that float32 would hold. Its codes are rounded
    stochastically, by bits that are a function of the step, the parameter's path and
    the element: nothing stalls, however little a step moves, and each rounding is right
    on average. The bits are the same on every sharding under jit, and a resumed run
    repeats them. Within `shard_map` they depend on the place within the shard.

    Args:
      inner: Any transformation whose state keeps the parameters' structure.
      moments: A `coat.Moment` for each field of the state, by the field's name, that
        is to be quantized otherwise than is known; None leaves a field alone.
      quantize_mask: A tree of bools with the structure of the parameters (or a prefix
        of it), or a function from parameters to such a tree; False keeps a parameter's
        moments in float32. None quantizes those of 8,192 elements or more.
      granularity: Groups along the last axis that share a scale and an exponent.
      rounding: "stochastic", or "nearest" as COAT has it (arXiv 2410.19313), with
        which averages of 100 steps or more stall.

    Returns:
      A transformation whose state is a `QuantizedState`, whose updates have the
      gradients' dtypes.

    Raises:
      ValueError: If an option is none, `moments` names no field of the state, or one
        that does not start at zero. `init` raises it for complex parameters, `update`
        for gradients that are not floating or of another shape than their moments.

    Warns:
      UserWarning: If a field of the state has the parameters' shapes, and it is neither
        known nor named what it is: it stays as it is.

    Example:
      >>> import coat_jax as coat, jax.numpy as jnp, optax
      >>> tx = coat.with_quantized_state(optax.lion(1e-4))
      >>> params = {"w": jnp.ones((64, 128))}
      >>> state = tx.init(params)
      >>> optax.tree.get(state, "mu")["w"].codes.dtype
      dtype(float8_e4m3fn)
      >>> updates, state = tx.update(params, state, params)
    """
    if not isinstance(granularity, PerGroup):
        raise ValueError(f"granularity must be coat.PerGroup(g), got {granularity}")
    if rounding not in ("stochastic", "nearest"):
        raise ValueError(
            f"rounding must be 'stochastic' or 'nearest', got {rounding!r}"
        )
    for field, moment in (moments or {}).items():
        if not isinstance(moment, Moment | None):
            raise ValueError(
                f"moments[{field!r}] must be a coat.Moment or None, got {moment!r}"
            )
    inner = optax.with_extra_args_support(inner)

    def init_fn(params):
        chosen = _Choices(moments or {}, quantize_mask, granularity, rounding)
        return _init(inner, params, chosen)

    def update_fn(updates, state, params=None, **extra_args):
        check_state(state)
        given = updates
        updates, state, params = map(nnx.as_pure, (updates, state, params))
        check_gradients(updates, state)
        wide = jax.tree.map(lambda g: g.astype(jnp.float32), updates)
        before = dequantized(state.inner_state, state.layout)
        results, after = inner.update(wide, before, params, **extra_args)
        results = jax.tree.map(lambda u, g: u.astype(g.dtype), results, updates)
        after = quantized(after, state.inner_state, state.layout, state.rounding_step)
        return boxed(results, given), next_state(state, after, given)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def next_state(state: QuantizedState, inner_state: Any, given: Any) -> QuantizedState:
    """The state after a step; its averages are variables where gradients are."""
    boxes = _by_path(given, is_leaf=is_variable)
    inner_state = _box(inner_state, boxes)
    step = state.rounding_step + 1
    return state._replace(inner_state=inner_state, rounding_step=step)


def check_state(state: Any) -> None:
    """Raises ValueError unless `state` is a `QuantizedState` of this version."""
    if not isinstance(state, QuantizedState):
        kind = type(state).__name__
        raise ValueError(
            f"the state must be a coat.QuantizedState, got {kind}. Go on from a state "
            "of optax with coat.from_optax_state(state, tx.init(params)), and from a "
            "ScaleByFP8AdamState, which earlier versions had, with "
            "coat.from_optax_state(coat.to_optax_state(state), tx.init(params))"
        )


def check_gradients(grads: Any, state: QuantizedState) -> None:
    """Raises ValueError unless gradients go together with the moments, by name."""
    found = _by_path(grads)
    for path, grad in found.items():
        if not jnp.issubdtype(jnp.result_type(grad), jnp.floating):
            raise ValueError(
                f"gradient{keystr(path)} must be floating, got {jnp.result_type(grad)}"
            )
    for field, path, moment in moments_of(state):
        if path not in found:
            raise ValueError(
                f"there is no gradient{keystr(path)}, but the state has its "
                f"{field[-1].name}"
            )
        if (shape := jnp.shape(found[path])) != moment.shape:
            raise ValueError(
                f"gradient{keystr(path)} must have the shape {moment.shape} of its "
                f"{field[-1].name}, got {shape}"
            )


def dequantized(inner_state: Any, layout: Layout) -> Any:
    """Returns what a state stands for, with all averages themselves in float32.

    Raises:
      ValueError: If an average is stored without range expansion, which no optimizer
        does: a checkpoint without exponents was read as one with them.
    """
    leaves, treedef = jax.tree.flatten_with_path(inner_state, is_leaf=is_quantized)
    stored = {path: leaf for path, leaf in leaves if is_quantized(leaf)}
    for path, q in stored.items():
        if q.exponent is None and q.power == 1:
            raise ValueError(
                f"the 8-bit moment {keystr(path)} of shape {q.shape} has no exponents: "
                "was its checkpoint saved with other options?"
            )
    values = {path: q.dequantize() for path, q in stored.items()}
    wide = []
    for path, leaf in leaves:
        value = values.get(path, leaf)
        second = layout.second_moment(path)
        if path in values and second is not None:
            value = value * jnp.sqrt(values[second])
        wide.append(value)
    return treedef.unflatten(wide)


def quantized(
    inner_state: Any, like: Any, layout: Layout, step: Array | None = None
) -> Any:
    """Undoes `dequantized`, with averages in 8 bits where `like` has them.

    Args:
      inner_state: A state of the inner transformation, in float32.
      like: The same with quantized averages, of which values do not matter.
      layout: What the fields hold.
      step: The number of the step, by which codes are rounded stochastically if the
        layout says so; None rounds to nearest.
    """
    leaves, treedef = jax.tree.flatten_with_path(like, is_leaf=is_quantized)
    wide = treedef.flatten_up_to(inner_state)
    values = {path: x for (path, _), x in zip(leaves, wide, strict=True)}
    stored = []
    for path, q in leaves:
        x = values[path]
        if not is_quantized(q):
            same = hasattr(q, "dtype") and hasattr(x, "astype")
            stored.append(x.astype(q.dtype) if same else x)
            continue
        second = layout.second_moment(path)
        over = None if second is None else values[second]
        _, moment, place = layout.split(path)

        def encoded(x, over, place=place, moment=moment, q=q):
            noise = None
            if step is not None and layout.rounding == "stochastic":
                words = random_words(step, place, q.codes, q.shape)
                noise = random_bits(words, q.shape)
            return _encoded(x, over, moment, q.granularity, noise)

        stored.append(on_explicit_mesh(encoded, q.codes, q)(x, over))
    return treedef.unflatten(stored)


def _encoded(
    x: Array,
    over: Array | None,
    moment: Moment,
    granularity: PerGroup,
    noise: Array | None,
) -> QuantizedArray:
    """An average, in float32, as its moment is stored."""
    x = x.astype(jnp.float32)
    if over is not None:
        # Where the second moment overflowed updates are zero, as in optax.
        finite = over <= jnp.finfo(jnp.float32).max
        root = jax.lax.rsqrt(jnp.maximum(over.astype(jnp.float32), TINY))
        x = x * jnp.where(finite, root, 0.0)
    elif moment.squares:
        x = jnp.minimum(x, LARGEST_NU)  # An infinite one would spoil its group.
    return quantize_moment(
        x,
        format=moment.format,
        granularity=granularity,
        power=moment.power,
        noise=noise,
    )


def moments_of(state: QuantizedState) -> Iterator[tuple[Path, Path, Any]]:
    """The field's path, the parameter's path and the average, of all averages."""
    leaves = tree_leaves_with_path(state.inner_state, is_leaf=is_quantized)
    for path, leaf in leaves:
        field, moment, place = state.layout.split(path)
        if moment is not None:
            yield field, place, leaf


def _by_path(tree: Any, is_leaf: Callable | None = None) -> dict[Path, Any]:
    return dict(tree_leaves_with_path(tree, is_leaf=is_leaf))


def _box(inner_state: Any, boxes: dict[Path, Any]) -> Any:
    """Puts arrays of a parameter into variables where the parameter is one."""
    if not any(map(is_variable, boxes.values())):
        return inner_state
    leaves, treedef = jax.tree.flatten_with_path(inner_state, is_leaf=is_quantized)

    def box(path, leaf):
        for start in range(1, len(path) + 1):
            found = boxes.get(path[start:])
            if is_variable(found) and jnp.shape(found.get_value()) == leaf.shape:
                return jax.tree.map(found.replace, leaf)
        return leaf

    return treedef.unflatten([box(path, leaf) for path, leaf in leaves])


# How `init` finds what is an average.


class _Choices(NamedTuple):
    """What the caller chose; see `with_quantized_state`."""

    moments: Mapping[str, Moment | None]
    quantize_mask: Any
    granularity: PerGroup
    rounding: Rounding

    def of(self, record: str, field: str) -> Moment | str | None:
        """How a field of a kind of state is kept; "unknown" where nobody says."""
        if field in self.moments:
            return self.moments[field]
        return KNOWN.get(record, {}).get(field, "unknown")


def _init(inner, params, choices: _Choices) -> QuantizedState:
    arrays = nnx.as_pure(params)
    for path, x in tree_leaves_with_path(arrays):
        if jnp.iscomplexobj(x):
            raise ValueError(
                f"parameters must be real, got {x.dtype} at parameter{keystr(path)}"
            )
    by_path = _by_path(arrays)
    allowed = _by_path(nnx.as_pure(_resolved_mask(choices.quantize_mask, params)))
    abstract = jax.eval_shape(inner.init, jax.tree.map(_float32, arrays))
    leaves, treedef = jax.tree.flatten_with_path(abstract)
    fields = dict(_fields(abstract))
    moments = {
        path: choice
        for path, record in fields.items()
        if isinstance(choice := choices.of(record, path[-1].name), Moment)
    }
    _check_names(choices.moments, fields)
    layout = Layout(tuple(moments.items()), choices.rounding)
    chosen, unknown, named = {}, set(), []
    for path, leaf in leaves:
        field, place = _field(path, leaf, by_path)
        if field is None or field not in fields:
            continue
        record, name = fields[field], field[-1].name
        if field in moments:
            chosen[path] = place, moments[field] if allowed[place] else None
            named += [path] if name not in KNOWN.get(record, {}) else []
        elif choices.of(record, name) == "unknown" and allowed[place]:
            unknown.add((record, name))
    _check_zero(inner, arrays, named)
    _warn_of(unknown)
    rest = [path for path, _ in leaves if path not in chosen]
    values = dict(zip(rest, _initial(inner, arrays, rest), strict=True))
    for path, (place, moment) in chosen.items():
        values[path] = zeros_like(by_path[place], moment, choices.granularity)
    state = treedef.unflatten([values[path] for path, _ in leaves])
    state = _box(state, _by_path(params, is_leaf=is_variable))
    zero = jnp.zeros([], jnp.int32)
    return QuantizedState(state, zero, zero + VERSION, layout)


def _float32(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.float32)


def _field(path: Path, leaf: Any, params: dict) -> tuple[Path | None, Path]:
    """The field of a state that a leaf is in, if the rest of its path is a parameter's.

    The longest name of a parameter comes first.
    """
    for end in range(1, len(path) + 1):
        place = path[end:]
        if isinstance(path[end - 1], GetAttrKey) and place in params:
            same = jnp.shape(params[place]) == leaf.shape
            if same and jnp.issubdtype(leaf.dtype, jnp.floating):
                return path[:end], place
    return None, ()


def _fields(tree: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """The paths of the fields of all named tuples in a tree, and the tuples' names."""
    children, _ = jax.tree.flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    for key, child in children:
        if child is not tree:
            if hasattr(tree, "_fields"):
                yield (*path, *key), type(tree).__name__
            yield from _fields(child, (*path, *key))


def _check_names(moments: Mapping, fields: dict[Path, str]) -> None:
    """Raises ValueError unless the state has a field of every name."""
    names = {path[-1].name for path in fields}
    for field in moments:
        if field not in names:
            raise ValueError(
                f"moments names the field {field!r}, but the state has {sorted(names)}"
            )


def _check_zero(inner: Any, params: Any, paths: list[Path]) -> None:
    """Raises ValueError unless averages of unknown states start at zero."""
    if not paths:
        return
    with jax.ensure_compile_time_eval():
        small = jax.tree.map(lambda p: jnp.ones((1,) * np.ndim(p)), params)
        values = _by_path(inner.init(small))
        other = [path for path in paths if jnp.any(values[path] != 0)]
    if other:
        raise ValueError(
            f"moments names {keystr(other[0])}, which does not start at zero: only "
            "moving averages can be kept in 8 bits"
        )


def _warn_of(unknown: set[tuple[str, str]]) -> None:
    """Warns of fields that may be averages and stay as they are."""
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


def _initial(inner: Any, params: Any, paths: list[Path]) -> list[Any]:
    """The initial values at these paths, without the memory that all others take."""
    known = [isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params)]

    def pick(params):
        wide = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params)
        values = _by_path(inner.init(wide))
        return [values[path] for path in paths]

    if any(known):
        return jax.jit(
            lambda: pick(jax.tree.map(lambda p: jnp.zeros(p.shape), params))
        )()
    return jax.jit(pick)(params)


def _resolved_mask(mask: Any, params: optax.Params) -> Any:
    """One bool a parameter: whether the mask allows 8 bits and the size deserves it."""
    mask = True if mask is None else mask(params) if callable(mask) else mask
    return jax.tree.map(
        lambda allowed, subtree: jax.tree.map(
            lambda p: bool(allowed) and np.size(p) >= MIN_QUANTIZED_SIZE, subtree
        ),
        mask,
        params,
    )
