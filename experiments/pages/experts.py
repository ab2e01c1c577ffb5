"""The section on grouped matmuls for mixtures of experts."""

from typing import Any

from experiments.common.results import load
from experiments.common.tables import Column, markdown
from experiments.pages.sections import section

_COLUMNS = {
    "FP8, random groups": "random_tflop_per_s",
    "FP8, equal": "equal_tflop_per_s",
    "FP8, Zipf": "zipf_tflop_per_s",
    "dense FP8": "dense_fp8_tflop_per_s",
    "our BF16": "bfloat16_tflop_per_s",
    "XLA's batched BF16": "xla_batched_bfloat16_tflop_per_s",
    "JAX's Mosaic BF16": "jax_mosaic_bfloat16_tflop_per_s",
    "`jax.lax.ragged_dot`": "lax_ragged_dot_bfloat16_tflop_per_s",
}
_NAMES = {
    "forward": "forward",
    "input_gradient": "input gradients",
    "weight_gradient": "weight gradients",
    "ragged_dot": "`coat.fp8_ragged_dot`",
}


_LAYERS = {
    "`coat`": "coat",
    "`te`": "te",
    "batched BF16 einsum": "bf16_batched_einsum_gates_recomputed",
    "BF16 `jax.lax.ragged_dot`": "bf16_ragged_dot_gates_recomputed",
}


def layers() -> str:
    """Returns the section on whole layers of experts."""
    files = [load("moe", f"layers_{name}") for name in ("qwen3", "mixtral")]
    rows = [row for results in files for row in results["rows"]]
    columns = (
        Column("tokens, experts, top k, hidden, inner", _shape),
        *(
            Column(title, lambda row, n=name: _of(row, n))
            for title, name in _LAYERS.items()
        ),
    )
    text = (
        "**Layers of experts** (`moe`): milliseconds of forward and backward, the "
        "norm, the router and the quantization of weights included, and MiB saved in "
        f"between, on one {files[0]['device']['name']} with JAX "
        f"{files[0]['versions']['jax']}. Groups are a router's, except for the batched "
        "einsum's: there every expert has as many tokens as any other, whatever the "
        "router says. Layers in BF16 compute gates again in backward."
    )
    return section(text, markdown(columns, rows))


def _shape(row: dict[str, Any]) -> str:
    names = ("tokens", "experts", "top_k", "hidden", "inner")
    return ", ".join(f"{row[name]:,}" for name in names)


def _of(row: dict[str, Any], name: str) -> str:
    if f"{name}_ms" not in row:
        return ""
    return f"{row[f'{name}_ms']:.1f} ({row[f'{name}_saved_mib']:,.0f})"


def grouped() -> str:
    """Returns the section on the speed of grouped matmuls."""
    results = load("moe")
    rows = [row for row in results["rows"] if row["case"] in _NAMES]
    shape = ("rows", "experts", "k", "n")
    columns = [
        Column("Matmul", lambda row: _NAMES[row["case"]]),
        Column("rows, experts, k, n", shape, "{:,}, {}, {:,}, {:,}"),
        *(Column(title, key, "{:,.0f}") for title, key in _COLUMNS.items()),
    ]
    text = (
        "**Grouped matmuls** (`moe`): TFLOP/s on one "
        f"{results['device']['name']} with JAX {results['versions']['jax']}, the list "
        "of tiles included. `coat.fp8_ragged_dot` is a forward pass with the "
        "quantization of tokens and weights."
    )
    return section(text, markdown(columns, rows))
