"""Samples of Adam's moments and gradients during a training.

Arrays here are groups, [groups, 128]: 128 neighbours on a parameter's last axis, as
`coat.fp8_adamw` groups them. A short last group is padded with zeros. No study counts
elements with a second moment of zero, so padding is not counted.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float32

import coat_jax as coat

GROUP = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class MomentSamples:
    """Adam's state after a step, for a sample of groups.

    Attributes:
      step: The number of steps done.
      loss: The training loss of the last of these steps, in nats per token.
      mu: The first moments.
      nu: The second moments.
    """

    step: int
    loss: float
    mu: Float32[np.ndarray, "groups 128"]
    nu: Float32[np.ndarray, "groups 128"]

    def sample(self, groups: int) -> "MomentSamples":
        """Returns a random sample of at most `groups` groups."""
        chosen = _choose(len(self.mu), groups)
        return dataclasses.replace(self, mu=self.mu[chosen], nu=self.nu[chosen])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capture:
    """Data of a run, captured for the studies of quantization error.

    Attributes:
      moments: Adam's state after each captured step.
      start: Adam's state before `gradients`, for the same groups.
      gradients: The gradients of consecutive steps after clipping, as the optimizer
        reads them.
      b1: The decay rate of the first moment.
      parameters: The number of parameters from which the groups were drawn. These are
        the parameters with moments that `coat.fp8_adamw` quantizes.
    """

    moments: tuple[MomentSamples, ...]
    start: MomentSamples
    gradients: Float32[np.ndarray, "steps groups 128"]
    b1: float
    parameters: int


class Sampler:
    """A function that returns the same random groups of trees like the parameters.

    Its argument can be any tree with the parameters' shapes. The groups belong to
    parameters with moments that `coat.fp8_adamw` quantizes.

    Attributes:
      parameters: The number of parameters from which the groups are drawn.
    """

    def __init__(self, params: Any, groups: int) -> None:
        state = jax.eval_shape(coat.scale_by_fp8_adam().init, params)
        moments = jax.tree.leaves(state.mu, is_leaf=_is_quantized)
        self._quantized = [_is_quantized(moment) for moment in moments]
        shapes = [m.shape for m in moments if _is_quantized(m)]
        self.parameters = sum(int(np.prod(shape)) for shape in shapes)
        counts = [int(np.prod(s[:-1])) * -(-s[-1] // GROUP) for s in shapes]
        chosen = _choose(sum(counts), groups)
        ends = np.cumsum(counts)
        parts = np.split(chosen, np.searchsorted(chosen, ends[:-1]))
        starts = ends - np.array(counts)
        self._rows = [rows - start for rows, start in zip(parts, starts, strict=True)]
        self._draw = jax.jit(self._concatenated)

    def __call__(self, tree: Any) -> Float32[np.ndarray, "groups 128"]:
        """Returns the sampled groups of `tree`, which has the parameters' shapes."""
        leaves = zip(jax.tree.leaves(tree), self._quantized, strict=True)
        return np.asarray(self._draw([leaf for leaf, quantized in leaves if quantized]))

    def moments(
        self, opt_state: optax.OptState, step: int, loss: float
    ) -> MomentSamples:
        """Returns the sampled groups of the moments in an optimizer's state."""
        mu, nu = (optax.tree.get(opt_state, name) for name in ("mu", "nu"))
        return MomentSamples(step=step, loss=loss, mu=self(mu), nu=self(nu))

    def _concatenated(self, leaves: list[Array]) -> Float32[Array, "groups 128"]:
        pairs = zip(leaves, self._rows, strict=True)
        return jnp.concatenate([_groups(leaf)[rows] for leaf, rows in pairs])


def _is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, coat.QuantizedArray)


def _groups(x: Float32[Array, "..."]) -> Float32[Array, "groups 128"]:
    """Returns the last axis split into groups of 128, padded with zeros."""
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % GROUP)]
    return jnp.pad(x, padding).reshape(-1, GROUP)


def _choose(count: int, size: int) -> np.ndarray:
    """Draws at most `size` of the indices below `count`, in ascending order."""
    if size >= count:
        return np.arange(count)
    return np.sort(np.random.default_rng(0).choice(count, size, replace=False))
