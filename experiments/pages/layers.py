"""Sections on layers, for experiments/README.md and docs/pages/models-hf.md.

The layers are this library's own and layers in plain Flax.
"""

import functools
import textwrap
from typing import Any

from experiments.bench.starts import STAGES
from experiments.common.results import NEWEST_JAX, OLDEST_JAX, load
from experiments.common.tables import Column, by_column, grouped, markdown
from experiments.pages.release import times_bf16
from experiments.pages.sections import section
from experiments.pages.speed import time_of

_VERSIONS = (OLDEST_JAX, NEWEST_JAX)
_MS = "forward_backward_ms"
# The results file of a Hugging Face model's layer, and its name there, by title.
_MODELS = {
    "Qwen3-8B's": ("layer_qwen3", "qwen"),
    "as Gemma 2's, heads of 128": ("layer_gemma2", "gemma 2"),
    "the same with `coat.attention`": ("layer_gemma2", "gemma 2, coat.attention"),
    "as Gemma 2's, heads of 256": ("layer_gemma2_head_256", "gemma 2"),
    "the same with `coat.attention`, heads of 256": (
        "layer_gemma2_head_256",
        "gemma 2, coat.attention",
    ),
}
# The measured cases of each of these layers, by title.
_OF_MODELS = {
    "plain Flax, BF16": "bf16",
    "plain Flax in two lines": "both",
    "this library's, `bf16`": "own layer, bf16",
    "this library's, `coat`": "own layer",
}


def versions() -> str:
    """Returns the section on one Llama layer with the oldest and the newest JAX."""
    results = [load("bench_layer", f"bench_layer_h100_jax_{v}") for v in _VERSIONS]
    old, new = ({row["case"]: row for row in f["rows"]} for f in results)
    shape = next(iter(new.values()))
    text = (
        "**One Llama layer with the oldest and the newest JAX** (`bench_layer`): the "
        f"layer of Llama-3-8B (hidden {shape['hidden']:,}, {shape['intermediate']:,}, "
        f"{shape['kv_heads']} key heads, batch {shape['batch']}, sequence "
        f"{shape['seq']:,}), both on the same {results[0]['device']['name']}: "
        "milliseconds of forward, of backward and of both, and times "
        "`bf16`."
    )
    columns = (
        Column("", "case"),
        Column("saved", "saved_units", "{:.1f}U"),
        *(
            Column(f"JAX {version}", lambda row, of=of: _times(of[row["case"]]))
            for version, of in zip(_VERSIONS, (old, new), strict=True)
        ),
    )
    return section(text, markdown(columns, new.values()))


def _times(row: dict[str, Any]) -> str:
    return f"{row['forward_ms']:.2f} + {row['backward_ms']:.2f} = {time_of(row)}"


def table_6() -> str:
    """Returns the section on the paper's table 6, with the oldest and newest JAX."""
    results = [load("bench_layer", f"bench_layer_table_6_jax_{v}") for v in _VERSIONS]
    old, new = ({_case_of(row): row for row in f["rows"]} for f in results)
    shapes = list(dict.fromkeys((hidden, seq) for _, hidden, seq in new))
    times = (old[key][_MS] / row[_MS] for key, row in new.items())
    furthest = max(abs(ratio - 1) for ratio in times)
    text = (
        f"The layers of the paper's table 6 on one {results[0]['device']['name']} "
        f"(batch {results[0]['rows'][0]['batch']}): milliseconds of forward and "
        f"backward with JAX {_VERSIONS[0]} and {_VERSIONS[1]}, and times `bf16` with "
        f"each. The versions differ by {furthest:.1%} at most."
    )

    def pair(case: str, shape: tuple[int, int]) -> tuple[float, ...]:
        rows = old[case, *shape], new[case, *shape]
        return tuple(row[key] for key in (_MS, "ratio_to_bf16") for row in rows)

    columns = [Column("", lambda case: case)]
    for hidden, seq in shapes:
        title = f"hidden {hidden:,}, sequence {seq:,}"
        value = functools.partial(pair, shape=(hidden, seq))
        columns.append(Column(title, value, "{:.2f}, {:.2f} ({:.2f}, {:.2f})"))
    return section(text, markdown(columns, dict.fromkeys(case for case, *_ in new)))


def _case_of(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["case"], row["hidden"], row["seq"]


def foreign() -> str:
    """Returns the section on layers that are written in plain Flax."""
    newest = load("bench_foreign")
    text = (
        "**Layers of plain Flax** (`bench_foreign`): milliseconds of forward and "
        f"backward in BF16 ({_size_of(newest)}), times `bf16`, and what is saved. "
        "`both` is "
        "`coat.fp8_remat` around a layer whose `dot_general` is "
        "`coat.fp8_dot_general`, `attention again` has `rerun_attention=True`, and "
        "`fp8` is the layer converted by `coat.fp8`. `own layer` is this library's "
        "layer in its `coat` recipe."
    )
    oldest = load("bench_foreign", f"bench_foreign_jax_{_VERSIONS[0]}")
    h200 = load("bench_foreign", "bench_foreign_h200")
    vit = load("bench_foreign", "bench_foreign_vit")
    odd = (
        f"A vision transformer's layer of an odd length ({_size_of(vit)}) that writes "
        "its attention out in plain matmuls and a softmax (`bench_foreign_vit`), which "
        "cuDNN's flash attention replaces in all cases but `bf16`:"
    )
    tables = (*_foreign(h200), *_foreign(oldest), *_foreign(newest))
    return section(text, *tables, odd, *_foreign(vit))


def _size_of(results: dict[str, Any]) -> str:
    """Returns a phrase with the shape of the layers of a results file."""
    shape = results["rows"][0]
    return (
        f"hidden {shape['hidden']:,}, batch {shape['batch']}, sequence {shape['seq']:,}"
    )


def _foreign(results: dict[str, Any]) -> tuple[str, str]:
    """Returns a results file's device and JAX version as a sentence, and its table."""
    layers = by_column(results["rows"], "layer", "case")
    cases = dict.fromkeys(case for row in layers.values() for case in row)
    columns = [Column("", lambda layer: layer[0])]
    for case in cases:
        value = functools.partial(_foreign_cell, case=case)
        columns.append(Column(f"`{case}`", value))
    return (
        f"One {results['device']['name']} with JAX {results['versions']['jax']}.",
        markdown(columns, layers.items()),
    )


def _foreign_cell(layer: tuple[str, dict[str, dict[str, Any]]], case: str) -> str:
    row = layer[1].get(case)
    return "" if row is None else f"{time_of(row)}, {row['saved_units']:.1f}U"


def offloaded() -> str:
    """Returns the section on activations that are offloaded to the host."""
    results = load("bench_offload")
    rows = by_column(results["rows"], "case", "offloads")
    text = (
        "**Activations that wait on the host** (`bench_offload`): milliseconds of "
        f"forward and backward of {results['rows'][0]['layers']} Llama layers of plain "
        f"Flax in a scan on one {results['device']['name']}, with a policy that "
        "offloads the results of matmuls, and with one that keeps them on the device; "
        "what waits on the host, and what the program takes on the device beside its "
        "arguments."
    )

    def mib(of: str, offloads: bool) -> Any:
        return lambda case: rows[case][offloads][of] / 2**20

    columns = (
        Column("", lambda case: f"`{case}`"),
        Column("kept, ms", lambda case: rows[case][False]["ms"], "{:.0f}"),
        Column("device, MiB", mib("temporary_bytes", False), "{:,.0f}"),
        Column("offloaded, ms", lambda case: rows[case][True]["ms"], "{:.0f}"),
        Column("device, MiB", mib("temporary_bytes", True), "{:,.0f}"),
        Column("host, MiB", mib("host_bytes", True), "{:,.0f}"),
    )
    return section(text, markdown(columns, rows))


def attention() -> str:
    """Returns the section on the speed of attention kernels."""
    results = load("bench_attention")
    cases = grouped(results["rows"], _attention_case)
    first = results["rows"][0]
    text = (
        "**Attention** (`bench_attention`): milliseconds of causal attention in BF16 "
        f"(batch {first['batch']}; 32 query heads of 128 or 16 of 256, and 8 key "
        f"heads) on one {results['device']['name']}, for `pallas_kernels.attention`, "
        "cuDNN's attention and XLA's. cuDNN's has no soft caps, and reads a mask for "
        "packed documents. XLA's runs again in backward."
    )
    columns = [
        Column(title, lambda case, j=j: case[0][j], form)
        for j, (title, form) in enumerate(_ATTENTION_COLUMNS.items())
    ]
    for title, of in _ATTENTIONS.items():
        value = functools.partial(_attention_ms, of=of)
        columns.append(Column(title, value, "{:.2f}", missing=""))
    return section(text, markdown(columns, cases.items()))


_ATTENTION_COLUMNS = {
    "": "{}",
    "head": "{}",
    "sequence": "{:,}",
    "soft cap": "{}",
    "window": "{}",
    "documents": "{}",
}
_ATTENTIONS = {"the kernel": "default", "cuDNN": "cudnn", "XLA": "xla"}


def _attention_case(row: dict[str, Any]) -> tuple[Any, ...]:
    keys = ("passes", "head_dim", "seq", "softcap", "window", "documents")
    return tuple(row[key] for key in keys)


def _attention_ms(case: tuple[Any, list[dict[str, Any]]], of: str) -> float | None:
    return next((row.get("ms") for row in case[1] if row["of"] == of), None)


def of_models() -> str:
    """Returns the part of docs/pages/models-hf.md on the speed of layers."""
    named = {
        title: by_column(load("hf", file)["rows"], "layer", "case")[layer]
        for title, (file, layer) in _MODELS.items()
    }
    results = load("hf", "layer_qwen3")
    size = results["rows"][0]
    columns = [Column("Layer", lambda layer: layer[0])]
    for title, case in _OF_MODELS.items():
        columns.append(Column(title, functools.partial(_foreign_cell, case=case)))
    text = (
        "Milliseconds of forward and backward of a layer on one "
        f"{results['device']['name']} with JAX {results['versions']['jax']}, in "
        "brackets how many times as fast as plain Flax in BF16, and what is saved "
        f"(hidden {size['hidden']:,}, batch {size['batch']}, sequence "
        f"{size['seq']:,}; 1U is the size of the residual stream in BF16):"
    )
    training = (
        "A training of Llama-3-8B on sequences of 4,096 tokens has with `coat` "
        f"{times_bf16():.2f} times the tokens/s that it has with BF16, each at its "
        "fastest batch."
    )
    table = markdown(columns, named.items())
    fill = functools.partial(textwrap.fill, width=95)
    return section(fill(text), table, fill(training), fill(_loading()))


def _loading() -> str:
    """Returns sentences on how fast a checkpoint is loaded, and in how much memory."""
    results = load("hf", "loading")
    rows = by_column(results["rows"], "preset", "case")["llama3-8b"]
    read, loaded = rows["read"], rows["load"]
    return (
        f"`hf.load` places the {loaded['file_gib']:.0f} GiB of Llama-3-8B on a GPU "
        f"with {loaded['gib_per_s']:.1f} GiB/s, where reading the files alone reaches "
        f"{read['gib_per_s']:.1f}. Meanwhile the process grows by "
        f"{loaded['host_growth_gib']:.1f} GiB; the largest tensor has "
        f"{loaded['largest_tensor_gib']:.1f}."
    )


def compilation() -> str:
    """Returns the section on the time to compile unrolled layers."""
    results = load("bench_compile")
    programs = [row for row in results["rows"] if row["case"] != "trace"]
    (trace,) = (row for row in results["rows"] if row["case"] == "trace")
    size = programs[0]
    text = (
        "**Compiling unrolled layers** (`bench_compile`): CPU seconds to trace, lower "
        "and compile a training step of plain Flax layers with AdamW for H200s (hidden "
        f"{size['hidden']:,}, {size['intermediate']:,}, JAX "
        f"{results['versions']['jax']}). `both` is as above with `coat.fp8_adamw`, and "
        "`bf16, remat` has a `jax.checkpoint` of matmuls. A first layer takes "
        f"{trace['first_trace_s']:.2f} s to trace, and each further one "
        f"{trace['further_trace_s']:.3f} s."
    )
    groups: dict[tuple[int, int], dict[str, float]] = {}
    for row in programs:
        seconds = groups.setdefault((row["layers"], row["gpus"]), {})
        seconds[row["case"]] = row["cpu_s"]
    columns = [
        Column("layers", lambda group: group[0][0]),
        Column("GPUs", lambda group: group[0][1]),
    ]
    for case in dict.fromkeys(row["case"] for row in programs):
        value = functools.partial(_seconds, case=case)
        columns.append(Column(f"`{case}`", value, "{:.0f} ({:.1f})"))
    note = "In brackets over `bf16, remat`."
    return section(text, markdown(columns, groups.items()), note, *_starts())


def _starts() -> tuple[str, str]:
    """Returns a text and a table on processes that share a compilation cache."""
    results = load("bench_starts")
    rows = results["rows"]
    text = (
        "**Starts of a training** (`bench_starts`): seconds on the clock until a step "
        f"of {rows[0]['model']} is compiled on one {results['device']['name']} with "
        f"JAX {results['versions']['jax']}, in a first process and in a second one "
        "that finds the first one's files in `JAX_COMPILATION_CACHE_DIR`."
    )
    stages = [stage for stage in STAGES if f"{stage}_s" in rows[0]]
    columns = (
        Column("", "case", "`{}`"),
        Column("start", "start"),
        *(Column(stage, f"{stage}_s", "{:.1f}") for stage in stages),
        Column("in all", "seconds", "{:.1f}"),
    )
    return text, markdown(columns, rows)


def _seconds(
    group: tuple[tuple[int, int], dict[str, float]], case: str
) -> tuple[float, float]:
    """Returns the CPU seconds of `case` and their ratio to the case "bf16, remat"."""
    _, seconds = group
    return seconds[case], seconds[case] / seconds["bf16, remat"]
