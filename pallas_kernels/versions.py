"""All that differs between the versions of JAX that the library runs on.

The definition of every operation in plain JAX runs on jax 0.9 and newer. The Pallas
kernels need features that JAX has since 0.11.2.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax._src import core as _core  # JAX has no other access to named axes.
from jax.extend import core
from jax.interpreters import partial_eval as pe

_KERNELS_SINCE = (0, 11, 2)
NO_EFFECTS = getattr(core, "no_effects", frozenset())  # Since jax 0.10.


def ragged_dot_options(out_sharding: Any) -> dict[str, Any]:
    """Returns keyword arguments of `jax.lax.ragged_dot` for its result's sharding.

    Raises:
      ValueError: If the installed JAX has no such option, and there is a sharding.
    """
    if out_sharding is None:
        return {}
    if "out_sharding" not in inspect.signature(jax.lax.ragged_dot).parameters:
        raise ValueError(
            f"out_sharding of a ragged_dot needs jax 0.11 or newer, got {out_sharding} "
            f"on jax {jax.__version__}"
        )
    return {"out_sharding": out_sharding}


def kernels_obstacle() -> str | None:
    """Returns why no kernel runs on the installed JAX, or None if kernels run."""
    if jax.__version_info__ >= _KERNELS_SINCE:
        return None
    oldest = ".".join(map(str, _KERNELS_SINCE))
    return f"the kernels need jax {oldest} or newer, got {jax.__version__}"


def bodies_in_params(params: Mapping[str, Any]) -> Iterator[core.Jaxpr]:
    """Yields the jaxprs in the parameters of an equation."""
    # `jax.extend.core` has the function since jax 0.10.
    functions = core if hasattr(core, "jaxprs_in_params") else jax.core
    return functions.jaxprs_in_params(params)


def shard_map_options(eqn: core.JaxprEqn) -> dict[str, Any]:
    """Returns the arguments of the `jax.shard_map` that an equation computes."""
    names = ("mesh", "in_specs", "out_specs", "check_vma")
    # The axes had another name before jax 0.10.
    axes = eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes"))
    return {name: eqn.params[name] for name in names} | {"axis_names": axes}


def has_effects(eqn: core.JaxprEqn) -> bool:
    """Returns whether an equation of a jaxpr has side effects.

    Collectives have none: JAX lists the mesh axes that they name as effects, but these
    do not count here.
    """
    # The class is not public.
    return any(type(e).__name__ != "NamedAxisEffect" for e in eqn.effects)


def is_dropped(result: core.Var) -> bool:
    """Returns whether a result of an equation is dropped, because nothing reads it."""
    return type(result).__name__ == "DropVar"  # A public class since jax 0.10.


def constants_as_arguments(program: core.Jaxpr) -> core.Jaxpr:
    """Returns a jaxpr that takes its former constants as its first arguments."""
    if hasattr(pe, "convert_constvars_jaxpr"):  # Since jax 0.11.
        return pe.convert_constvars_jaxpr(program)
    return program.replace(
        constvars=(),
        invars=[*program.constvars, *program.invars],
        debug_info=program.debug_info.with_unknown_names(),
    )


def is_offload(decision: Any) -> bool:
    """Returns whether a decision of a policy of `jax.checkpoint` is to offload."""
    return type(decision).__name__ == "Offloadable"  # The class is not public.


def current_trace() -> Any:
    """Returns a value that is different within each transformation of JAX."""
    # `jax.extend.core` has the function since jax 0.12.
    functions = core if hasattr(core, "get_opaque_trace_state") else jax.core
    return functions.get_opaque_trace_state(convention="coat")


def varying_axes(x: Any) -> frozenset[str]:
    """Returns the mesh axes over which an array varies within `shard_map`."""
    aval = jax.typeof(x)
    # The attribute's name was `vma` before jax 0.10.
    manual_axes = getattr(aval, "manual_axis_type", None)
    return aval.vma if manual_axes is None else manual_axes.varying


def vjp_options() -> dict[str, Any] | None:
    """Returns keyword arguments of `defvjp` for a function under `jax.vmap`.

    All examples may share a result, such as a mean over a named axis of `jax.vmap`. The
    cotangent of this result then counts once. Before jax 0.12 there is no such option,
    and the cotangent counts for every example: the result is None within such an axis.
    """
    of_devices = jax.sharding.get_abstract_mesh().manual_axes
    is_named = bool(axis_sizes().keys() - set(of_devices))
    if "generic_batching" in inspect.signature(jax.custom_vjp.defvjp).parameters:
        return {"generic_batching": is_named}
    return None if is_named else {}


def axis_sizes() -> dict[Any, int]:
    """Returns the size of each named axis within which the caller is traced."""
    return dict(_core.get_axis_env().axis_sizes)


def within_axes(sizes: list[tuple[Any, int]]) -> AbstractContextManager[None]:
    """Returns a context within named axes, which are given with their sizes."""
    return _core.extend_axis_env_nd(sizes)
