"""Flash attention in place of the operations that a program writes out."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.extend import core

from coat_jax import meshes
from coat_jax.fusion.axes import Axis, Sizes
from coat_jax.fusion.masks import Mask
from coat_jax.fusion.operation import traced
from coat_jax.fusion.unseen import mean_of_values
from coat_jax.layers.flash_attention import flash_attention

# The label of the features of heads. All other labels are positions of axes of scores.
FEATURES = -1


@dataclasses.dataclass(kw_only=True)
class Attention:
    """Softmax attention in a program.

    Labels are the positions of axes in the product of queries and keys, and `FEATURES`
    for the features of a head. Axes of one element have no label.

    Attributes:
      operands: The variables of queries, keys and values.
      dtype: The dtype of queries, keys and values in flash attention.
      axes: The labels of the axes of each operand.
      sizes: The size of each label.
      query: The label of the positions of queries.
      key: The label of the positions of keys.
      batch: The labels of the axes of sequences.
      heads: The labels of the axes of key heads.
      groups: The labels of the axes of query heads that share a key head.
      scale: The factor on products of queries and keys.
      masks: The masks, which are combined by "and".
      shifted: Whether the masks' number is added to scores; see `softmax.Scores`.
      result_axes: The labels of the result's axes.
      eqns: The operations that flash attention replaces, the product with the values
        last.
    """

    operands: Sequence[core.Var]
    dtype: jnp.dtype
    axes: Sequence[Sequence[Axis]]
    sizes: Sizes
    query: int
    key: int
    batch: list[int]
    heads: list[int]
    groups: list[int]
    scale: float
    masks: list[Mask]
    shifted: bool
    result_axes: Sequence[Axis]
    eqns: Sequence[core.JaxprEqn]

    def traced(self) -> list[core.JaxprEqn]:
        """Returns the operations of flash attention."""
        causal = len(self.masks) == 1 and self.masks[0].is_causal(self.query, self.key)
        masks = [] if causal else self.masks
        (result,) = self.eqns[-1].outvars
        options = {"scale": self.scale, "causal": causal}

        def computed(q, k, v, *of_masks):
            mask = None
            for each, array in zip(masks, of_masks, strict=True):
                placed = self._placed(each, array)
                mask = placed if mask is None else mask & placed
            arrays = zip((q, k, v), self.axes, self._forms, strict=True)
            q, k, v = (
                _arranged(x.astype(self.dtype), axes, form, self.sizes)
                for x, axes, form in arrays
            )
            if mask is None:
                y = flash_attention(q, k, v, mask=None, **options)
            else:
                # cuDNN adds the mask to scores, so that a query that sees no key would
                # see all keys, but not equally.
                sees = mask.any(axis=-1, keepdims=True)
                y = flash_attention(q, k, v, mask=mask | ~sees, **options)
                mean = mean_of_values(q, k, v, self.scale if self.shifted else 0.0)
                y = jnp.where(sees.swapaxes(1, 2), y, mean)
            axes = [tuple(axis) for axis in self._forms[0]]
            # An axis of the result may be several axes of y, in another order.
            y = _arranged(y, axes, self.result_axes, self.sizes)
            return [y.reshape(result.aval.shape).astype(result.aval.dtype)]

        def placed(*arrays):
            like = jax.ShapeDtypeStruct(
                result.aval.shape, result.aval.dtype, sharding=result.aval.sharding
            )
            return meshes.on_explicit_mesh(computed, arrays[0], [like])(*arrays)

        operands = [*self.operands, *(mask.array for mask in masks)]
        return traced(placed, operands, [result], like=self.eqns[-1])

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of queries, keys and values that flash attention takes."""
        return [
            tuple(math.prod(self.sizes[label] for label in axis) for axis in form)
            for form in self._forms
        ]

    @property
    def _forms(self) -> list[list[list[int]]]:
        """The labels of the axes of queries, keys and values with these `shapes`."""
        queries = [self.batch, [self.query], [*self.heads, *self.groups], [FEATURES]]
        keys = [self.batch, [self.key], self.heads, [FEATURES]]
        return [queries, keys, keys]

    def _placed(self, mask: Mask, array: jax.Array) -> jax.Array:
        """Returns a mask as an array [batch, heads, queries, keys].

        The axis of sequences has length one if the mask is the same for all sequences,
        and so has the axis of heads if it is the same for all heads.
        """
        present = mask.labels
        form = [self.batch, [*self.heads, *self.groups], [self.query], [self.key]]
        order = [label for axis in form for label in axis]
        array = array.reshape([self.sizes[label] for label in present])
        array = array.transpose([present.index(x) for x in order if x in present])
        array = array.reshape([self.sizes[x] if x in present else 1 for x in order])
        # Axes of positions always have all elements, other axes all elements or one.
        complete = {*present, self.query, self.key}
        full = [not complete.isdisjoint(axis) for axis in form]
        shape = [
            [self.sizes[x] if is_full else 1 for x in axis]
            for axis, is_full in zip(form, full, strict=True)
        ]
        array = jnp.broadcast_to(array, [n for axis in shape for n in axis])
        array = array.reshape([math.prod(axis) for axis in shape])
        return ~array if mask.negated else array


def _arranged(
    x: jax.Array, axes: Sequence[Axis], form: Sequence[Sequence[int]], sizes: Sizes
) -> jax.Array:
    """Returns an array with its axes in the order and the groups of `form`.

    `axes` has the labels of the axes of `x`, and `sizes` the size of each label.
    """
    labels = [label for axis in axes for label in axis]
    x = x.reshape([sizes[label] for label in labels])
    x = x.transpose([labels.index(label) for axis in form for label in axis])
    return x.reshape([math.prod(sizes[label] for label in axis) for axis in form])
