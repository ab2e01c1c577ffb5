"""Parameters with the optimizer's step as their backward pass.

In JAX a gradient is a cotangent, and a derivative rule may return any array of the
parameter's type as one. The rule of a *tap*, an identity on a parameter, takes the
parameter's gradient and returns the parameter after its step. The state of the
optimizer is a second argument of the tap, and its cotangent is the state after the
step. So the gradient is read by the step alone, as soon as it is complete.
"""

import contextlib
import contextvars
import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from coat_jax.release.parts import Nodes, Optimizer, Parameters, as_floats
from pallas_kernels import versions

active: contextvars.ContextVar["Release | None"] = contextvars.ContextVar(
    "release", default=None
)
WITHIN = (
    "coat.scan_layers or coat.apply_layer is inside a transformation of JAX within the "
    "loss of coat.value_and_update, such as jax.vmap, jax.lax.scan, jax.lax.cond, "
    "jax.checkpoint, jax.jit or another layer. So its parameters have ordinary "
    "gradients, which exist at once. Call it from the loss itself"
)
COMPUTED = (
    "coat.scan_layers or coat.apply_layer got {}, which the loss of "
    "coat.value_and_update computes from parameters, so all gradients of these arrays "
    "exist at once. Pass the parameters as the loss gets them, and cast, scale or "
    "reshape them within the layer"
)


@dataclasses.dataclass(kw_only=True)
class Release:
    """A step of `coat.value_and_update` while it is being traced.

    Attributes:
      params: The parameters and their state.
      optimizer: The optimizer, once the backward pass begins.
      mode: The results of a backward pass: "step" for the parameters after their step,
        or "norm" for the gradients' sums of squares.
      leaves: The parameters, as arguments of the differentiated loss.
      states: The parameters' states, as arguments of the differentiated loss; see
        `as_floats`.
      sums: An argument of the differentiated loss with an element for each parameter.
        Its cotangent in the mode "norm" is the gradients' sums of squares.
      taps: Each parameter after its tap.
      trace: JAX's trace in which the taps were called.
      readers: The name of the function that computed a parameter's gradient in the last
        backward pass, by the parameter's index.
      stacked: The indices of the parameters that are stacks of layers.
      has_warned: Whether a warning of gradients that exist at once has been given.
    """

    params: Parameters
    optimizer: Optimizer | None = None
    mode: Literal["step", "norm"] = "step"
    leaves: Sequence[Array] = ()
    states: Sequence[Nodes] = ()
    sums: Any = None
    taps: Sequence[Array] = ()
    trace: Any = None
    readers: dict[int, str] = dataclasses.field(default_factory=dict)
    stacked: set[int] = dataclasses.field(default_factory=set)
    has_warned: bool = False

    @contextlib.contextmanager
    def tapped(
        self, leaves: Sequence[Array], states: Sequence[Nodes], sums: Array
    ) -> Iterator[Any]:
        """Yields the tree of parameters after their taps, to the loss in this context.

        The arrays of the loss are forgotten at the end, because its backward pass keeps
        this object.

        Args:
          leaves: The parameters, as arguments of the differentiated loss.
          states: The parameters' states, as arguments of the differentiated loss.
          sums: The argument with an element for each parameter.
        """
        self.leaves, self.states, self.sums = leaves, states, sums
        self.trace = versions.current_trace()
        self.taps = [
            _tap(self, j)(leaf, state, sums)
            for j, (leaf, state) in enumerate(zip(leaves, states, strict=True))
        ]
        token = active.set(self)
        try:
            yield self.params.treedef.unflatten(self.taps)
        finally:
            active.reset(token)
            self.leaves = self.states = self.taps = ()
            self.sums = self.trace = None

    def is_traced_here(self) -> bool:
        """Returns whether no transformation of JAX is between the loss and this call.

        JAX adds up cotangents over the steps of a loop or the members of a batch, and
        sets them to zero for a branch that does not run. Both would be wrong for
        parameters after a step.
        """
        return self.trace == versions.current_trace()

    def differentiates(self, x: Any) -> bool:
        """Returns whether an array has a gradient, and is computed in the loss itself.

        Arrays of a transformation within the loss do not show whether they have one.
        """
        trace = trace_of(x)
        return trace is not None and any(trace is trace_of(tap) for tap in self.taps)

    def warn(self, message: str) -> None:
        """Warns about a caller of `coat.scan_layers` or `coat.apply_layer`, once."""
        if not self.has_warned:
            warnings.warn(message, stacklevel=4)
        self.has_warned = True

    def indices(self, arrays: Sequence[Any]) -> list[int | None]:
        """Returns each array's index among the tapped parameters, or None."""
        index = {id(tap): j for j, tap in enumerate(self.taps)}
        return [index.get(id(x)) for x in arrays]

    def claim(self, indices: Sequence[int], reader: str) -> None:
        """Records that `reader` computes the gradients of parameters.

        Raises:
          ValueError: If a reader is recorded for one of these parameters already.
        """
        for j in indices:
            if j in self.readers:
                raise ValueError(
                    f"{self.params.names[j]} is read by {self.readers[j]} and by "
                    f"{reader}. Its step needs the sum of both gradients, so it must "
                    "be read in one place: either by one coat.scan_layers or "
                    "coat.apply_layer, or by neither"
                )
            self.readers[j] = reader

    def step(
        self,
        grads: Mapping[int, Array],
        leaves: Mapping[int, Array],
        states: Mapping[int, Nodes],
        **options: Any,
    ) -> tuple[dict[int, Array], dict[int, Nodes]]:
        """Steps some parameters; returns them and their states after the step."""
        leaves, state = self.optimizer.step(grads, leaves, states, **options)
        return leaves, self.params.states_after(state, list(grads))

    def no_squares(self) -> Float[Array, " parameters"]:
        """Returns a zero for each parameter."""
        return jnp.zeros(len(self.params.leaves))

    def squares(
        self, indices: Sequence[int], grads: Sequence[Array]
    ) -> Float[Array, " parameters"]:
        """Returns the sums of squares of some gradients, and 0 for other parameters.

        Within `shard_map` the parts of a gradient that devices have are summed, too.
        """
        sums = []
        for grad in grads:
            squares = jnp.sum(jnp.square(grad.astype(jnp.float32)))
            axes = tuple(versions.varying_axes(grad))
            sums.append(lax.psum(squares, axes) if axes else squares)
        return self.no_squares().at[jnp.array(indices)].set(jnp.stack(sums))


def trace_of(x: Any) -> Any:
    """Returns the trace of JAX in which an array is computed, or None."""
    return getattr(x, "_trace", None)


def _tap(release: Release, index: int):
    @jax.custom_vjp
    def tap(leaf, state, sums):
        del state, sums
        return leaf

    def fwd(leaf, state, sums):
        del sums
        return leaf, (leaf, state)

    def bwd(saved, grad):
        leaf, state = saved
        release.claim([index], "the loss itself")
        if release.mode == "norm":
            return None, None, release.squares([index], [grad])
        stored = release.params.stored(index, state)
        leaves, states = release.step({index: grad}, {index: leaf}, {index: stored})
        return leaves[index], as_floats(states[index]), None

    tap.defvjp(fwd, bwd)
    return tap
