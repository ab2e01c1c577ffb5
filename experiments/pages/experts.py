"""The section on grouped matmuls for mixtures of experts."""

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
