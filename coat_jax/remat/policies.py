"""Policies of `jax.checkpoint`, which select the arrays to save as residuals."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from coat_jax.fusion.gathers import rows_p
from coat_jax.programs.graph import written_out
from coat_jax.programs.primitives import TABLE, Kind, bodies_of, is_foreign
from coat_jax.remat.trace import Linearized, linearize
from pallas_kernels import versions
from pallas_kernels.dispatch import placement

Policy = Callable[..., Any]

CHECKPOINT = "remat2"  # The name of `jax.checkpoint` in programs.
# Batched matmuls that contract at most this many elements count as attention scores.
_LARGEST_HEAD = 256
# Operations of `pallas_kernels` that are shown to policies as `dot_general`.
_MATMULS = frozenset({"matmul", "matmul_heads"})


def products_saveable(primitive: core.Primitive, *types: Any, **params: Any) -> bool:
    """Tells `jax.checkpoint` to save outputs of matmuls, kernels and barriers.

    Convolutions count as matmuls. Norms, gates and other cheap operations are
    recomputed. Matmuls with batch axes that contract 256 elements or fewer, such as
    attention scores, are recomputed, too. The matmuls of a layer's experts contract
    more elements and are saved. The saved arrays are the residuals of COAT (arXiv
    2410.19313, section 5) for matmuls that are not in FP8.

    This is a policy for `jax.checkpoint` and `coat.fp8_remat`. Unlike
    `jax.checkpoint_policies.dots_with_no_batch_dims_saveable` it saves convolutions and
    kernels such as cuDNN's flash attention, which are costly to repeat.

    Examples:
      >>> import coat_jax as coat, jax.numpy as jnp
      >>> from coat_jax.remat.policies import products_saveable
      >>> def mlp(params, x):
      ...     return jnp.tanh(jnp.sin(x @ params["up"])) @ params["down"]
      >>> params = {"up": jnp.ones((64, 256)), "down": jnp.ones((256, 64))}
      >>> light = coat.fp8_remat(mlp, policy=products_saveable)
      >>> saved = coat.residual_report(light, params, jnp.ones((128, 64))).rows
      >>> [row.shape for row in saved if row.dtype == jnp.float8_e4m3fn]
      [(128, 256), (128, 64)]
    """
    if primitive.name == "dot_general":
        (summed, _), (batch, _) = params["dimension_numbers"]
        lhs, _ = types
        return not batch or math.prod(lhs.shape[i] for i in summed) > _LARGEST_HEAD
    is_matmul = primitive.name in TABLE and TABLE[primitive.name].kind is Kind.MATMUL
    if is_matmul or primitive.name == "optimization_barrier":
        # XLA does not fuse across a barrier, so readers need the barrier's output and
        # not the matmul's.
        return True
    # Random numbers are recomputed: the operands of their kernels are keys.
    return is_foreign(primitive) and any(
        jnp.issubdtype(t.dtype, jnp.floating) for t in types
    )


def linearize_by_policy(
    fn: Callable, *args: Any, constants: int, policy: Policy
) -> Linearized:
    """Traces `jax.vjp` of `fn` under `jax.checkpoint`, as `linearize` does.

    The first `constants` arguments are not differentiated. `policy` selects the arrays
    to save.
    """

    def linearized(policy: Policy) -> Linearized:
        # Recomputation reads FP8 copies, or arrays that passed an optimization barrier.
        # XLA cannot merge it with the forward pass, so prevent_cse is not needed.
        by_policy = jax.checkpoint(fn, prevent_cse=False, policy=policy)
        return linearize(by_policy, *args, constants=constants)

    policy = _saving_maxima(policy)
    # Arrays to offload are quantized before they leave the device.
    traced = linearized(_saved_on_device(policy))
    in_bodies = _offloads_in_bodies(policy, written_out(traced.forward.jaxpr))
    return linearized(policy) if in_bodies else traced


def with_maxima_saved(program: core.Jaxpr) -> core.Jaxpr:
    """Returns a program in which policies of `jax.checkpoint` also save amaxes.

    The amaxes give the scales of FP8 codes. Policies in nested programs are replaced,
    too.
    """
    eqns = []
    for eqn in program.eqns:
        params = {name: _in_bodies(value) for name, value in eqn.params.items()}
        if eqn.primitive.name == CHECKPOINT:
            params["policy"] = _saving_maxima(params["policy"])
        is_same = all(params[name] is value for name, value in eqn.params.items())
        eqns.append(eqn if is_same else eqn.replace(params=params))
    is_same = all(new is old for new, old in zip(eqns, program.eqns, strict=True))
    return program if is_same else program.replace(eqns=eqns)


def _in_bodies(value: Any) -> Any:
    """Returns `value` with `with_maxima_saved` applied to the programs in it."""
    if isinstance(value, core.ClosedJaxpr):
        program = with_maxima_saved(value.jaxpr)
        is_same = program is value.jaxpr
        return value if is_same else core.ClosedJaxpr(program, value.consts)
    if isinstance(value, core.Jaxpr):
        return with_maxima_saved(value)
    if type(value) is tuple:  # The branches of a cond.
        values = tuple(map(_in_bodies, value))
        is_same = all(new is old for new, old in zip(values, value, strict=True))
        return value if is_same else values
    return value


def _saved_on_device(policy: Policy) -> Policy:
    """Returns a policy that saves on the device what `policy` offloads."""

    def decide(*args: Any, **params: Any) -> Any:
        decision = policy(*args, **params)
        _leaves_device(decision)  # Raises an error for unsupported kinds of memory.
        return True if versions.is_offload(decision) else decision

    return decide


def _saving_maxima(policy: Policy | None) -> Policy | None:
    """Returns a policy that also saves the amaxes from which scales are computed.

    Codes that a policy saves, and products of codes, have the scales of the forward
    pass. The amax of an FP8 copy may give another scale: scales are powers of two, and
    rounding can move an amax across a power of two. A policy that saves nothing is
    returned as it is: then all codes are computed with the scales of the copies.
    """
    if policy in (None, jax.checkpoint_policies.nothing_saveable):
        return policy

    def decide(primitive: core.Primitive, /, *types: Any, **params: Any) -> Any:
        # Amaxes are computed by comparing the bits of numbers, as integers.
        if primitive.name == "reduce_max" and types[0].dtype == jnp.uint32:
            return True
        if placement.operation_of(params) == "maxima":
            return True
        return _asked(policy, primitive, *types, **params)

    return decide


def offloads(policy: Policy | None, eqn: core.JaxprEqn) -> bool:
    """Returns whether a policy offloads the results of an operation to the host."""
    if policy is None:
        return False
    types = [v.aval for v in eqn.invars]
    return _leaves_device(_asked(policy, eqn.primitive, *types, **eqn.params))


def _asked(
    policy: Policy, primitive: core.Primitive, /, *types: Any, **params: Any
) -> Any:
    """Returns a policy's decision for an operation, shown as a primitive of `jax.lax`.

    Kernels of matmuls are shown to the policy as `dot_general` with a transposed second
    operand, and the `rows_p` of `coat_jax.fusion.gathers` is shown as `gather`.
    """
    if primitive is rows_p:
        return policy(lax.gather_p, *types, **params)
    if placement.operation_of(params) not in _MATMULS or not _are_rows(types):
        return policy(primitive, *types, **params)
    # Both operands are contracted over the last axis, or over several last axes of the
    # second operand that are together as long.
    depth = types[0].shape[-1]
    lhs, rhs = (t.update(shape=(t.size // depth, depth)) for t in types[:2])
    return policy(
        lax.dot_general_p,
        lhs,
        rhs,
        dimension_numbers=(((1,), (1,)), ((), ())),
        precision=None,
        preferred_element_type=jnp.dtype("float32"),
        out_sharding=None,
    )


def _are_rows(types: Sequence[Any]) -> bool:
    """Returns whether the first two arrays can be reshaped to rows of one length."""
    return (
        len(types) >= 2
        and min(t.ndim for t in types[:2]) >= 2
        and types[0].shape[-1] > 0
        and types[1].size % types[0].shape[-1] == 0
    )


def _offloads_in_bodies(policy: Policy, program: core.Jaxpr) -> bool:
    """Returns whether a policy offloads an array within a loop or a branch."""
    return any(
        offloads(policy, eqn) or _offloads_in_bodies(policy, body)
        for outer in program.eqns
        for body in bodies_of(outer)
        for eqn in body.eqns
    )


def _leaves_device(decision: Any) -> bool:
    """Returns whether a policy's decision is to offload, from the device to the host.

    An array that is offloaded to "device" is saved there.

    Raises:
      ValueError: If the decision names another kind of memory. `jax.checkpoint` would
        leave arrays on the device without an error.
    """
    if not versions.is_offload(decision):
        return False
    if decision.src != "device":
        raise ValueError(
            f"offload_src of a policy must be 'device', got {decision.src!r}"
        )
    if decision.dst not in ("pinned_host", "device"):
        raise ValueError(
            "offload_dst of a policy must be 'pinned_host' or 'device', got "
            f"{decision.dst!r}, for which jax.checkpoint leaves arrays on the device"
        )
    return decision.dst == "pinned_host"
