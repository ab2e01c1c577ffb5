"""Expert parallelism: each device of a mesh axis has some experts and some tokens.

A layer runs within `shard_map` over all devices. Each device routes its own tokens,
sends them to the devices of their experts, multiplies the rows that it receives, and
sends the results back; see `coat_jax.layers.experts.sent`. The FP8 flow quantizes
weights before `shard_map`, so that devices gather codes if another mesh axis splits the
weights, too.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from coat_jax.layers.experts.products import WeightOfExperts
from coat_jax.layers.experts.routing import Experts
from coat_jax.layers.parts import Stream
from coat_jax.layers.shards import finished
from pallas_kernels.dispatch import array_types, exchange

EXPERT = "expert"
WEIGHTS = ("gate_up", "down")  # The parameters that are weights of experts.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertAxis:
    """The mesh axis "expert" that splits the experts of a layer, if there is one.

    Tokens are split over the axes of the batch and over "expert". If "expert" is among
    the axes of the batch, as it should be, the rest of the layer is split over the same
    axes.

    Attributes:
      name: The name of the axis; None if every device has all experts.
      batch: The mesh axes that split the batch.
      spread: Whether arrays are spread over the mesh, so that the layer has to enter
        `shard_map`. Within the caller's `shard_map` they are not.
      num_experts: The number of experts to choose from.
    """

    name: str | None = None
    batch: tuple[str, ...] = ()
    spread: bool = False
    num_experts: int = 0

    @classmethod
    def of(
        cls,
        params: Mapping[str, Any],
        x: Float[Array, "b s h"],
        batch_axes: str | tuple[str, ...] | None,
        experts: Experts,
        sent: bool = True,
    ) -> "ExpertAxis":
        """Returns the expert axis of the mesh that parameters and tokens are on.

        If `sent` is false, no axis splits the experts, and XLA gathers their weights.

        Within the caller's `shard_map` over an axis "expert", `params` has weights of
        the device's own experts, followed by the shared experts.

        Raises:
          ValueError: If the size of the axis does not divide the number of experts, the
            axes of tokens are unknown or do not divide the batch, or the mesh splits
            anything else.
        """
        mesh = array_types.mesh_of((x, params["gate_up"]))
        if mesh is None:
            return cls._within(len(params["gate_up"]), experts)
        if not sent or mesh.shape.get(EXPERT, 1) == 1:
            return cls()
        if mesh.manual_axes:
            raise ValueError(
                "experts that a mesh splits need shard_map over all of its axes, got "
                f"{sorted(mesh.manual_axes)} of {mesh.axis_names}"
            )
        batch = _batch_axes(mesh, x, batch_axes)
        axis = cls(
            name=EXPERT, batch=batch, spread=True, num_experts=experts.num_experts
        )
        axis._check(mesh, len(x))
        return axis

    @classmethod
    def _within(cls, weights: int, experts: Experts) -> "ExpertAxis":
        """Returns the axis of the caller's `shard_map` if it splits the weights."""
        if weights == experts.num_groups:
            return cls()
        try:
            count = lax.axis_size(EXPERT)
        except NameError:  # There is no such axis.
            count = 1
        if count == 1 or weights != experts.num_experts / count + experts.num_shared:
            raise ValueError(
                f"weights must be of {experts.num_groups} experts, or of a device's "
                f'part of them within shard_map over an axis "expert", got {weights}'
            )
        return cls(name=EXPERT, num_experts=experts.num_experts)

    def _check(self, mesh: AbstractMesh, batch: int) -> None:
        count = mesh.shape[EXPERT]
        if self.num_experts % count:
            raise ValueError(
                f'the mesh axis "expert" must divide num_experts {self.num_experts}, '
                f"got {count}"
            )
        not_of_tokens = set(mesh.axis_names) - set(self._axes)
        if wrong := sorted(name for name in not_of_tokens if mesh.shape[name] > 1):
            raise ValueError(
                f'a mesh with an axis "expert" must split nothing but the batch, over '
                f"{', '.join(self._axes)}; got {', '.join(wrong)}"
            )
        parts = array_types.parts_of(mesh, self._axes)
        if batch % parts:
            raise ValueError(
                f"the batch must be a multiple of {parts}, the size of the mesh axes "
                f"{', '.join(self._axes)}, got {batch}"
            )

    @property
    def _axes(self) -> tuple[str, ...]:
        """The mesh axes that split tokens."""
        return self.batch if EXPERT in self.batch else (*self.batch, EXPERT)

    @property
    def tokens(self) -> P:
        """The partition spec of tokens, and of other arrays that differ by device."""
        return P(self._axes)

    @property
    def params(self) -> dict[str, Any]:
        """The partition specs of the parameters that `split` returns."""
        replicated = dict.fromkeys(("norm", "router", "router_bias"), P())
        return replicated | dict.fromkeys(WEIGHTS, (P(EXPERT), P()))

    def split(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Returns `params` with each weight of experts split into a pair.

        The pair holds the weights of the experts to choose from, and the weights of the
        shared experts or None.
        """

        def parts(w: Any) -> tuple[Any, Any]:
            if jax.tree.leaves(w)[0].shape[0] == self.num_experts:
                return w, None
            chosen = jax.tree.map(lambda v: v[: self.num_experts], w)
            return chosen, jax.tree.map(lambda v: v[self.num_experts :], w)

        return {**params, **{name: parts(params[name]) for name in WEIGHTS}}

    def over_devices(
        self, fn: Callable, x: Array, in_specs: Any, out_specs: Any
    ) -> Callable:
        """Returns a function that runs `fn` on the shards of each device.

        It takes parameters that `split` returned, and the other arguments of `fn`.

        Args:
          fn: A function of unsplit parameters and other arrays.
          x: An array with the mesh in its type.
          in_specs: The specs of the arguments.
          out_specs: The specs of the results.
        """

        def run(params, *args):
            weights = {name: _joined(params[name]) for name in WEIGHTS}
            replicated = {name: x for name, x in params.items() if name not in WEIGHTS}
            replicated, *args = array_types.varying_alike((replicated, *args))
            # Matmuls save weights as they come in. `pcast` would make copies of them.
            codes = {
                name: array_types.varying_alike(w, args)
                for name, w in weights.items()
                if isinstance(w, WeightOfExperts)
            }
            return fn(replicated | weights | codes, *args)

        mesh = array_types.mesh_of(x)
        return jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs)

    def backward(self, run: Callable, residuals: Any, cotangents: Any) -> tuple:
        """Computes a segment's gradients on each device, and adds them up.

        The results are like the results of a backward pass with the decorator
        `by_shards`. The stream's gradient has a scale for each shard of the batch, the
        largest scale of the shard's devices.

        Args:
          run: A function of residuals and cotangents. The first residual is the
            parameters, and the first cotangent is a stream.
          residuals: The residuals.
          cotangents: The gradients of the stream and of the `Shares`.
        """
        params, *saved = residuals
        dy, dshares = cotangents

        def shard(params, saved, dx, scale, dshares):
            stream = Stream(dx, scale.reshape(()))
            grads, stream = run((params, *saved), (stream, dshares))
            parts = {name: self._parts(grads.pop(name)) for name in WEIGHTS}
            grads = {**parts, **lax.psum(grads, self._axes)}
            return grads, stream.x, stream.scale[None]

        data_axes = tuple(name for name in self._axes if name != EXPERT)
        of_weights = dict.fromkeys(WEIGHTS, (P(data_axes, EXPERT), P()))
        scales = P(self.batch) if dy.scale.ndim else P()
        in_specs = self.params, self.tokens, self.tokens, scales, self.tokens
        out_specs = self.params | of_weights, self.tokens, self.tokens
        spread = self.over_devices(shard, dy.x, in_specs, out_specs)
        arrays = self.split(params), tuple(saved), dy.x, dy.scale, dshares
        grads, dx, scale = spread(*arrays)
        # Each device gets only its part of these sums.
        grads |= {name: _total(*grads[name]) for name in WEIGHTS}
        scale = jnp.max(scale.reshape(*dy.scale.shape, -1), axis=-1)
        return finished(params, dy, grads, [Stream(dx, scale)])

    def _parts(self, gradient: Array) -> tuple[Array, Array | None]:
        """Returns the gradients of this device's experts, and of the shared experts.

        The former get a leading axis, over which they are still to be summed. The
        latter are summed over all devices, or None without shared experts.
        """
        count = self.num_experts // lax.axis_size(EXPERT)
        if len(gradient) == count:
            return gradient[None], None
        return gradient[None, :count], lax.psum(gradient[count:], self._axes)


def _batch_axes(
    mesh: AbstractMesh, x: Array, batch_axes: str | tuple[str, ...] | None
) -> tuple[str, ...]:
    if mesh.explicit_axes:
        batch_axes, length, *_ = *jax.typeof(x).sharding.spec, None, None
        if length is not None:
            raise ValueError(
                'sequences cannot be split on a mesh with an axis "expert", got '
                f"{length!r}"
            )
        batch_axes = () if batch_axes is None else batch_axes
    if batch_axes is None:
        raise ValueError(
            'on a mesh with automatic axes and an axis "expert" the layer needs the '
            "batch_axes that split the batch, got None"
        )
    return array_types.axis_names(batch_axes)


def _joined(parts: tuple[Any, Any]) -> Any:
    """Returns the weights of a device's experts, with the shared experts last."""
    chosen, shared = parts
    if shared is None:
        return chosen
    return jax.tree.map(lambda *v: jnp.concatenate(v), chosen, shared)


def _total(chosen: Array, shared: Array | None) -> Array:
    """Sums the gradients of `chosen` over devices, and appends `shared` if given."""
    chosen = exchange.total(chosen)
    return chosen if shared is None else jnp.concatenate([chosen, shared])
