"""Adam's step for a tree of parameters.

If a leaf's moments are stored as the kernel takes them, `pallas_kernels.adam` computes
the whole step. All other leaves go together through `optax.scale_by_adam` in float32.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.tree_util import keystr
from jax.typing import DTypeLike
from jaxtyping import Array, Int, UInt32

import pallas_kernels
from coat_jax.meshes import on_explicit_mesh
from coat_jax.optimizers.batch import batches, join, part, starts
from coat_jax.optimizers.blocks import adam_in_blocks, has_blocks
from coat_jax.optimizers.codec import dequantized, quantized
from coat_jax.optimizers.noise import (
    random_bits,
    random_words,
    random_words_of_batch,
    seed_of,
    stream_of,
)
from coat_jax.optimizers.sharding import on_mesh_of
from coat_jax.optimizers.state import QuantizedState, check_gradients, next_state
from coat_jax.optimizers.trees import boxed, is_quantized, unboxed
from coat_jax.quantization.array import step_without_derivatives
from coat_jax.quantization.formats import E4M3, UE4M4
from coat_jax.quantization.granularity import PerGroup
from pallas_kernels import AdamScalars, Moments
from pallas_kernels.checks import WIDE
from pallas_kernels.dispatch import array_types, devices
from pallas_kernels.ops.adam import reference
from pallas_kernels.ops.adam.reference import GROUP
from pallas_kernels.rounding import hash32, stochastic_bfloat16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam's hyperparameters, the arguments of `optax.scale_by_adam`."""

    b1: Array | float
    b2: Array | float
    eps: Array | float
    eps_root: Array | float
    nesterov: bool

    def transformation(
        self, mu_dtype: DTypeLike | None = None
    ) -> optax.GradientTransformation:
        """Returns `optax.scale_by_adam` with these hyperparameters."""
        decays, epsilons = (self.b1, self.b2), (self.eps, self.eps_root)
        return optax.scale_by_adam(*decays, *epsilons, mu_dtype, nesterov=self.nesterov)

    def scalars(self, count: Array) -> AdamScalars:
        """Returns the kernel's factors in step `count`; the first step is 1."""
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
    """A parameter and its update rule: p - learning_rate * (update + decay * p).

    Attributes:
      param: The parameter.
      learning_rate: The factor of the whole step.
      decay: The weight decay.
      salt: A number for the random bits that round a bfloat16 parameter, which makes
        them differ from its moments' bits. None rounds to nearest.
    """

    param: Array
    learning_rate: Array | float
    decay: Array | float
    salt: UInt32[Array, ""] | None

    @classmethod
    def of(cls, param, learning_rate, decay, salt):
        """Returns a target; only bfloat16 parameters keep the `salt`."""
        param = jnp.asarray(param)
        salt = salt if param.dtype == jnp.bfloat16 else None
        return cls(param, learning_rate, decay, salt)

    def applied(self, update: Array, step: Array, path: tuple) -> Array:
        """Returns the parameter after a float32 update, in float32 or wider arithmetic.

        Random bits for stochastic rounding depend on the number of the step and on the
        parameter's path.
        """
        dtype = self.param.dtype
        p = self.param.astype(dtype if dtype.itemsize > 4 else jnp.float32)
        p = p - self.learning_rate * (update + self.decay * p)
        if self.salt is None:
            return p.astype(self.param.dtype)

        def rounded(p, salt, step, stream):
            words = random_words(step, stream, p.shape)
            return stochastic_bfloat16(p, random_bits(hash32(words ^ salt), p.shape))

        stream = stream_of(path, self.param)
        return on_explicit_mesh(rounded, p, p)(p, self.salt, step, stream)


class Stacks:
    """The stacks of layers that a step gets slices [1, ...] of.

    A slice is recognized by its identity as an object. If a transformation returns
    another object, the step is computed on slices.

    Args:
      layer: The index of the layer in the stacks.
      slices: The slices, a tree.
      stacks: The stacks, a tree of the same form.
    """

    def __init__(self, layer: Int[Array, ""], slices: Any, stacks: Any):
        self.layer = layer
        self._slices = jax.tree.leaves(slices)  # Keeps their ids from being used again.
        ids = map(id, self._slices)
        self._stacks = dict(zip(ids, jax.tree.leaves(stacks), strict=True))

    def of(self, slices: Any) -> Any:
        """Returns the stacks of a tree's slices; None if an array is not a slice."""
        leaves, treedef = jax.tree.flatten(slices)
        stacks = [self._stacks.get(id(x)) for x in leaves]
        return None if any(x is None for x in stacks) else treedef.unflatten(stacks)


def adam_step(
    adam: Adam,
    grads: Any,
    state: QuantizedState,
    targets: Any = None,
    stacks: Stacks | None = None,
) -> tuple[Any, QuantizedState]:
    """Computes one step for all leaves of `grads`.

    Args:
      adam: The hyperparameters.
      grads: Gradients.
      state: The state before the step.
      targets: A tree with a `Target` for each gradient, or None.
      stacks: The stacks that parameters and moments are slices of, or None.

    Returns:
      The parameters after the step, or without targets the updates in the gradients'
      dtypes; and the state after the step.
    """
    given, pure = grads, unboxed(state)
    grads, targets = unboxed(grads), unboxed(targets)
    check_gradients(grads, pure)
    grads = jax.tree.map(jnp.asarray, grads)
    leaves, treedef = jax.tree.flatten_with_path(grads)
    inner, step = pure.inner_state, pure.rounding_step
    count = optax.safe_increment(inner.count)
    scalars = adam.scalars(count)
    mus, nus = (
        [on_mesh_of(grad, x) for (_, grad), x in zip(leaves, column, strict=True)]
        for column in map(treedef.flatten_up_to, (inner.mu, inner.nu))
    )
    to = [None] * len(leaves) if targets is None else treedef.flatten_up_to(targets)
    rows = [
        _Leaf(*leaf, *rest) for leaf, *rest in zip(leaves, mus, nus, to, strict=True)
    ]
    for leaf in rows:
        _check_parameter(leaf)
    stochastic = pure.layout.rounding == "stochastic"
    done = _fused_leaves(scalars, rows, step, stacks) if stochastic else {}

    def rest(xs):
        masked = [optax.MaskedNode() if j in done else x for j, x in enumerate(xs)]
        return treedef.unflatten(masked)

    part = pure._replace(inner_state=inner._replace(mu=rest(mus), nu=rest(nus)))
    wide = rest([g.astype(jnp.float32) for _, g in leaves])
    before = dequantized(part.inner_state, pure.layout)
    updates, after = adam.transformation().update(wide, before)
    after = quantized(after, part.inner_state, pure.layout, step)
    columns = (treedef.flatten_up_to(x) for x in (updates, after.mu, after.nu))
    for j, (update, mu, nu) in enumerate(zip(*columns, strict=True)):
        if j not in done:
            path, grad = leaves[j]
            target = to[j]
            result = (
                update.astype(grad.dtype)
                if target is None
                else target.applied(update, step, path)
            )
            done[j] = result, mu, nu
    results, mu, nu = (
        treedef.unflatten(done[j][i] for j in range(len(leaves))) for i in (0, 1, 2)
    )
    inner = inner._replace(count=after.count, mu=mu, nu=nu)
    return boxed(results, given), next_state(state, inner, given)


class _Leaf(NamedTuple):
    """The gradient, the moments and the target of one parameter."""

    path: tuple
    grad: Array
    mu: Any
    nu: Any
    target: Target | None

    @property
    def fits(self) -> bool:
        """True if the kernel, or its reference, can take this leaf."""
        if not (is_quantized(self.mu) and is_quantized(self.nu)):
            return False
        arrays = [self.grad] + ([] if self.target is None else [self.target.param])
        return (
            self.mu.format == E4M3
            and self.nu.format == UE4M4
            and self.mu.granularity == self.nu.granularity == PerGroup(GROUP)
            and self.mu.power == E4M3.power  # It is 1 if each group has its k.
            and all(x.dtype in WIDE for x in arrays)
        )

    @property
    def moments(self) -> Moments:
        """The leaf's moments as the kernel takes them."""
        mu, nu = self.mu, self.nu
        return Moments(mu.codes, mu.scale, nu.codes, nu.scale, nu.exponent)

    def after(self, result: Array, after: Moments) -> tuple:
        """Returns the step's result, and new moments in the form of `mu` and `nu`."""
        mu = dataclasses.replace(self.mu, codes=after.mu, scale=after.mu_scale)
        nu = dataclasses.replace(
            self.nu, codes=after.nu, scale=after.nu_scale, exponent=after.nu_exponent
        )
        return result, mu, nu


def _check_parameter(leaf: _Leaf) -> None:
    shape = jnp.shape(leaf.grad)
    if leaf.target is not None and leaf.target.param.shape != shape:
        raise ValueError(
            f"gradient{keystr(leaf.path)} must have the shape "
            f"{leaf.target.param.shape} of its parameter, got {shape}"
        )


def _fused_leaves(
    scalars: AdamScalars, rows: list[_Leaf], step: Array, stacks: Stacks | None
) -> dict:
    """Computes the step of the leaves that the kernel, or its reference, can take.

    Returns a dict from the index of each of these leaves to `_Leaf.after` of the step.
    """

    def kind(leaf):
        if leaf.target is None:
            return leaf.grad.dtype
        decay = leaf.target.decay
        known = decay if isinstance(decay, int | float) else id(decay)
        return leaf.grad.dtype, leaf.target.param.dtype, known

    fitting = [j for j, leaf in enumerate(rows) if leaf.fits]
    fitting.sort(key=lambda j: rows[j].mu.scale.size)
    grads = step_without_derivatives([rows[j].grad for j in fitting])
    rows = [*rows]
    for j, grad in zip(fitting, grads, strict=True):
        rows[j] = rows[j]._replace(grad=grad)
    groups = [[i] for i in range(len(fitting))]
    if not devices.has_hopper():
        codes = [rows[j].mu.codes for j in fitting]
        groups = batches(codes, lambda i: kind(rows[fitting[i]]))
    done = {}
    for group in groups:
        leaves = [rows[fitting[i]] for i in group]
        factors = _with_target(scalars, leaves[0].target)
        results = (
            [_fused_leaf(factors, *leaves, step, stacks)]
            if len(leaves) == 1
            else _fused_batch(factors, leaves, step)
        )
        done |= dict(zip((fitting[i] for i in group), results, strict=True))
    return done


def _with_target(scalars: AdamScalars, target: Target | None) -> AdamScalars:
    if target is None:
        return scalars
    return scalars._replace(learning_rate=target.learning_rate, decay=target.decay)


def _fused_leaf(
    scalars: AdamScalars, leaf: _Leaf, step: Array, stacks: Stacks | None
) -> tuple:
    param = salt = layer = None
    if leaf.target is not None:
        param, salt = leaf.target.param, leaf.target.salt
    moments, codes = leaf.moments, leaf.mu.codes
    # Only the kernel reads a layer of stacks faster than slices.
    whole = stacks.of((param, moments)) if stacks and devices.has_hopper() else None
    if whole is not None:
        (param, moments), layer = whole, stacks.layer

    def stepped(scalars, grad, moments, param, salt, step, stream, layer):
        seeds = seed_of(step), stream
        if _in_blocks(grad, moments):
            floats = AdamScalars(*map(jnp.float32, scalars))
            return adam_in_blocks(floats, grad, moments, *seeds, param, salt)
        arrays = grad, moments, *seeds, param, salt
        return pallas_kernels.adam(scalars, *arrays, layer=layer)

    results = (leaf.grad if param is None else param, moments)
    stepped = on_explicit_mesh(stepped, codes, results)
    stream = stream_of(leaf.path, codes)
    arrays = leaf.grad, moments, param, salt, step, stream, layer
    return leaf.after(*stepped(scalars, *arrays))


def _in_blocks(grad: Array, moments: Moments) -> bool:
    """Returns whether the step of a leaf is computed block by block.

    A block of an array that is sharded over devices would have to be gathered.
    """
    if devices.has_hopper() or jax.sharding.get_abstract_mesh().manual_axes:
        return False
    return array_types.mesh_of((grad, moments)) is None and has_blocks(grad.shape)


def _fused_batch(scalars: AdamScalars, leaves: list[_Leaf], step: Array) -> list:
    """Computes the step of several leaves in one call of the reference."""
    moments = Moments(*zip(*(leaf.moments for leaf in leaves), strict=True))
    width = Moments(mu=GROUP, mu_scale=1, nu=GROUP, nu_scale=1, nu_exponent=1)
    groups = [leaf.mu.scale.size for leaf in leaves]
    words = random_words_of_batch(step, [leaf.path for leaf in leaves], groups)
    params = salt = None
    if leaves[0].target is not None:
        params = join([leaf.target.param for leaf in leaves], GROUP)
        salt = leaves[0].target.salt
    grads = join([leaf.grad for leaf in leaves], GROUP)
    # Without the barriers XLA would compute the whole step again for each leaf's slice.
    arguments = grads, Moments(*map(join, moments, width)), words
    arguments = lax.optimization_barrier((*arguments, params))
    results = reference.adam(scalars, *arguments, salt)
    result, after = lax.optimization_barrier(results)
    at = starts(groups)
    columns = [part(result, [leaf.grad.shape for leaf in leaves], at)]
    for x, before in zip(after, moments, strict=True):
        columns.append(part(x, [array.shape for array in before], at))
    return [
        leaf.after(result, Moments(*after))
        for leaf, result, *after in zip(leaves, *columns, strict=True)
    ]
