"""Sections on mixtures of experts: grouped matmuls, layers, and several GPUs."""

from collections.abc import Mapping
from typing import Any

from experiments.common.results import load
from experiments.common.tables import Column, markdown
from experiments.pages.sections import section
from experiments.pretrain import comparison

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


_MODELS = {"qwen3": "Qwen3-30B-A3B", "mixtral": "Mixtral 8x7B"}
_LAYERS = {
    "`coat`": "coat",
    "`te`": "te",
    "batched BF16 einsum": "bf16_batched_einsum_gates_recomputed",
    "BF16 `jax.lax.ragged_dot`": "bf16_ragged_dot_gates_recomputed",
    "two lines": "two_lines",
}
# The results files of layers on two GPUs, by the collective that exchanges tokens.
_EXCHANGES = {
    "all-to-all of chunks": "expert_parallel",
    "`jax.lax.ragged_all_to_all`": "expert_parallel_ragged",
}


def of_models() -> str:
    """Returns the text and the table of two models' layers in docs/pages/experts.md."""
    files = {model: load("moe", f"layers_{name}") for name, model in _MODELS.items()}
    rows = {model: results["rows"][0] for model, results in files.items()}
    (device,) = {results["device"]["name"] for results in files.values()}

    def cell(model: str, name: str) -> str:
        row = rows[model]
        ms = row[f"{name}_ms"]
        times = _fastest_bf16(row) / ms
        return f"{ms:.1f} ({times:.2f}), {row[f'{name}_saved_mib']:,.0f}"

    columns = (
        Column("", lambda model: f"{model}, {rows[model]['tokens']:,} tokens"),
        *(
            Column(title, lambda model, n=name: cell(model, n))
            for title, name in _LAYERS.items()
            if "ragged" not in title
        ),
    )
    text = f"Milliseconds on one {device}, the speed relative to the fastest BF16 in "
    text += "parentheses, and MiB saved for backward."
    return f"{text}\n\n{markdown(columns, list(rows))}\n"


def _fastest_bf16(row: Mapping[str, Any]) -> float:
    """Returns the milliseconds of the fastest layer in BF16."""
    return min(
        ms
        for name, ms in row.items()
        if name.startswith("bf16") and name.endswith("ms")
    )


def layers() -> str:
    """Returns the section on the time and memory of layers of experts."""
    files = [load("moe", f"layers_{name}") for name in _MODELS]
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
        "router says. Layers in BF16 compute gates again in backward, and `two lines` "
        "is `coat.fp8` of a layer with `jax.lax.ragged_dot`."
    )
    bars = [bar for results in files for bar in results["bars"]]
    targets = (
        Column("Target", "name"),
        Column("", "target"),
        Column("measured", "measured", "{:.3f}"),
        Column("holds", lambda bar: "yes" if bar["holds"] else "no"),
    )
    return section(text, markdown(columns, rows), markdown(targets, bars))


def training() -> str:
    """Returns a paragraph on a small model of experts, with `coat` and with `bf16`."""
    name = "pretrain_moe-300m_compared"
    results = load("pretrain", name)
    (bar,) = results["bars"]
    gaps = comparison.gaps(results["rows"], "val_loss")["coat"]
    first = results["rows"][0]
    return section(
        f"**A small model of experts** (`{name}`): {first['parameters'] / 1e6:.0f}M "
        f"parameters, {results['steps']:,} steps, {len(gaps)} seeds. The validation "
        f"loss of `coat` minus that of `bf16` is {comparison.interval(gaps)} percent "
        f"(asked for: {bar['target']}), with a 95% interval."
    )


def parallel() -> str:
    """Returns the section on experts that are sharded over two GPUs."""
    files = {title: load("moe", name) for title, name in _EXCHANGES.items()}
    rows = [
        {"exchange": title} | row
        for title, results in files.items()
        for row in results["rows"]
        if "skipped" not in row
    ]
    columns = (
        Column("exchange", "exchange"),
        Column("recipe", "recipe", "`{}`"),
        Column("`buffer`", "buffer"),
        Column("two GPUs", "spread_ms", "{:.1f}"),
        Column("one GPU", "one_gpu_ms", "{:.1f}"),
        Column("largest error", "largest_error", "{:.1%}"),
    )
    results = next(iter(files.values()))
    text = (
        "**Experts on two GPUs** (`expert_parallel`, `expert_parallel_ragged`): "
        "milliseconds of forward and backward of the layer with "
        f"{rows[0]['experts']} experts and {rows[0]['tokens']:,} tokens on "
        f"{results['device']['count']} {results['device']['name']} with JAX "
        f"{results['versions']['jax']}. One GPU has all experts, and as many tokens as "
        "each of two has. Errors are relative to one GPU's results for all tokens. "
        "Without `buffer` nothing was timed."
    )
    return section(text, markdown(columns, rows), _whole_model())


def _whole_model() -> str:
    """Returns a sentence on training steps of all of Qwen3-30B-A3B on two GPUs."""
    results = load("bench_e2e", "bench_e2e_experts")
    (row,) = results["rows"]
    return (
        "A step of every parameter of Qwen3-30B-A3B (`bench_e2e_experts`, "
        f"`{row['case']}`) with `{row['mesh']}`, `buffer` {row['buffer']} and "
        f"{row['batch']} sequences of {row['seq']:,} tokens a GPU takes "
        f"{row['ms_per_step']:,.0f} ms on two {results['device']['name']}: "
        f"{row['tokens_per_s']:,.0f} tokens/s, {row['tokens_per_s_per_gpu']:,.0f} a "
        f"GPU, with a peak of {row['peak_gib']:.1f} GiB on each."
    )


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
