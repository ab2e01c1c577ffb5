"""The custom derivative of a function: its backward pass reads FP8 residuals."""

import contextvars
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.dtypes import float0
from jax.extend import core

from coat_jax.remat.fingerprint import fingerprint
from coat_jax.remat.options import Options
from coat_jax.remat.outline import KEPT, AxisEnv, outlined
from coat_jax.remat.plan import Plan, plan
from coat_jax.remat.policies import linearize_by_policy, with_maxima_saved
from coat_jax.remat.saving import restored, saved_as
from coat_jax.remat.shapes import MIN_SIZE, TOO_SMALL
from coat_jax.remat.trace import linearize
from coat_jax.remat.ways import Wide
from pallas_kernels import versions
from pallas_kernels.checks import warn_once
from pallas_kernels.dispatch import array_types, operations

# The elements of all examples of which it matters whether they are saved in FP8.
_LARGE = 2**20
_CALLS = 256  # The most calls with programs that are kept.
Path = tuple[Any, ...]


def fp8_function(
    fn: Callable,
    argnums: Sequence[int],
    options: Options,
    path_of: Callable[[Path], Path] | None = None,
) -> Callable:
    """Returns `fn` with a backward pass that reads FP8 residuals.

    Args:
      fn: A function. Arguments that are not arrays are static.
      argnums: The positions of the arguments that are parameters.
      options: The options of `fp8_remat`.
      path_of: A function from a path in the arguments of `fn` to the path that rewrites
        see. By default both are the same.
    """
    # The key is an argument: functions that JAX keeps must not hold its tracer.
    keyless = dataclasses.replace(options, key=None)

    @wraps(fn)
    def wrapped(*args, **kwargs):
        leaves, tree = jax.tree.flatten((args, kwargs))
        call = _Call(
            fn=fn,
            arguments=(args, kwargs),
            tree=tree,
            is_array=tuple(map(is_array, leaves)),
            static=tuple(x for x in leaves if not is_array(x)),
            params=frozenset(n + len(args) if n < 0 else n for n in argnums),
            path_of=path_of,
        )
        programs = _known(call, keyless) or _Programs(keyless, False)
        return programs(call, options.key, list(filter(is_array, leaves)))

    return wrapped


def is_array(x: Any) -> bool:
    """Returns whether an argument is an array, of JAX or NumPy."""
    return isinstance(x, jax.Array | np.ndarray | np.generic)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _Call:
    """A call of a function.

    Attributes:
      fn: The function.
      arguments: Its positional arguments and its keyword arguments.
      tree: The tree structure of `arguments`.
      is_array: Whether each leaf of `arguments` is an array.
      static: The leaves that are not arrays.
      params: The positions of the arguments that are parameters.
      path_of: A function from a path in `arguments` to the path that a rewrite sees;
        None if both are the same.
    """

    fn: Callable
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    tree: Any
    is_array: tuple[bool, ...]
    static: tuple[Any, ...]
    params: frozenset[int]
    path_of: Callable[[Path], Path] | None

    def __call__(self, *arrays: Any) -> Any:
        of_arrays, of_static = iter(arrays), iter(self.static)
        leaves = [next(of_arrays if array else of_static) for array in self.is_array]
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        return self.fn(*args, **kwargs)

    def arrays(self) -> tuple[list[Path], list[bool]]:
        """Returns the path of each array, and whether it belongs to a parameter."""
        paths = [path for path, _ in jax.tree.leaves_with_path(self.arguments)]
        positional, keywords = self.tree.children()
        is_param = [
            position in self.params
            for position, argument in enumerate(positional.children())
            for _ in range(argument.num_leaves)
        ]
        is_param += [False] * keywords.num_leaves
        if self.path_of is not None:
            paths = [self.path_of(path) for path in paths]
        return (
            list(itertools.compress(paths, self.is_array)),
            list(itertools.compress(is_param, self.is_array)),
        )


def _known(call: _Call, options: Options) -> "_Programs | None":
    """Returns the programs that all calls with the fingerprint of `call` share.

    None means that the call has no fingerprint, or an option that is not hashable.
    """
    key_of_call = fingerprint(call.fn, call.static, options.where, options.policy)
    if key_of_call is None:
        return None
    # Static values in a tree structure may be equal and differ in type.
    key = key_of_call, call.tree, str(call.tree), call.is_array, call.params
    try:
        return _kept(key, options)
    except TypeError:  # An option is not hashable.
        return None


@functools.lru_cache(maxsize=_CALLS)
def _kept(key: Any, options: Options) -> "_Programs":
    del key
    return _Programs(options, True)


_current: contextvars.ContextVar[_Call] = contextvars.ContextVar("call")


def _flat_function() -> Callable:
    """Returns a new function that applies the current call to arrays."""

    def flat(*arrays):
        return _current.get()(*arrays)

    return flat


class _Programs:
    """The programs of a call, with a backward pass that reads FP8 residuals.

    Calls with the same fingerprint share an object of this class. The object keeps
    their programs, but neither functions nor arrays.
    """

    def __init__(self, options: Options, keeps: bool):
        """Starts without programs.

        Args:
          options: The options, without a key.
          keeps: Whether to keep programs for later calls.
        """
        self._options = options
        # JAX keeps the programs of this function, for as long as it exists.
        self._once = jax.jit(_flat_function()) if keeps else None
        self._shared = functools.lru_cache(maxsize=KEPT)(self._differentiable)

    def __call__(
        self, call: _Call, key: jax.Array | None, arrays: Sequence[Any]
    ) -> Any:
        token = _current.set(call)
        try:
            with operations.counted():
                jaxpr, tree = self._traced(arrays)
                make = self._shared if self._once else self._differentiable
                run = make(jaxpr)
                # Values that fn closes over become arguments, saved by reference. They
                # are differentiated unless they are constants, which come first.
                closed_over = sorted(jaxpr.consts, key=_is_traced)
                return jax.tree.unflatten(tree, run(key, *closed_over, *arrays))
        finally:
            _current.reset(token)

    def _traced(self, arrays: Sequence[Any]) -> tuple[core.ClosedJaxpr, Any]:
        """Returns the program of the call, and the tree structure of its results."""
        if self._once is not None:
            traced = self._once.trace(*arrays)
            # JAX puts tracers that a function closes over before its arguments.
            if len(traced.jaxpr.in_avals) == len(arrays) and not traced.jaxpr.consts:
                return traced.jaxpr, traced.out_tree
            self._once = None  # Arrays that a function closes over may change.
        jaxpr, out = jax.make_jaxpr(_flat_function(), return_shape=True)(*arrays)
        return jaxpr, jax.tree.structure(out)

    def _differentiable(self, jaxpr: core.ClosedJaxpr) -> Callable:
        """Returns a program as a function of a key, constants and arguments.

        The function has a backward pass that reads FP8 residuals.
        """
        program, options = jaxpr.jaxpr, self._options
        paths, is_param = _current.get().arrays()
        for rewrite in options.rewrites:
            program = rewrite(program, paths, is_param)
        program = with_maxima_saved(program)
        # The constants become arguments, since tracers among them must not be kept.
        program = versions.constants_as_arguments(program)
        traced = [_is_traced(x) for x in jaxpr.consts]
        constants = traced.count(False)

        def flat(*args):
            fixed, values = iter(args[:constants]), iter(args[constants:])
            consts = [next(values if t else fixed) for t in traced]
            return core.jaxpr_as_fun(core.ClosedJaxpr(program, ()))(*consts, *values)

        is_param = [True] * len(traced) + is_param
        outline = outlined if self._once else _as_it_is
        return _with_fp8_residuals(flat, is_param, options, constants, outline)


def _examples(x: Any) -> int:
    """Returns the number of examples over which `jax.vmap` maps an array."""
    # JAX has no public class of the tracers of `vmap`.
    if not hasattr(x, "batch_dim"):
        return 1
    mapped = isinstance(x.batch_dim, int)
    return (x.val.shape[x.batch_dim] if mapped else 1) * _examples(x.val)


def _warn_of_examples(args: Sequence[Any], saved: Sequence[Any], planned: Plan) -> None:
    """Warns if `jax.vmap` maps over many arrays that are too small for copies."""
    examples = max(map(_examples, args), default=1)
    ways = zip(planned.kept, saved, strict=False)
    small = [x for way, x in ways if isinstance(way, Wide) and way.reason == TOO_SMALL]
    elements = sum(x.size for x in small)
    if examples > 1 and elements * examples >= _LARGE:
        warn_once(
            f"fp8_remat saves {elements:,} elements for each of {examples:,} examples "
            f"under jax.vmap as they are, because copies have at least {MIN_SIZE:,} in "
            "one array. Wrap what is around the vmap, as in "
            "fp8_remat(lambda model, x: jax.vmap(model)(x))"
        )


def _warn_of_shared(args: Sequence[Any], results: Sequence[Any]) -> None:
    """Warns if examples that `jax.vmap` maps over share all results.

    Some shared results, such as the running statistics of a norm, have no gradients.
    """
    examples = max(map(_examples, args), default=1)
    floating = [x for x in results if jnp.issubdtype(x.dtype, jnp.inexact)]
    if floating and examples > 1 and all(_examples(x) == 1 for x in floating):
        warn_once(
            f"on jax {jax.__version__} the gradient of a result that all {examples:,} "
            "examples of a jax.vmap share, such as a mean over its named axis, counts "
            f"{examples:,} times under fp8_remat. Use jax 0.12 or newer, or put "
            "fp8_remat around the jax.vmap"
        )


def _as_it_is(fn: Callable) -> Callable:
    return fn


def _is_traced(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


def _with_fp8_residuals(
    fn: Callable,
    is_param: Sequence[bool],
    options: Options,
    constants: int,
    outline: Callable[[Callable], Callable],
) -> Callable:
    """Returns a function that computes `fn`, with FP8 residuals.

    The first argument of the returned function is the key of stochastic rounding, or
    None. The arguments of `fn` follow.

    Args:
      fn: A function that returns a list of arrays.
      is_param: True for each argument of `fn` that is a parameter.
      options: The options of `fp8_remat`, without a key.
      constants: The number of first arguments of `fn` that have no gradients.
      outline: A wrapper of the functions that compute the forward and the backward
        pass.
    """

    def linearized(args):
        if options.policy is None:
            return linearize(fn, *args, constants=constants)
        return linearize_by_policy(
            fn, *args, constants=constants, policy=options.policy
        )

    @jax.custom_vjp
    def run(key, *args):
        return fn(*args)

    @outline
    def forward(key, *args):
        traced = linearized(args)
        planned = plan(traced, is_param, options)
        program = traced.with_outputs([extra.var for extra in planned.extras])
        values = core.jaxpr_as_fun(program)(*args)
        _, values = array_types.with_common_mesh((args, values))
        outputs, given = values[: traced.num_outputs], values[traced.num_outputs :]
        plans = zip(traced.residuals, planned.kept, strict=True)
        ways = [(index, *way) for index, way in enumerate(plans)]
        ways += [(extra.index, extra.var, extra.way) for extra in planned.extras]
        save = partial(saved_as, traced, key=key, options=options)
        saved = []
        for number, (way, x) in enumerate(zip(ways, given, strict=True)):
            with array_types.context_of(x):
                saved.append(save(number, *way, x))
        needed = zip((*traced.forward.consts, *args), planned.needed, strict=True)
        # The caller may write to an array of NumPy before the backward pass.
        references = [
            (np.array(x) if isinstance(x, np.ndarray) else x) if is_needed else None
            for x, is_needed in needed
        ]
        return outputs, (references, saved, planned, AxisEnv.current())

    @outline
    def backward(residuals, cotangents):
        references, saved, planned, _ = residuals
        saved, cotangents = _after(saved, cotangents)

        def read(kept, x):
            return references[kept] if isinstance(kept, int) else restored(kept, x)

        ways = *planned.kept, *(extra.way for extra in planned.extras)
        values = [read(kept, x) for kept, x in zip(ways, saved, strict=True)]
        recomputed = iter(planned.recompute(references, values))
        leaves = [
            next(recomputed) if kept == "recompute" else x
            for kept, x in zip(planned.kept, values, strict=False)
        ]
        cotangents = [
            np.zeros(c.shape, float0) if isinstance(c, _Nothing) else c
            for c in cotangents
        ]
        gradients = jax.tree.unflatten(planned.vjp_tree, leaves)(cotangents)
        # Gradients of integers are no arrays that a program could return.
        return [None if g.dtype == float0 else g for g in gradients]

    def gradients_of(residuals, cotangents):
        given = [
            _Nothing(c.shape) if jnp.result_type(c) == float0 else c for c in cotangents
        ]
        *_, axes = residuals
        gradients = axes.call(backward, residuals, given)
        return None, *[None] * constants, *gradients

    def forward_of(key, *args):
        outputs, residuals = forward(key, *args)
        _, saved, planned, _ = residuals
        _warn_of_examples(args, saved, planned)
        if batching is None:
            _warn_of_shared(args, outputs)
        return outputs, residuals

    batching = versions.vjp_options()
    run.defvjp(forward_of, gradients_of, **(batching or {}))
    return run


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Nothing:
    """A placeholder for the cotangent of an integer array, which has no elements."""

    shape: tuple[int, ...]


def _after(saved: Any, cotangents: Any) -> tuple[Any, Any]:
    """Returns both trees, with `saved` only available once `cotangents` are.

    Without the optimization barrier XLA may dequantize the copies of all layers before
    the backward pass starts.
    """
    leaves, tree = jax.tree.flatten((saved, cotangents))
    return jax.tree.unflatten(tree, lax.optimization_barrier(leaves))
