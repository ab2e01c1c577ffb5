"""Reports of how well arrays fit FP8: amax, saturation and underflow by path."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import ml_dtypes
from jax.tree_util import keystr
from jaxtyping import Array, Float

from coat_jax.optimizers.report import share
from coat_jax.optimizers.trees import is_quantized, unboxed
from coat_jax.quantization.array import QuantizedArray, tensor_scale
from coat_jax.quantization.formats import E4M3, E5M2, Format
from pallas_kernels.checks import summary
from pallas_kernels.numerics import group_scale, magnitude, normal, reciprocal

Role = Literal["operand", "saved", "gradient"]
_GROUP = 16  # Neighbours that share a scale in saved activations.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayHealth:
    """Statistics of an array, or of each layer of stacked arrays; see `health_report`.

    Attributes:
      path: The array's path, joined with slashes.
      size: The number of elements, of one layer if layers are stacked.
      amax: The largest magnitude; infinite or NaN if an element is.
      zero_share: The share of elements that are zero.
      saturated_share: The share of elements that are too large to round to the largest
        code, so that they saturate.
      underflow_share: The share of elements that are not zero and round to zero.
    """

    path: str = dataclasses.field(metadata={"static": True})
    size: int = dataclasses.field(metadata={"static": True})
    amax: Float[Array, "*layers"]
    zero_share: Float[Array, "*layers"]
    saturated_share: Float[Array, "*layers"]
    underflow_share: Float[Array, "*layers"]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields a flat record for the array, or for each layer with its index."""
        names = ("amax", "zero_share", "saturated_share", "underflow_share")
        values = {name: getattr(self, name) for name in names}
        row: dict[str, Any] = {"path": self.path, "size": self.size}
        if not self.amax.ndim:
            yield row | {name: float(value) for name, value in values.items()}
        else:
            for layer in range(len(self.amax)):
                found = {name: float(value[layer]) for name, value in values.items()}
                yield row | {"layer": layer} | found


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HealthReport:
    """Statistics of a tree's arrays; a pytree that prints as a table.

    Attributes:
      arrays: One entry for each floating or quantized array, in the tree's order.
    """

    arrays: tuple[ArrayHealth, ...]

    def rows(self) -> list[dict[str, Any]]:
        """Returns a flat record for each array, or each layer of stacked arrays."""
        return [row for array in jax.device_get(self).arrays for row in array.rows()]

    def __str__(self) -> str:
        rows = self.rows()
        names = [
            f"{r['path']} {r['layer']}" if "layer" in r else r["path"] for r in rows
        ]
        width = max(map(len, names), default=0)
        lines = [
            f"{'':{width}} {'size':>12} {'amax':>10} {'zero %':>8} "
            f"{'saturated %':>12} {'underflow %':>12}"
        ]
        lines += [
            f"{name:{width}} {row['size']:>12,} {row['amax']:>10.3g} "
            f"{100 * row['zero_share']:>8.2f} {100 * row['saturated_share']:>12.4f} "
            f"{100 * row['underflow_share']:>12.4f}"
            for name, row in zip(names, rows, strict=True)
        ]
        return "\n".join(lines)


def health_report(
    tree: Any,
    *,
    role: Role = "operand",
    stacked: Iterable[str] = (),
    amax: float | Float[Array, ""] | None = None,
) -> HealthReport:
    """Computes each array's amax, and what saturates or underflows in FP8.

    It reads the arrays and returns a few numbers for each. This is cheap enough for
    every hundredth step, outside or within a jitted step. The tree may hold parameters,
    gradients, an optimizer's state, or activations, such as those that a Flax module
    sows. Arrays that are empty or not floating are left out.

    Statistics describe the codes to which the library quantizes an array in its role:

    | role         | format | scale                                    |
    |--------------|--------|------------------------------------------|
    | `"operand"`  | E4M3   | per token: one for each row, for matmuls |
    | `"saved"`    | E4M3   | one for each 16 neighbours of a row      |
    | `"gradient"` | E5M2   | per tensor, a power of two               |

    Scales follow from the array's own amax, so that nothing saturates, unless `amax` is
    given, as in delayed scaling, where the amax is from earlier steps.

    For an array that is quantized already, such as a moment, statistics are of the
    stored codes. There `saturated_share` is the share of codes at the format's maximum,
    and `underflow_share` the share of zero codes, whether or not the elements were zero
    before. Each group has at least one code near the maximum.

    Args:
      tree: A pytree of arrays.
      role: The role in which the arrays would be quantized.
      stacked: Names of subtrees, such as "layers", with arrays that have an axis of
        layers in front. These arrays get statistics for each layer.
      amax: The amax that scales follow from, in the role "gradient". None means each
        array's own.

    Raises:
      ValueError: If the role is unknown, the tree has no floating array, no array is
        in a subtree of `stacked`, an array in such a subtree has no axes, or `amax` is
        given in another role.

    Examples:
      >>> import coat_jax as coat, jax.numpy as jnp
      >>> grads = {"w": jnp.array([[1.0, -4.0], [0.0, 1e-12]])}
      >>> report = coat.health_report(grads, role="gradient")
      >>> [(row["amax"], row["underflow_share"]) for row in report.rows()]
      [(4.0, 0.25)]
    """
    if role not in get_args(Role):
        raise ValueError(
            f"role must be one of {', '.join(get_args(Role))}, got {role!r}"
        )
    if amax is not None and role != "gradient":
        raise ValueError(f"amax is for role='gradient', got {amax!r} and {role!r}")
    stacked = (stacked,) if isinstance(stacked, str) else tuple(stacked)
    leaves = [
        (keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(
            unboxed(tree), is_leaf=is_quantized
        )
        if _is_floating(leaf)
    ]
    if not leaves:
        raise ValueError(f"health_report needs a floating array, got {summary(tree)}")
    paths, arrays = zip(*leaves, strict=True)
    layered = [not set(path.split("/")).isdisjoint(stacked) for path in paths]
    if stacked and not any(layered):
        raise ValueError(
            f"stacked must name parts of {', '.join(paths)}, got {stacked}"
        )
    for path, x, has_layers in zip(paths, arrays, layered, strict=True):
        if has_layers and not x.ndim:
            raise ValueError(
                f"stacked arrays need an axis of layers, got {path} without"
            )
    return _report(arrays, amax, role=role, paths=paths, layered=tuple(layered))


@functools.partial(jax.jit, static_argnames=("role", "paths", "layered"))
def _report(
    arrays: tuple[Any, ...],
    amax: Any,
    *,
    role: Role,
    paths: tuple[str, ...],
    layered: tuple[bool, ...],
) -> HealthReport:
    reports = []
    of = functools.partial(_of_array, amax=amax, role=role)
    for path, x, has_layers in zip(paths, arrays, layered, strict=True):
        size = x.size // x.shape[0] if has_layers and x.size else x.size
        statistics = jax.vmap(of)(x) if has_layers else of(x)
        reports.append(ArrayHealth(path=path, size=size, **statistics))
    return HealthReport(tuple(reports))


def _of_array(x: Any, amax: Any, role: Role) -> dict[str, Float[Array, ""]]:
    if is_quantized(x):
        return _of_codes(x)
    x = jnp.atleast_1d(x).astype(jnp.float32)
    format, ratio = _scaled(x, amax, role)
    # A number up to half a step above the largest code rounds to it, and one up to half
    # the smallest code to zero.
    edge = format.max + _largest_step(format) / 2
    is_zero = x == 0
    return {
        "amax": magnitude(x),
        "zero_share": share(is_zero),
        "saturated_share": share(ratio > edge),
        "underflow_share": share(~is_zero & (ratio <= format.smallest / 2)),
    }


def _of_codes(q: QuantizedArray) -> dict[str, Float[Array, ""]]:
    values = q.format.decode(q.codes)
    is_zero = values == 0
    return {
        "amax": magnitude(q.dequantize().astype(jnp.float32)),
        "zero_share": share(is_zero),
        "saturated_share": share(jnp.abs(values) == q.format.max),
        "underflow_share": share(is_zero),
    }


def _scaled(
    x: Float[Array, "... n"], amax: Any, role: Role
) -> tuple[Format, Float[Array, "... n"]]:
    """Returns the format of the codes, and the magnitude of `x` divided by scales."""
    size = jnp.abs(normal(x))
    if role == "gradient":
        largest = magnitude(x) if amax is None else jnp.float32(amax)
        return E5M2, size * reciprocal(tensor_scale(largest, E5M2))
    if role == "operand":
        scale = group_scale(magnitude(x, -1)[..., None], E4M3.max)
        return E4M3, size * reciprocal(scale)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % _GROUP)]
    groups = jnp.pad(size, padding).reshape(*x.shape[:-1], -1, _GROUP)
    scale = group_scale(magnitude(groups, -1)[..., None], E4M3.max)
    ratio = (groups * reciprocal(scale)).reshape(*x.shape[:-1], -1)
    return E4M3, ratio[..., : x.shape[-1]]


def _largest_step(format: Format) -> float:
    """Returns the distance between the two largest codes of a floating format."""
    info = ml_dtypes.finfo(format.dtype)
    return float(info.eps) * 2.0 ** int(info.maxexp - 1)


def _is_floating(leaf: Any) -> bool:
    """Returns whether a leaf is a floating or quantized array with elements."""
    if is_quantized(leaf):
        return leaf.size > 0
    floating = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
    return floating and leaf.size > 0
