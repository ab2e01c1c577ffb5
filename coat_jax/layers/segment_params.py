"""The parameters of a decoder layer's segments, as the methods of `Recipe` take them.

Weights come with their FP8 codes if the layer has them and `codes` is true.
"""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from coat_jax.fp8.matmul import Fp8Weight, Weight
from coat_jax.layers.flow import Params
from pallas_kernels import Scaled

if TYPE_CHECKING:
    from coat_jax.layers.decoder import DecoderLayer


class WeightCodes(nnx.Variable[Array]):
    """A variable for FP8 codes of a weight, or their scales, used by several passes."""


def codes_of(weight: Float[Array, "*out in"]) -> nnx.Dict:
    """Quantizes a weight for the FP8 flow, and returns its codes and scales."""
    quantized = Fp8Weight.of(weight)
    codes = {
        "rows": quantized.rows.codes,
        "rows_scale": quantized.rows.scale,
        "transposed": quantized.transposed,
        "scale": quantized.scale,
    }
    return nnx.Dict({name: WeightCodes(array) for name, array in codes.items()})


def attention_in(layer: "DecoderLayer", *, codes: bool = True) -> Params:
    """Returns the parameters of `Recipe.attention_in`."""
    return _params(layer, "qkv", codes=codes, norm=layer.attention_norm)


def attention_out(layer: "DecoderLayer", *, codes: bool = True) -> Params:
    """Returns the parameters of `Recipe.attention_out`."""
    params = _params(layer, "out", codes=codes, out_norm=layer.attention_out_norm)
    if layer.attention.steps is None:
        return params
    return {**params, "heads": heads(layer)}


def heads(layer: "DecoderLayer") -> dict[str, Array]:
    """Returns the parameters of the steps between the `qkv` matmul and attention."""
    arrays = {
        "bias": None if layer.qkv_bias is None else layer.qkv_bias[...],
        "q_norm": _norm_weight(layer, layer.q_norm),
        "k_norm": _norm_weight(layer, layer.k_norm),
    }
    return {name: array for name, array in arrays.items() if array is not None}


def mlp(layer: "DecoderLayer", *, codes: bool = True) -> Params:
    """Returns the parameters of `Recipe.gated_mlp`, or of `Recipe.experts`."""
    norms = {"norm": layer.mlp_norm, "out_norm": layer.mlp_out_norm}
    params = _params(layer, "gate_up", "down", codes=codes, **norms)
    if layer.experts is None:
        return params
    bias = layer.router_bias
    params["router_bias"] = None if bias is None else bias[...]
    return {**params, "router": layer.router[...]}


def _params(
    layer: "DecoderLayer", *names: str, codes: bool, **norms: nnx.Param | None
) -> dict[str, Any]:
    """Returns the parameters of the segment with the weights `names`.

    `norms` has the weights of norms, by their names in the parameters of `Recipe`'s
    methods.
    """
    params: dict[str, Any] = {name: _weight(layer, name, codes) for name in names}
    params["norm"] = None
    for name, weight in norms.items():
        if name == "norm" or weight is not None:
            params[name] = _norm_weight(layer, weight)
    if layer.amax is not None:
        histories = {k: v for k, v in layer.amax.items() if k.startswith(names)}
        params["amax"] = {k: history[...] for k, history in histories.items()}
    return params


def _weight(layer: "DecoderLayer", name: str, codes: bool) -> Weight:
    weight = getattr(layer, name)[...]
    if layer.codes is None or not codes or name not in layer.codes:
        return weight
    arrays = {k: x[...] for k, x in layer.codes[name].items()}
    rows = Scaled(arrays.pop("rows"), arrays.pop("rows_scale"))
    return Fp8Weight(weight, rows, **arrays)


def _norm_weight(layer: "DecoderLayer", weight: nnx.Param | None) -> Array | None:
    if weight is None or not layer.norm_offset:
        return None if weight is None else weight[...]
    # The sum has more digits than a bfloat16 parameter.
    return weight[...].astype(jnp.float32) + layer.norm_offset
