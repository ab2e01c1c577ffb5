"""FP8 checkpoints: E4M3 codes of the layers' matrices, with scales of blocks or rows.

Two layouts are written, and read again:

| Format | Codes | Scales | In config.json |
| --- | --- | --- | --- |
| "fp8-block" | `X.weight` [out, in] | `X.weight_scale_inv`, float32 | `quant_method` |
| | | [ceil(out / 128), ceil(in / 128)] | "fp8" |
| "fp8-channel" | `X.weight` [out, in] | `X.weight_scale`, float32 [out, 1] | |
| | | | "compressed-tensors" |

A weight is its code times its scale, also where the scale's name says "inv".
DeepSeek-V3 has the first layout. The library compressed-tensors has the second, in
which activations are quantized dynamically, with a scale per token. Embeddings, the
head, norms, biases and routers are not quantized.

The forward pass of the recipes "coat" and "coat_max" quantizes weights to the codes and
scales of "fp8-channel"; see `coat_jax.fp8.matmul`. "coat_block" quantizes them to the
codes and scales of "fp8-block" if the heads' size is a multiple of 128.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import pallas_kernels as kernels
from coat_jax.models.hf.safetensors import shown
from pallas_kernels import Scaled

FP8Format = Literal["fp8-block", "fp8-channel"]
BLOCK = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
    """The scales of a checkpoint's codes.

    Attributes:
      suffix: The suffix to the name of a matrix that gives the name of its scales.
      block: The number of rows, and of columns, that share a scale; None means all.
    """

    suffix: str
    block: tuple[int | None, int | None]

    def scales(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the scales of a matrix."""
        sides = zip(shape, self.block, strict=True)
        return tuple(1 if b is None else -(-size // b) for size, b in sides)

    def dequantized(
        self, codes: np.ndarray, scales: np.ndarray, start: int
    ) -> np.ndarray:
        """Returns codes times scales, in float32.

        Args:
          codes: Rows of codes.
          scales: The scales of all blocks that these rows are in.
          start: The index of the first row within its block.
        """
        rows, columns = self.block
        wide = scales.astype(np.float32)
        if rows is not None:
            wide = np.repeat(wide, rows, axis=0)[start : start + codes.shape[0]]
        if columns is not None:
            wide = np.repeat(wide, columns, axis=1)[:, : codes.shape[1]]
        return codes.astype(np.float32) * wide


_SCHEMES: dict[FP8Format, Scheme] = {
    "fp8-block": Scheme(suffix="_scale_inv", block=(BLOCK, BLOCK)),
    "fp8-channel": Scheme(suffix="_scale", block=(1, None)),
}


def check_format(format: Any) -> None:
    """Raises ValueError unless `format` is None or the name of an FP8 format."""
    formats = get_args(FP8Format)
    if format is not None and format not in formats:
        raise ValueError(
            f"format must be None or one of {', '.join(formats)}, got {format!r}"
        )


def scheme_of(format: FP8Format) -> Scheme:
    """Returns the scheme of a format that `save` can write."""
    return _SCHEMES[format]


def quantized(
    weight: Float[Array, "out in"], format: FP8Format
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the codes and scales of a matrix, on the host.

    Raises:
      ValueError: If a number is not finite.

    Examples:
      >>> import jax.numpy as jnp
      >>> from coat_jax.models.hf.quantized import quantized
      >>> codes, scales = quantized(jnp.ones((200, 130)), "fp8-block")
      >>> codes.shape, scales.shape
      ((200, 130), (2, 2))
    """
    wide = weight if weight.dtype == jnp.bfloat16 else weight.astype(jnp.float32)
    if format == "fp8-channel":
        rows = kernels.quantize_rows(wide)
        scaled = Scaled(rows.codes, rows.scale[:, None])
    else:
        short = [(0, -size % BLOCK) for size in wide.shape]
        row, _ = kernels.quantize_blocks(jnp.pad(wide, short), row="128x128")
        scaled = Scaled(row.codes[: wide.shape[0], : wide.shape[1]], row.scale)
    codes, scales = np.asarray(scaled.codes), np.asarray(scaled.scale)
    if not np.isfinite(scales).all():
        raise ValueError("a matrix must be finite to be quantized")
    return codes, scales


def settings(format: FP8Format, unquantized: Sequence[str]) -> dict[str, Any]:
    """Returns the value of `quantization_config` in config.json.

    Args:
      format: The format of codes and scales.
      unquantized: The names of the linear layers without codes.
    """
    skipped = list(unquantized)
    if format == "fp8-block":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            # transformers reads the first key, vLLM the second.
            "modules_to_not_convert": skipped,
            "ignored_layers": skipped,
        }
    kind = {"num_bits": 8, "type": "float", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": skipped,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": kind | {"strategy": "channel", "dynamic": False},
                "input_activations": kind | {"strategy": "token", "dynamic": True},
                "output_activations": None,
            }
        },
    }


def scheme_in(values: Mapping[str, Any]) -> Scheme | None:
    """Returns the scheme that a config.json names, or None if there are no codes.

    Raises:
      ValueError: If the scheme is not supported.
    """
    config = values.get("quantization_config", values.get("compression_config"))
    if config is None:
        return None
    if not isinstance(config, dict):
        raise _refused(config)
    method = config.get("quant_method")
    if method == "fp8":
        return _fine_grained(config)
    if method == "compressed-tensors" and config.get("format") == "float-quantized":
        return _compressed(config)
    raise _refused({"quant_method": method, "format": config.get("format")})


def _fine_grained(config: Mapping[str, Any]) -> Scheme:
    block = config.get("weight_block_size")
    if block is None:
        raise _refused({"quant_method": "fp8", "weight_block_size": None})
    return Scheme(suffix="_scale_inv", block=_sides(block))


def _compressed(config: Mapping[str, Any]) -> Scheme:
    try:
        (group,) = config["config_groups"].values()
        weights = group["weights"]
        strategy, kind = weights["strategy"], (weights["num_bits"], weights["type"])
    except (AttributeError, KeyError, TypeError, ValueError):
        raise _refused(config) from None
    if kind != (8, "float") or strategy not in ("channel", "block"):
        raise _refused({"strategy": strategy, "num_bits, type": kind})
    block = _sides(weights.get("block_structure")) if strategy == "block" else (1, None)
    return Scheme(suffix="_scale", block=block)


def _sides(block: Any) -> tuple[int, int]:
    sides = block if isinstance(block, list) else []
    if len(sides) != 2 or not all(type(s) is int and 0 < s < 2**20 for s in sides):
        raise ValueError(f"blocks of scales must have two sizes, got {shown(block)}")
    return sides[0], sides[1]


def _refused(value: Any) -> ValueError:
    return ValueError(
        "quantization_config in config.json must be that of FP8 with scales of blocks "
        f"or of rows, got {shown(value)}"
    )
