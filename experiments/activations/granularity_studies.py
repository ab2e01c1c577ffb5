"""Studies of the errors of FP8 activations, by granularity of their scales.

An error is 100 |stored - exact| / |exact| in the 2-norm, in percent. Activations are
stored in E4M3, and everything else is computed in float32. The results are flat rows
for results files.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

import coat_jax as coat
from coat_jax.quantization.granularity import Granularity
from experiments.activations import layer_flow
from experiments.activations.layer_flow import OPERATORS, SITES
from experiments.common.trained import Trained, structure

Row = dict[str, Any]
GRANULARITIES: dict[str, Granularity] = {
    "4x4": coat.PerBlock(4, 4),
    "1x16": coat.PerGroup(16),
    # No row is longer than 2**24, so the whole row is one group.
    "per row": coat.PerGroup(2**24),
    "per tensor": coat.PerTensor(),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flow:
    """The granularities of stored activations, by the kind of operator that reads them.

    Queries, keys and values stay unquantized, as in the paper.

    Attributes:
      nonlinear: The granularity of inputs of norms and gates; None means unquantized.
      linear: The granularity of inputs of matmuls.
    """

    nonlinear: Granularity | None
    linear: Granularity

    def __call__(self, site: str, x: Float[Array, "b s n"]) -> Float[Array, "b s n"]:
        """Returns `x` as the operator at `site` reads it: quantized and dequantized.

        `site` is a key of `layer_flow.SITES`. Arrays that attention reads stay
        unquantized.
        """
        by_kind = {"non-linear": self.nonlinear, "linear": self.linear}
        return stored(x, by_kind.get(SITES[site]))


def _flow(nonlinear: str, linear: str) -> Flow:
    return Flow(nonlinear=GRANULARITIES.get(nonlinear), linear=GRANULARITIES[linear])


# The flows of the paper's figure 4a, and two more: per-tensor scales everywhere, and
# mixed granularity with per-token scales for matmuls, as in the recipe `coat` after
# norms and gates.
FLOWS: dict[str, Flow] = {
    "per tensor": _flow("per tensor", "per tensor"),
    "4x4": _flow("4x4", "4x4"),
    "1x16": _flow("1x16", "1x16"),
    "TE": _flow("BF16", "per tensor"),
    "mixed": _flow("1x16", "per tensor"),
    "mixed, rows": _flow("1x16", "per row"),
}


def stored(
    x: Float[Array, "..."], granularity: Granularity | None
) -> Float[Array, "..."]:
    """Quantizes `x` to FP8 and dequantizes it; returns `x` unchanged for None."""
    return (
        x
        if granularity is None
        else coat.quantize(x, granularity=granularity).dequantize()
    )


def percent(stored: Float[Array, "..."], exact: Float[Array, "..."]) -> Array:
    """Computes 100 |stored - exact| / |exact| in the 2-norm."""
    return 100 * jnp.linalg.norm(stored - exact) / jnp.linalg.norm(exact)


def layer_rows(trained: Trained) -> list[Row]:
    """Returns the rows of all studies of a trained model, by layer, on unseen text.

    The key `study` of a row is one of:

    - `arrays`: the error of every activation in every granularity, the percentage of
      elements that become zero, and the ratio of the activation's amax to its root mean
      square.
    - `operators`: the error of the array that a matmul reads after a norm or a gate.
      The operator's exact input and its output are stored as a flow stores them. This
      is the paper's figure 4a.
    - `stream`: the error of the residual stream after each layer, if this layer and
      all layers before it follow a flow.
    """
    config = trained.config_as("bf16", jnp.float32)
    model = nnx.merge(structure(config), trained.wide_params())
    graph, stacked = nnx.split(model.layers)

    @jax.jit
    def measure(params, x, streams):
        layer = nnx.merge(graph, params)
        output, activations = layer_flow.run(layer, x)
        measured = {
            "arrays": _arrays(activations),
            "operators": _operators(layer, activations),
        }
        streams = {
            name: layer_flow.run(layer, streams[name], flow)[0]
            for name, flow in FLOWS.items()
        }
        measured["stream"] = {
            (name,): {"error_percent": percent(stream, output)}
            for name, stream in streams.items()
        }
        return measured, output, streams

    x = model.embedding[...][trained.batches[0][:, :-1]]
    streams, rows = dict.fromkeys(FLOWS, x), []
    with jax.default_matmul_precision("highest"):
        for layer in range(config.num_layers):
            params = jax.tree.map(lambda p, i=layer: p[i], stacked)
            measured, x, streams = measure(params, x, streams)
            rows += _rows(layer, jax.device_get(measured))
    return rows


_KEYS = {
    "arrays": ("site", "granularity"),
    "operators": ("operator", "flow"),
    "stream": ("flow",),
}
_Measured = dict[tuple[str, ...], dict[str, Array]]


def _arrays(activations: Mapping[str, Array]) -> _Measured:
    return {
        (site, name): {
            "error_percent": percent(stored(x, granularity), x),
            "lost_percent": 100 * jnp.mean((stored(x, granularity) == 0) & (x != 0)),
            "peak_over_rms": jnp.max(jnp.abs(x)) / jnp.sqrt(jnp.mean(x * x)),
        }
        for site, x in activations.items()
        for name, granularity in GRANULARITIES.items()
    }


def _operators(layer, activations: Mapping[str, Array]) -> _Measured:
    apply: dict[str, Callable] = layer_flow.operators(layer)
    errors = {}
    for name, (sites, reader) in OPERATORS.items():
        for flow_name, flow in FLOWS.items():
            inputs = [flow(site, activations[site]) for site in sites]
            error = percent(flow(reader, apply[name](*inputs)), activations[reader])
            errors[name, flow_name] = {"error_percent": error}
    return errors


def _rows(layer: int, studies: Mapping[str, _Measured]) -> list[Row]:
    return [
        {"study": study, "layer": layer}
        | dict(zip(_KEYS[study], names, strict=True))
        | {key: float(value) for key, value in values.items()}
        for study, measured in studies.items()
        for names, values in measured.items()
    ]


def mean_error(rows: list[Row], study: str, **names: str) -> float:
    """Returns the root mean square of the errors of a study's rows.

    Args:
      rows: Rows of `layer_rows`.
      study: The study: "arrays", "operators" or "stream".
      **names: Further keys of the rows and their values.

    Raises:
      ValueError: If there is no such row.
    """
    names_of_rows = {"study": study, **names}
    errors = [r["error_percent"] for r in rows if names_of_rows.items() <= r.items()]
    if not errors:
        raise ValueError(f"no row is of {names_of_rows}")
    return float(np.sqrt(np.mean(np.square(errors))))
