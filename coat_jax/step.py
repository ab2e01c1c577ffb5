"""One step of Adam for a tree of parameters, whichever way each is computed.

Where the moments are as the kernel keeps them, `pallas_kernels.adam` does a leaf's
whole step. The others, together, go through `optax.scale_by_adam` in float32.
"""

import dataclasses
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Key

import pallas_kernels
from coat_jax.devices import has_kernel
from coat_jax.quantized import E4M3, PerGroup
from coat_jax.rounding import random_bits
from coat_jax.sharding import partitioned_adam
from coat_jax.state import (
    ScaleByFP8AdamState,
    dequantize_state,
    is_quantized,
    quantize_state,
)
from coat_jax.variables import boxed
from pallas_kernels import AdamScalars, Moments
from pallas_kernels.reference import adam as reference


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam's hyperparameters, as `optax.scale_by_adam` takes them."""

    b1: Array | float
    b2: Array | float
    eps: Array | float
    eps_root: Array | float
    nesterov: bool

    def transformation(self) -> optax.GradientTransformation:
        """Optax's Adam."""
        return optax.scale_by_adam(
            self.b1, self.b2, self.eps, self.eps_root, nesterov=self.nesterov
        )

    def scalars(self, count: Array) -> AdamScalars:
        """What the kernel multiplies with in step `count`, the first being 1."""
        correction = 1 / (1 - self.b1**count)
        mu_weight, grad_weight = correction, 0.0
        if self.nesterov:
            mu_weight = self.b1 / (1 - self.b1 ** optax.safe_increment(count))
            grad_weight = (1 - self.b1) * correction
        return AdamScalars(
            b1=self.b1,
            b2=self.b2,
            eps=self.eps,
            eps_root=self.eps_root,
            mu_weight=mu_weight,
            grad_weight=grad_weight,
            nu_weight=1 / (1 - self.b2**count),
            learning_rate=1.0,
            decay=0.0,
        )


class Target(NamedTuple):
    """What an update is applied to: p - learning_rate * (update + decay * p).

    Attributes:
      param: The parameter.
      learning_rate: The factor of the whole step.
      decay: The weight decay.
      key: What the stochastic rounding of a bfloat16 parameter draws from; None rounds
        to nearest.
    """

    param: Array
    learning_rate: Array | float
    decay: Array | float
    key: Key[Array, ""] | None

    @classmethod
    def of(cls, param, learning_rate, decay, key):
        """Keeps the key only where something is rounded."""
        param = jnp.asarray(param)
        key = key if param.dtype == jnp.bfloat16 else None
        return cls(param, learning_rate, decay, key)

    def applied(self, update: Array) -> Array:
        """The parameter after an update in float32."""
        p = self.param.astype(jnp.float32)
        p = p - self.learning_rate * (update + self.decay * p)
        if self.key is None:
            return p.astype(self.param.dtype)
        noise = random_bits(self.key, p.shape, like=self.param)
        return reference.stochastic_bfloat16(p[..., None], noise)[..., 0]


def rounding_key(key: Key[Array, ""], count: Array, path: tuple) -> Key[Array, ""]:
    """The key of one parameter in one step, by its place in the tree."""
    name = zlib.crc32(jax.tree_util.keystr(path).encode())
    return jax.random.fold_in(jax.random.fold_in(key, count), name)


def adam_step(
    adam: Adam, grads: Any, state: ScaleByFP8AdamState, targets: Any = None
) -> tuple[Any, ScaleByFP8AdamState]:
    """One step for all leaves of `grads`.

    Args:
      adam: The hyperparameters.
      grads: Gradients.
      state: The state before the step.
      targets: A tree of a `Target` for each gradient, or None.

    Returns:
      The parameters after the step, or without targets the updates in the gradients'
      dtypes; and the state after it.
    """
    if not isinstance(state, ScaleByFP8AdamState):
        kind = type(state).__name__
        raise ValueError(
            f"the state must be one of fp8_adamw, got {kind}; see coat.from_optax_state"
        )
    given = grads
    grads, state, targets = nnx.as_pure(grads), nnx.as_pure(state), nnx.as_pure(targets)
    leaves, treedef = jax.tree.flatten(grads)
    mus, nus = treedef.flatten_up_to(state.mu), treedef.flatten_up_to(state.nu)
    to = [None] * len(leaves) if targets is None else treedef.flatten_up_to(targets)
    _check_shapes(grads, mus, nus, to)
    fits = [_fits(*leaf) for leaf in zip(leaves, mus, nus, to, strict=True)]
    rest = [j for j, fit in enumerate(fits) if not fit]

    def pick(xs):
        return [xs[j] for j in rest]

    part = state._replace(mu=pick(mus), nu=pick(nus))
    results, after = _step_by_optax(adam, pick(leaves), part, pick(to))
    scalars = adam.scalars(after.count) if any(fits) else None
    done = dict(zip(rest, zip(results, after.mu, after.nu, strict=True), strict=True))
    for j in range(len(leaves)):
        if fits[j]:
            done[j] = _step_by_kernel(scalars, leaves[j], mus[j], nus[j], to[j])
    columns = [
        treedef.unflatten(done[j][i] for j in range(len(leaves))) for i in (0, 1, 2)
    ]
    results, mu, nu = (boxed(column, given) for column in columns)
    return results, after._replace(mu=mu, nu=nu)


def _check_shapes(grads: Any, *others: list) -> None:
    """Raises ValueError unless moments and parameters have their gradients' shapes."""
    paths = jax.tree_util.tree_leaves_with_path(grads)
    for (path, grad), mu, nu, target in zip(paths, *others, strict=True):
        arrays = {"first moment": mu, "second moment": nu}
        if target is not None:
            arrays["parameter"] = target.param
        for name, x in arrays.items():
            if jnp.shape(grad) != x.shape:
                raise ValueError(
                    f"the gradient{jax.tree_util.keystr(path)} must have the shape "
                    f"{x.shape} of its {name}, got {jnp.shape(grad)}"
                )


def _fits(grad: Array, mu: Any, nu: Any, target: Target | None) -> bool:
    """Whether the kernel does this leaf; updates alone it does only where it is one."""
    if not is_quantized(mu) or (target is None and not has_kernel()):
        return False
    arrays = [grad] if target is None else [grad, target.param]
    return (
        mu.format == nu.format == E4M3
        and mu.granularity == nu.granularity == PerGroup(reference.GROUP)
        and mu.power == E4M3.power  # 1 where each group has its own.
        and all(x.dtype in (jnp.bfloat16, jnp.float32) for x in arrays)
    )


def _step_by_optax(adam: Adam, grads: list, state: ScaleByFP8AdamState, to: list):
    wide = [g.astype(jnp.float32) for g in grads]
    updates, after = adam.transformation().update(wide, dequantize_state(state))
    results = [
        u.astype(g.dtype) if target is None else target.applied(u)
        for u, g, target in zip(updates, grads, to, strict=True)
    ]
    return results, quantize_state(after, like=state)


def _step_by_kernel(scalars: AdamScalars, grad: Array, mu, nu, target: Target | None):
    moments = Moments(mu.codes, mu.scale, nu.codes, nu.scale, nu.exponent)
    param = noise = None
    if target is not None:
        param = target.param
        scalars = scalars._replace(
            learning_rate=target.learning_rate, decay=target.decay
        )
        if target.key is not None:
            noise = random_bits(target.key, mu.scale.shape, like=mu.scale)
    several = has_kernel() and jax.device_count() > 1
    step = partitioned_adam if several else pallas_kernels.adam
    result, after = step(scalars, grad, moments, param, noise)
    mu = dataclasses.replace(mu, codes=after.mu, scale=after.mu_scale)
    nu = dataclasses.replace(
        nu, codes=after.nu, scale=after.nu_scale, exponent=after.nu_exponent
    )
    return result, mu, nu
