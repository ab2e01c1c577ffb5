"""Sections on time and memory."""

from statistics import geometric_mean, median
from typing import Any

from experiments.bench.e2e import BY_KIND
from experiments.bench.kernels import case_of
from experiments.bench.model_step import Model
from experiments.common.results import NEWEST_JAX, load
from experiments.pages.image import markdown_image

# The ratios of a row of `bench_e2e` on several GPUs, with their formats.
_RATIOS = {"one_gpu": ".1%", "bf16": ".2f", "best_bf16": ".2f"}
# Rows of gates that are shorter or longer than those of most models.
_ROWS = (
    *("16384 x 768", "16384 x 1408"),
    *("8192 x 17920", "8192 x 26624", "8192 x 28672"),
)
# Kernels that take as long are measured to within a few percent.
_LONG_MS = 0.1


def end_to_end() -> str:
    """Returns the section on whole training steps on one GPU."""
    results = load("bench_e2e")
    first = results["rows"][0]
    lines = [
        f"**Training Llama-2-7B on one GPU** (`bench_e2e`): BF16 parameters, sequences "
        f"of {first['seq']:,} tokens, one {results['device']['name']}. `bf16` and `te` "
        "have `optax.adamw` with float32 moments, `coat` and `coat_max` "
        "`coat.fused_update`. Times its best: over the fastest `bf16` row here.",
        "",
        "| | batch | tokens/s | times `bf16` | times its best | optimizer "
        "| saved activations | peak |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in results["rows"]:
        found = f"| {row['case']} | {row['batch']} "
        if "tokens_per_s" in row:
            ratio = row.get("ratio_to_bf16")
            found += f"| {row['tokens_per_s']:,.0f} "
            found += f"| {'-' if ratio is None else format(ratio, '.2f')} "
            found += f"| {row['ratio_to_best_bf16']:.2f} "
        else:
            found += f"| {row['error']} | - | - "
        sizes = (row[f"{of}_gib"] for of in ("optimizer", "activations", "peak"))
        lines.append(found + " ".join(f"| {size:.1f} GiB" for size in sizes) + " |")
    return "\n".join([*lines, ""])


def several_gpus() -> str:
    """Returns the section on training steps of several GPUs with FSDP."""
    text = (
        "**Several GPUs**: training steps fully sharded on GPUs of one machine, by "
        "`jax.jit` but for `bf16, shard_map`, where the user's program gathers the "
        "weights. Batches, tokens per second and sizes are those of one GPU. Ratios to "
        "one GPU and to `bf16` are at the same batch, the last one is to the fastest "
        "`bf16` row of the model on as many GPUs."
    )
    return "\n".join([text, "", *map(_of_kind, BY_KIND.values()), _visible()])


def _of_kind(name: str) -> str:
    """Returns the table of a results file of one kind of GPU."""
    results = load("bench_e2e", name)
    lines = [
        f"{results['device']['name']} (`{name}`), JAX {results['versions']['jax']}:",
        "",
        "| | | GPUs | batch | tokens/s | of one GPU's | times `bf16` | times its best "
        "| optimizer | saved | peak |",
        "| --- |" + " --- |" * 10,
    ]
    model = None
    for row in results["rows"]:
        before, model = model, Model.of_row(row).name
        cells = [row.get("error"), "-", "-", "-"]
        if "tokens_per_s" in row:
            cells = [f"{row['tokens_per_s_per_gpu']:,.0f}"]
            for name, spec in _RATIOS.items():
                ratio = row.get(f"ratio_to_{name}")
                cells.append("-" if ratio is None else format(ratio, spec))
        case = row["case"]
        if row.get("xla_flags"):
            case += f", with `{row['xla_flags']}`"
        sizes = (row[f"{of}_gib"] for of in ("optimizer", "activations", "peak"))
        cells += [f"{size:.1f} GiB" for size in sizes]
        name = "" if model == before else model
        where = f"{row['gpus']} | {row['batch']}"
        lines.append(f"| {name} | {case} | {where} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _visible() -> str:
    """Returns a sentence on one GPU where others are visible too."""
    found = [load("bench_e2e", f"bench_e2e_visible_{count}") for count in (1, 2)]
    (row,), (beside,) = (results["rows"] for results in found)
    alone, ours = (r["tokens_per_s"] for r in (row, beside))
    return (
        f"A training on one {found[0]['device']['name']} has the same speed where the "
        f"process sees a second one (`bench_e2e_visible_1`, `bench_e2e_visible_2`): "
        f"`coat` trains {row['layers']} layers of Llama-2-7B at batch {row['batch']} "
        f"with {alone:,.0f} tokens/s alone and {ours:,.0f} beside another "
        f"({ours / alone - 1:+.1%}).\n"
    )


def estimates() -> str:
    """Returns the section on predicted memory."""
    results = load("estimate")
    lines = [
        "**Predicted memory** (`estimate`): `python -m experiments.estimate` predicts "
        "the GiB of a training step by kind, and the largest batch that fits, without "
        "a GPU. Predictions stand here beside measured peaks: the device's, or else "
        f"the compiled step's. {_grown(results['rows'])}",
        "",
        "| | GPUs | batch | parameters, gradients | optimizer | saved | the rest "
        "| predicted | measured | error |",
        "| --- |" + " --- |" * 9,
    ]
    rows = {(r["model"], r["case"], r["gpus"], r["batch"]): r for r in results["rows"]}
    for row in rows.values():
        measured = row["device_peak_gib"] or row["step_peak_gib"]
        case = f"{row['model']}, {row['case']}"
        model = row["parameters_gib"] + row["gradients_gib"]
        rest = row["workspace_gib"] + row["gathered_gib"] + row["logits_gib"]
        lines.append(
            f"| {case} | {row['gpus']} | {row['batch']} | {model:.1f} "
            f"| {row['optimizer_gib']:.1f} | {row['saved_gib']:.1f} | {rest:.1f} "
            f"| {row['peak_gib']:.1f} | {measured:.1f} | {row['error_percent']:+.1f}% |"
        )
    return "\n".join([*lines, ""])


def _grown(rows: list[dict[str, Any]]) -> str:
    """Returns how the optimizer's state has changed since the peaks were measured."""
    grown = max(row["optimizer_gib"] - row["measured_optimizer_gib"] for row in rows)
    return (
        f"The FP8 state of today is up to {grown:.2f} GiB larger than the measured one "
        "was, so that predictions without it would be lower by as much."
    )


def layer() -> str:
    """Returns the section on one Llama layer."""
    results = load("bench_layer")
    rows = {(r["case"], r["hidden"], r["seq"]): r for r in results["rows"]}
    shapes = list(dict.fromkeys(key[1:] for key in rows))
    titles = [f"{hidden}, {seq}" for hidden, seq in shapes]
    lines = [
        f"**One Llama layer** (`bench_layer`): milliseconds of forward and backward "
        f"with BF16 weights and batch 4 on one {results['device']['name']}, all cases "
        "in turns, and times `bf16`, by hidden size and sequence. `bf16` is what "
        "`jax.vjp` saves, behind it are policies of `jax.checkpoint` and "
        "`coat.fp8_remat` of the same layer.",
        "",
        "| | saved | " + " | ".join(titles) + " |",
        "| --- | --- |" + " --- |" * len(shapes),
    ]
    for case in dict.fromkeys(key[0] for key in rows):
        of_case = [rows[case, *shape] for shape in shapes]
        times = " | ".join(
            f"{row['forward_backward_ms']:.2f} ({row['ratio_to_bf16']:.2f})"
            for row in of_case
        )
        saved = max(row["saved_units"] for row in of_case)
        lines.append(f"| {case} | {saved:.1f}U | {times} |")
    image = markdown_image("Saved activations and time", "bench_layer", "bench_layer")
    return "\n".join([*lines, "", image, ""])


def activations() -> str:
    """Returns the section on saved activations."""
    results = load("activation_memory")
    shape = results["shape"]
    lines = [
        f"**Saved activations of one Llama layer** (`activation_memory`): hidden "
        f"{shape['hidden']}, batch {shape['batch']}, sequence {shape['seq']}, counted "
        f"on one {results['device']['name']}; 1U is batch x sequence x hidden x 2 "
        "bytes. `bf16` is what `jax.vjp` saves without any `jax.checkpoint`.",
        "",
        "| | MiB | U | U in the paper |",
        "| --- | --- | --- | --- |",
    ]
    for row in results["rows"]:
        paper = "-" if row["paper_units"] is None else row["paper_units"]
        name, mib, units = row["recipe"], row["mib"], row["units"]
        lines.append(f"| `{name}` | {mib:.0f} | {units:.2f} | {paper} |")
    return "\n".join([*lines, ""])


def kernels() -> str:
    """Returns the section on kernels."""
    results = load("bench_kernels")
    rows = [row for row in results["rows"] if "ms" in row]
    quick = [row for row in rows if "share_of_copy" in row]
    shape = quick[-1]["shape"]
    lines = [
        f"**The kernels** (`bench_kernels`): arrays of {shape} in BF16 on one "
        f"{results['device']['name']}, in turns with what XLA makes of the same "
        "operation; GB/s count the fewest bytes that it needs.",
        "",
        *_elementwise([row for row in quick if row["shape"] == shape]),
        "",
        *_more_kernels(),
        "",
        "Matrix products of Llamas' layers at 8,192 and 16,384 tokens, and of 8192^3, "
        "beside cuBLASLt's FP8 call through XLA: the mean over a row's shapes, and the "
        "worst of them. Where XLA is faster XLA runs. Heads are compared with "
        "cuBLASLt's product and XLA's rotary embeddings and splitting behind it, added "
        "ones with an addition behind it. These two and blocks have more scales than "
        "what they are compared with. Kernels run one after the other, at what the "
        f"chip may draw{_rested(rows)}.",
        "",
        "| | shapes | TFLOP/s | times cuBLASLt | at worst |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, found in _grouped_products(rows).items():
        rates = [row["tflop_per_s"] for row in found]
        ratios = [row["ratio_to_xla"] for row in found]
        lines.append(
            f"| {name} | {len(found)} | {geometric_mean(rates):,.0f} "
            f"| {geometric_mean(ratios):.2f} | {min(ratios):.2f} |"
        )
    return "\n".join([*lines, ""])


def _elementwise(rows: list[dict[str, Any]]) -> list[str]:
    """Returns a table of kernels that are not matmuls."""
    lines = [
        "| | ms | GB/s | of a device copy's | times XLA |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        lines.append(
            f"| {row['kernel']} | {row['ms']:.3f} | {row['gb_per_s']:,.0f} "
            f"| {row['share_of_copy']:.2f} | {row['ratio_to_xla']:.2f} |"
        )
    return lines


def _more_kernels() -> list[str]:
    """Returns the lines on activations without a product, other rows, and versions."""
    results = load("bench_kernels", "bench_kernels_h100")
    newest = load("bench_kernels", f"bench_kernels_h100_jax_{NEWEST_JAX}")
    shape = "16384 x 8192"
    lone = [row for row in results["rows"] if row["shape"] == shape]
    others = [
        row | {"kernel": f"{row['kernel']}, {row['shape']}"}
        for row in results["rows"]
        if row["kernel"].endswith("to rows") and row["shape"] in _ROWS
    ]
    others.sort(key=lambda row: int(row["shape"].split(" x ")[1]))
    return [
        f"Activations without a product, {shape} on one {results['device']['name']} "
        "(`bench_kernels_h100`):",
        "",
        *_elementwise(lone),
        "",
        "Gates with a scale for each token, of short and of long rows on such GPUs:",
        "",
        *_elementwise(others),
        "",
        _on_both_versions(results, newest),
    ]


def _on_both_versions(oldest: dict[str, Any], newest: dict[str, Any]) -> str:
    """Returns a sentence on the kernels' times with two versions of JAX."""
    times = {case_of(row): row for row in oldest["rows"]}
    ratios: dict[bool, list[float]] = {False: [], True: []}
    for row in newest["rows"]:
        other = times[case_of(row)]
        longer = min(row["ms"], other["ms"]) >= _LONG_MS
        ratios[longer].append(row["ms"] / other["ms"])
    short, long = ratios.values()
    new, old = (found["versions"]["jax"] for found in (newest, oldest))
    return (
        f"With JAX {new} on the GPU of the short rows (`bench_kernels_h100_jax_{new}`) "
        f"{len(long)} kernels that take at least {_LONG_MS:g} ms take {min(long):.2f} "
        f"to {max(long):.2f} times as long as with {old}, at the median "
        f"{median(long):.3f}. Shorter ones vary more from program to program: "
        f"{min(short):.2f} to {max(short):.2f} times, median {median(short):.3f}."
    )


def _rested(rows: list[dict[str, Any]]) -> str:
    """Returns a clause with the TFLOP/s measured with a pause before each call."""
    rates = {
        row["kernel"]: f"{row['rested_tflop_per_s']:,.0f}"
        for row in rows
        if "rested_tflop_per_s" in row
    }
    if not rates:
        return ""
    listed = ", ".join(f"{kernel} {rate}" for kernel, rate in rates.items())
    return f"; where it rests before each call, 8192^3 has {listed} TFLOP/s"


def _grouped_products(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Groups the matmul rows by kernel and by the last part of the row's name.

    The last part is the pass of a layer's matmul, or the cube of 8192^3.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if "tflop_per_s" not in row:
            continue
        of = row["name"].rsplit(", ", 1)[-1]
        of = "8192^3" if of == "cube" else of
        found.setdefault(f"{row['kernel']}, {of}", []).append(row)
    return found
