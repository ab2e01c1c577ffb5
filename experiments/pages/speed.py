"""Sections on time and memory of training steps, layers and kernels."""

import itertools
from collections.abc import Callable, Iterable
from statistics import geometric_mean, median
from typing import Any

from experiments.bench.e2e import BY_KIND
from experiments.bench.kernels import case_of
from experiments.bench.model_step import ModelSize
from experiments.common.results import NEWEST_JAX, load
from experiments.common.tables import Column, grouped, markdown
from experiments.pages.sections import markdown_image, section

_BATCH = Column("batch", "batch")
# Columns of tables of training steps: ratios to other rows, and parts of the memory.
_RATIOS = (
    Column("times `bf16`", "ratio_to_bf16", "{:.2f}"),
    Column("times its best", "ratio_to_best_bf16", "{:.2f}"),
)
_OPTIMIZER = Column("optimizer", "optimizer_gib", "{:.1f} GiB")
_PEAK = Column("peak", "peak_gib", "{:.1f} GiB")
# Shapes of gates with shorter or longer rows than most models have.
_ROWS = (
    *("16384 x 768", "16384 x 1408"),
    *("8192 x 17920", "8192 x 26624", "8192 x 28672"),
)
# Tokens per second of each of eight H100s, by sequence, that torchtitan has published.
_TORCHTITAN_PAGE = (
    "https://github.com/pytorch/torchtitan/blob/"
    "31a17bfdb70bab6f62a13d21816a5339b911d6e3/benchmarks/"
    "llama3_h100_202412_torchtitan.md"
)
_TORCHTITAN = {32_768: 3890, 65_536: 2540}
# Targets for the tokens per second of each of four GPUs.
_ON_FOUR = {32_768: 7500, 65_536: 4800}
# Kernels that take at least this long are measured to within a few percent.
_LONG_MS = 0.1


def end_to_end() -> str:
    """Returns the section on training steps of Llama-2-7B on one GPU."""
    results = load("bench_e2e")
    first = results["rows"][0]
    text = (
        f"**Training Llama-2-7B on one GPU** (`bench_e2e`): BF16 parameters, sequences "
        f"of {first['seq']:,} tokens, one {results['device']['name']}. `bf16` and `te` "
        "have `optax.adamw` with float32 moments, `coat` and `coat_max` "
        "`coat.fused_update`. Times its best: over the fastest `bf16` row here."
    )
    return section(text, markdown(_OF_STEPS, results["rows"]))


def _rate(row: dict[str, Any], key: str) -> str:
    """Returns the tokens per second of a row, or its error."""
    return f"{row[key]:,.0f}" if key in row else row["error"]


_OF_STEPS = (
    Column("", "case"),
    _BATCH,
    Column("tokens/s", lambda row: _rate(row, "tokens_per_s")),
    *_RATIOS,
    _OPTIMIZER,
    Column("saved activations", "activations_gib", "{:.1f} GiB"),
    _PEAK,
)


def several_gpus() -> str:
    """Returns the section on training steps on several GPUs with FSDP."""
    text = (
        "**Several GPUs**: training steps fully sharded on GPUs of one machine, by "
        "`jax.jit` but for `bf16, shard_map`, where the user's program gathers the "
        "weights. Batches, tokens per second and sizes are those of one GPU. Ratios to "
        "one GPU and to `bf16` are at the same batch, the last one is to the fastest "
        "`bf16` row of the model on as many GPUs."
    )
    return section(text, *map(_of_kind, BY_KIND.values()), _visible())


def _of_kind(name: str) -> str:
    """Returns the device and the table of a results file for one kind of GPU."""
    results = load("bench_e2e", name)
    columns = (
        Column("", "title"),
        Column("", _case),
        Column("GPUs", "gpus"),
        _BATCH,
        Column("tokens/s", lambda row: _rate(row, "tokens_per_s_per_gpu")),
        Column("of one GPU's", "ratio_to_one_gpu", "{:.1%}"),
        *_RATIOS,
        _OPTIMIZER,
        Column("saved", "activations_gib", "{:.1f} GiB"),
        _PEAK,
    )
    names = [ModelSize.of_row(row).name for row in results["rows"]]
    # Only the first row of each model has the model's name.
    titles = (b if b != a else "" for a, b in itertools.pairwise([None, *names]))
    rows = ({"title": t} | r for t, r in zip(titles, results["rows"], strict=True))
    jax = results["versions"]["jax"]
    head = f"{results['device']['name']} (`{name}`), JAX {jax}:"
    return f"{head}\n\n{markdown(columns, rows)}"


def _case(row: dict[str, Any]) -> str:
    """Returns a row's case, with its XLA flags if it has any."""
    flags = row.get("xla_flags")
    return f"{row['case']}, with `{flags}`" if flags else row["case"]


def _visible() -> str:
    """Returns a sentence on training on one GPU while a second one is visible."""
    files = [load("bench_e2e", f"bench_e2e_visible_{count}") for count in (1, 2)]
    (row,), (one_of_two,) = (results["rows"] for results in files)
    alone, ours = (r["tokens_per_s"] for r in (row, one_of_two))
    return (
        f"A training on one {files[0]['device']['name']} has the same speed where the "
        f"process sees a second one (`bench_e2e_visible_1`, `bench_e2e_visible_2`): "
        f"`coat` trains {row['layers']} layers of Llama-2-7B at batch {row['batch']} "
        f"with {alone:,.0f} tokens/s alone and {ours:,.0f} next to another "
        f"({ours / alone - 1:+.1%})."
    )


def long_sequences() -> str:
    """Returns the section on training steps with long sequences."""
    results = load("bench_e2e", "bench_e2e_long")
    device, jax = results["device"], results["versions"]["jax"]
    text = (
        "**Long sequences** (`bench_e2e_long`): steps of Llama-3-8B with all its "
        f"layers on {device['count']} {device['name']} with JAX {jax}. With `fsdp` "
        "each GPU has one sequence, with `context` both split one. The "
        "published figures are torchtitan's: Llama 3.1 8B on eight H100s of 96 GB, "
        "fully sharded and at the longer sequence over two GPUs each, with float8 "
        f"matmuls and full activation checkpointing ([table 2]({_TORCHTITAN_PAGE})). "
        "The targets are for four GPUs, which were not measured."
    )
    columns = (
        Column("sequence", "seq", "{:,}"),
        Column("mesh", "mesh", "`{}`"),
        Column("", "case"),
        Column("ms", "ms_per_step", "{:,.0f}"),
        Column("tokens/s a GPU", "tokens_per_s_per_gpu", "{:,.0f}"),
        Column("target on four", lambda row: _ON_FOUR[row["seq"]], "{:,}"),
        Column("published, H100", lambda row: _TORCHTITAN[row["seq"]], "{:,}"),
        _OPTIMIZER,
        Column("saved", "activations_gib", "{:.1f} GiB"),
        _PEAK,
    )
    return section(text, markdown(columns, results["rows"]))


def estimates() -> str:
    """Returns the section on predicted memory."""
    results = load("estimate")
    text = (
        "**Predicted memory** (`estimate`): `python -m experiments.estimate` predicts "
        "the GiB of a training step by kind, and the largest batch that fits, without "
        "a GPU. Predictions stand here next to measured peaks: the device's, or else "
        f"the compiled step's. {_grown(results['rows'])}"
    )
    columns = (
        Column("", ("model", "case"), "{}, {}"),
        Column("GPUs", "gpus"),
        _BATCH,
        _sum("parameters, gradients", "parameters", "gradients"),
        _sum("optimizer", "optimizer"),
        _sum("saved", "saved"),
        _sum("the rest", "workspace", "gathered", "logits"),
        _sum("predicted", "peak"),
        Column(
            "measured", lambda r: r["device_peak_gib"] or r["step_peak_gib"], "{:.1f}"
        ),
        Column("error", "error_percent", "{:+.1f}%"),
    )
    rows = {(r["model"], r["case"], r["gpus"], r["batch"]): r for r in results["rows"]}
    return section(text, markdown(columns, rows.values()))


def _sum(title: str, *kinds: str) -> Column:
    """Returns a column with the sum of the GiB of some kinds of memory."""
    return Column(title, lambda row: sum(row[f"{k}_gib"] for k in kinds), "{:.1f}")


def _grown(rows: list[dict[str, Any]]) -> str:
    """Returns a sentence on the growth of the optimizer state since measurements."""
    grown = max(row["optimizer_gib"] - row["measured_optimizer_gib"] for row in rows)
    return (
        f"The FP8 state of today is up to {grown:.2f} GiB larger than the measured one "
        "was, so that predictions without it would be lower by as much."
    )


def in_bf16() -> str:
    """Returns the section on the recipe `coat_bf16`."""
    layers, steps = (
        load(name, f"{name}_coat_bf16") for name in ("bench_layer", "bench_e2e")
    )
    text = (
        "**Matmuls in BF16** (`coat_bf16`), which save and step as `coat` does, next "
        f"to other recipes on one {layers['device']['name']}: layers as in the table "
        "above (`bench_layer_coat_bf16`), and training Llama-2-7B as at the top of "
        "this page (`bench_e2e_coat_bf16`)."
    )
    tables = markdown(*_layers(layers)), markdown(_OF_STEPS, steps["rows"])
    return section(text, *tables)


def layer() -> str:
    """Returns the section on one Llama layer."""
    results = load("bench_layer")
    text = (
        f"**One Llama layer** (`bench_layer`): milliseconds of forward and backward "
        f"with BF16 weights and batch 4 on one {results['device']['name']}, all cases "
        "in turns, and times `bf16`, by hidden size and sequence. `bf16` is what "
        "`jax.vjp` saves, behind it are policies of `jax.checkpoint` and "
        "`coat.fp8_remat` of the same layer."
    )
    image = markdown_image("Saved activations and time", "bench_layer", "bench_layer")
    return section(text, markdown(*_layers(results)), image)


def _layers(results: dict[str, Any]) -> tuple[tuple[Column, ...], Iterable[Any]]:
    """Returns the columns and the rows of a table of `bench_layer`, a case a row."""
    times = {row["case"]: {} for row in results["rows"]}
    for row in results["rows"]:
        times[row["case"]][f"{row['hidden']}, {row['seq']}"] = row
    shapes = dict.fromkeys(shape for of_case in times.values() for shape in of_case)
    columns = (
        Column("", lambda of_case: next(iter(of_case.values()))["case"]),
        Column(
            "saved",
            lambda of_case: max(row["saved_units"] for row in of_case.values()),
            "{:.1f}U",
        ),
        *(Column(shape, lambda row, s=shape: time_of(row[s])) for shape in shapes),
    )
    return columns, times.values()


def time_of(row: dict[str, Any]) -> str:
    """Returns a layer's milliseconds, with its speed relative to BF16 in brackets."""
    return f"{row['forward_backward_ms']:.2f} ({row['ratio_to_bf16']:.2f})"


def activations() -> str:
    """Returns the section on saved activations."""
    results = load("activation_memory")
    shape = results["shape"]
    text = (
        f"**Saved activations of one Llama layer** (`activation_memory`): hidden "
        f"{shape['hidden']}, batch {shape['batch']}, sequence {shape['seq']}, counted "
        f"on one {results['device']['name']}; 1U is batch x sequence x hidden x 2 "
        "bytes. `bf16` is what `jax.vjp` saves without any `jax.checkpoint`."
    )
    columns = (
        Column("", "recipe", "`{}`"),
        Column("MiB", "mib", "{:.0f}"),
        Column("U", "units", "{:.2f}"),
        Column("U in the paper", "paper_units"),
    )
    return section(text, markdown(columns, results["rows"]))


def kernels() -> str:
    """Returns the section on kernels."""
    results = load("bench_kernels")
    rows = [row for row in results["rows"] if "ms" in row]
    quick = [row for row in rows if "share_of_copy" in row]
    matmuls = [row for row in rows if "tflop_per_s" in row]
    shape = quick[-1]["shape"]
    text = (
        f"**The kernels** (`bench_kernels`): arrays of {shape} in BF16 on one "
        f"{results['device']['name']}, in turns with what XLA makes of the same "
        "operation; GB/s count the fewest bytes that it needs."
    )
    products = (
        "Matrix products of Llamas' layers at 8,192 and 16,384 tokens, and of 8192^3, "
        "relative to cuBLASLt's FP8 call through XLA: the mean over a row's shapes, "
        "and the worst of them. Where XLA is faster XLA runs. Heads are compared with "
        "cuBLASLt's product and XLA's rotary embeddings and splitting after it, added "
        "ones with an addition after it. These two and blocks have more scales than "
        "what they are compared with. Kernels run one after the other, at what the "
        f"chip may draw{_rested(rows)}."
    )
    return section(
        text,
        markdown(_ELEMENTWISE, [row for row in quick if row["shape"] == shape]),
        *_more_kernels(),
        products,
        markdown(_PRODUCTS, grouped(matmuls, _kernel_and_pass).items()),
    )


_ELEMENTWISE = (
    Column("", "kernel"),
    Column("ms", "ms", "{:.3f}"),
    Column("GB/s", "gb_per_s", "{:,.0f}"),
    Column("of a device copy's", "share_of_copy", "{:.2f}"),
    Column("times XLA", "ratio_to_xla", "{:.2f}"),
)


def _over_rows(title: str, of: Callable[..., float], key: str, form: str) -> Column:
    """Returns a column with a statistic of `key` over the rows of a kind of matmul.

    `of` computes the statistic, and `form` is its format.
    """
    return Column(title, lambda kind: of(row[key] for row in kind[1]), form)


_PRODUCTS = (
    Column("", lambda kind: kind[0]),
    Column("shapes", lambda kind: len(kind[1])),
    _over_rows("TFLOP/s", geometric_mean, "tflop_per_s", "{:,.0f}"),
    _over_rows("times cuBLASLt", geometric_mean, "ratio_to_xla", "{:.2f}"),
    _over_rows("at worst", min, "ratio_to_xla", "{:.2f}"),
)


def _more_kernels() -> list[str]:
    """Returns texts and tables on further measurements of kernels.

    They are activations without a product, gates with other row lengths, and two
    versions of JAX.
    """
    results = load("bench_kernels", "bench_kernels_h100")
    newest = load("bench_kernels", f"bench_kernels_h100_jax_{NEWEST_JAX}")
    shape = "16384 x 8192"
    lone = [row for row in results["rows"] if row["shape"] == shape]
    elementwise = [
        row | {"kernel": f"{row['kernel']}, {row['shape']}"}
        for row in results["rows"]
        if row["kernel"].endswith("to rows") and row["shape"] in _ROWS
    ]
    elementwise.sort(key=lambda row: int(row["shape"].split(" x ")[1]))
    return [
        f"Activations without a product, {shape} on one {results['device']['name']} "
        "(`bench_kernels_h100`):",
        markdown(_ELEMENTWISE, lone),
        "Gates with a scale for each token, of short and of long rows on such GPUs:",
        markdown(_ELEMENTWISE, elementwise),
        _on_both_versions(results, newest),
    ]


def _on_both_versions(oldest: dict[str, Any], newest: dict[str, Any]) -> str:
    """Returns sentences on the kernels' times with two versions of JAX."""
    times = {case_of(row): row for row in oldest["rows"]}
    ratios: dict[bool, list[float]] = {False: [], True: []}
    for row in newest["rows"]:
        other = times[case_of(row)]
        longer = min(row["ms"], other["ms"]) >= _LONG_MS
        ratios[longer].append(row["ms"] / other["ms"])
    short, long = ratios.values()
    new, old = (results["versions"]["jax"] for results in (newest, oldest))
    return (
        f"With JAX {new} on the GPU of the short rows (`bench_kernels_h100_jax_{new}`) "
        f"{len(long)} kernels that take at least {_LONG_MS:g} ms take {min(long):.2f} "
        f"to {max(long):.2f} times as long as with {old}, at the median "
        f"{median(long):.3f}. Shorter ones vary more from program to program: "
        f"{min(short):.2f} to {max(short):.2f} times, median {median(short):.3f}."
    )


def _rested(rows: list[dict[str, Any]]) -> str:
    """Returns a clause on the TFLOP/s of kernels on a chip that rests before each call.

    The clause is empty if no row has this measurement.
    """
    rates = {
        row["kernel"]: f"{row['rested_tflop_per_s']:,.0f}"
        for row in rows
        if "rested_tflop_per_s" in row
    }
    if not rates:
        return ""
    listed = ", ".join(f"{kernel} {rate}" for kernel, rate in rates.items())
    return f"; where it rests before each call, 8192^3 has {listed} TFLOP/s"


def _kernel_and_pass(row: dict[str, Any]) -> str:
    """Returns the kernel of a matmul and its pass, or "8192^3" for a cube."""
    last = row["name"].rsplit(", ", 1)[-1]
    return f"{row['kernel']}, {'8192^3' if last == 'cube' else last}"
