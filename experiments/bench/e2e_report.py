"""Tables and figures of training steps of full models, next to the paper's.

The paper's numbers are in its table 7, and figure 1 shows them. Measured rows come from
the results file `bench_e2e`, or from `by_kind` for one to four GPUs. Predicted rows
come from the results file `estimate`, or from `estimate_table_7` for the paper's GPUs
and for one to eight GPUs.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from experiments.bench.e2e import BY_KIND, PLAIN_CASES
from experiments.bench.model_step import ModelSize
from experiments.common.memory_figure import LOOKS, Look, stack
from experiments.common.paper import MODELS, TABLE_7
from experiments.common.results import load
from experiments.common.style import RECIPE_COLORS, RECIPE_MARKERS, framed
from experiments.common.tables import Column, new_table, table

Row = dict[str, Any]
_MODEL = "Llama-2-7B"
_RECIPES = ("bf16", "te", "coat", "coat_max")
# The batch that most cases were measured with, and the batch of the paper's 7B model.
_BATCH = 2
# The number of GPUs of the paper's row that a single H200 with 141 GB is compared to.
_PAPER_GPUS = 4
_MIB_PER_GIB = 1024
_PARTS = ("optimizer", "saved", "the rest", "peak")
# The panels of the figure of speeds.
_SCALED = (
    ("H100", ModelSize()),
    ("H200", ModelSize.of("llama2-7b", seq=4096)),
    ("H200", ModelSize.of("llama3-8b", seq=8192)),
)
# Published tokens per second of each of eight H100s in FP8, by NVIDIA's NeMo and by its
# Megatron Bridge (docs.nvidia.com/nemo/megatron-bridge, "Performance Summary").
PUBLISHED = {
    ModelSize.of("llama2-7b", seq=4096): ("NeMo", 16_934),
    ModelSize.of("llama3-8b", seq=8192): ("Megatron Bridge", 14_451),
}
_PUBLISHED_GPUS = 8
# The kinds of memory in the figure. The last is all that the paper does not print.
_KINDS = {
    "optimizer": "optimizer",
    "saved": "saved activations",
    "parameters": "parameters",
    "gradients": "gradients",
    "rest": "the rest",
    "unprinted": "parameters, gradients and the rest, in the paper",
}
_LOOKS = LOOKS | {"rest": LOOKS["workspace"], "unprinted": Look("#5f6b7d", "xx")}


def memory(measured: Sequence[Row], predicted: Sequence[Row]) -> Table:
    """Returns a table of the 7B model's measured and predicted memory, by recipe."""
    title = f"{_MODEL}, batch {_BATCH} a GPU, GiB; the paper's in GB"
    result = new_table(title, "", *_PARTS, "predicted peak", "error")
    peaks = {(r["case"], r["batch"]): r for r in predicted if r["of"] == "bench_e2e"}
    paper = TABLE_7[_MODEL, _PAPER_GPUS, _BATCH]
    for row in measured:
        if row["case"] not in _RECIPES or row["batch"] != _BATCH:
            continue
        sizes = (row["optimizer_gib"], row["activations_gib"], row["device_peak_gib"])
        prediction = peaks[row["case"], _BATCH]
        result.add_row(
            f"{row['case']}, one H200",
            *_parts(*sizes),
            f"{prediction['peak_gib']:.1f}",
            f"{prediction['error_percent']:+.1f}%",
        )
        if row["case"] in paper:
            label = f"  paper, {_PAPER_GPUS} H100s"
            result.add_row(label, *_parts(*paper[row["case"]][:3]), "", "")
    return result


def _parts(optimizer: float, saved: float, peak: float) -> list[str]:
    """Returns four cells: optimizer, saved activations, the rest, and the peak."""
    return [
        f"{size:.1f}" for size in (optimizer, saved, peak - optimizer - saved, peak)
    ]


def speed(measured: Sequence[Row]) -> Table:
    """Returns a table of the measured tokens per second, by case and batch."""
    columns = (
        Column("", "case"),
        Column("batch", "batch"),
        Column("tokens/s", "tokens_per_s", "{:,.0f}"),
        Column("x bf16, same batch", "ratio_to_bf16", "{:.2f}", missing=""),
        Column("x fastest bf16", "ratio_to_best_bf16", "{:.2f}"),
    )
    return table(f"{_MODEL} on one H200, here", columns, measured)


def by_kind() -> dict[str, list[Row]]:
    """Returns the rows of the results files of one to four GPUs, by kind of GPU."""
    return {kind: load("bench_e2e", name)["rows"] for kind, name in BY_KIND.items()}


def several(measured: Mapping[str, Sequence[Row]], predicted: Sequence[Row]) -> Table:
    """Returns a table of the measured steps of full models on one to four GPUs."""
    peaks = {(r["of"], *_place(r["model"], r)): r for r in predicted}
    rows = []
    for kind, row in ((kind, row) for kind, rows in measured.items() for row in rows):
        model = ModelSize.of_row(row)
        is_preset = model.preset and model == ModelSize.of(model.preset, model.seq)
        if not is_preset or row.get("xla_flags"):
            continue
        prediction = peaks[BY_KIND[kind], *_place(model.name, row)]
        names = {"model": MODELS[model.preset], "kind": kind}
        rows.append(row | names | {"prediction": prediction})
    columns = (
        Column("", "model"),
        Column("sequence", "seq", "{:,}"),
        Column("GPUs", ("gpus", "kind"), "{} {}"),
        Column("", "case"),
        Column("batch", "batch"),
        Column("tokens/s", _or_error("tokens_per_s_per_gpu"), "{:,.0f}"),
        Column("x bf16", "ratio_to_best_bf16", "{:.2f}", missing=""),
        Column("peak, GiB", _peak, "{:.1f}"),
        Column("predicted", lambda row: row["prediction"]["peak_gib"], "{:.1f}"),
        Column("error", lambda row: row["prediction"]["error_percent"], "{:+.1f}%"),
    )
    title = (
        "H100s of 80 GB, H200s of 141 GB, here; tokens/s and memory of each GPU; "
        "x bf16: times the fastest bf16"
    )
    return table(title, columns, rows)


def _or_error(key: str) -> Callable[[Row], Any]:
    """Returns a function of a row: it returns the row's error or else `row[key]`."""
    return lambda row: row.get("error") or row[key]


def _peak(row: Row) -> float | None:
    return row.get("device_peak_gib") or row.get("peak_gib")


def _place(model: str, row: Row) -> tuple[str, str, int, int]:
    return model, row["case"], row["gpus"], row["batch"]


def draw_scaling(measured: Mapping[str, Sequence[Row]]) -> Figure:
    """Draws the tokens per second of each GPU against the number of GPUs.

    There is a panel for each model and kind of GPU in `_SCALED`. Points show the
    fastest batch that was measured, with its size as a label. They are compared with
    points of the paper or with points that others have published.
    """
    size = (4.2 * len(_SCALED), 4)
    figure = Figure(figsize=size, layout="constrained", dpi=150)
    panels = figure.subplots(1, len(_SCALED), sharey=True)
    for axes, (kind, model) in zip(panels, _SCALED, strict=True):
        for recipe in ("bf16", "te", "coat"):
            look = {"color": RECIPE_COLORS[recipe], "marker": RECIPE_MARKERS[recipe]}
            best = _fastest(measured[kind], model, recipe)
            rates = {gpus: _rate(row) for gpus, row in best.items()}
            axes.plot(*_line(rates), label=f"{recipe}, here", **look)
            for gpus, rate in rates.items():
                offset = {"xytext": (6, 6), "textcoords": "offset points"}
                text = f"batch {best[gpus]['batch']}"
                axes.annotate(text, (gpus, rate), fontsize=8, **offset)
            if model == ModelSize():
                look |= {"linestyle": ":", "markerfacecolor": "white"}
                axes.plot(*_line(_papers(recipe)), label=f"{recipe}, paper", **look)
        if model in PUBLISHED:
            name, rate = PUBLISHED[model]
            look = {"color": "black", "marker": "*", "linestyle": "none"}
            axes.plot([_PUBLISHED_GPUS], [rate], label=f"FP8 on H100s, {name}", **look)
        axes.set_xscale("log", base=2)
        axes.set_xticks([1, 2, 4, 8], labels=["1", "2", "4", "8"])
        axes.set_xlim(0.85, 11)
        axes.set_xlabel(f"GPUs ({kind})")
        title = f"{MODELS[model.preset]}, {model.seq:,} tokens a sequence"
        axes.set_title(title, loc="left", fontsize=10)
        axes.legend(frameon=False, fontsize=8, ncols=2, loc="lower left")
        framed(axes)
    panels[0].set_ylabel("tokens/s of each GPU, at its fastest batch")
    low, high = panels[0].get_ylim()
    panels[0].set_ylim(0, high + 0.05 * (high - low))
    return figure


def _fastest(measured: Sequence[Row], model: ModelSize, recipe: str) -> dict[int, Row]:
    """Returns the rows of a recipe's fastest batches, by the number of GPUs."""
    fastest: dict[int, Row] = {}
    for row in sorted(measured, key=_rate):
        of_it = ModelSize.of_row(row) == model and _recipe(row["case"]) == recipe
        if of_it and "error" not in row:
            fastest[row["gpus"]] = row
    return fastest


def _papers(recipe: str) -> dict[int, float]:
    """Returns the paper's tokens/s of each GPU for the 7B model, by number of GPUs."""
    return {
        gpus: values[recipe][-1]
        for (model, gpus, _), values in TABLE_7.items()
        if model == _MODEL and values[recipe]
    }


def _rate(row: Row) -> float:
    return row.get("tokens_per_s_per_gpu", 0.0)


def _recipe(case: str) -> str:
    """Returns the recipe of a case: "bf16" for all cases without this library."""
    return "bf16" if case in PLAIN_CASES else case


def _line(rates: dict[int, float]) -> tuple[list[int], list[float]]:
    gpus = sorted(rates)
    return gpus, [rates[n] for n in gpus]


def paper_speed() -> Table:
    """Returns a table of the paper's tokens/s of each GPU at the largest batch."""
    heads = ("GPUs", "recipe", "largest batch a GPU", "tokens/s a GPU", "x bf16")
    result = new_table("The paper's, on H100s of 80 GB", "", *heads)
    for (model, gpus, _), by_recipe in TABLE_7.items():
        bf16 = by_recipe["bf16"]
        for recipe, values in by_recipe.items():
            if not values:
                cells = ["out of memory", "", ""]
            else:
                *_, batch, rate = values
                ratio = f"{rate / bf16[-1]:.2f}" if bf16 else ""
                cells = [str(batch), f"{rate:,}", ratio]
            result.add_row(model, str(gpus), recipe, *cells)
    return result


def of_the_paper(predicted: Sequence[Row]) -> Table:
    """Returns a table of predictions for the paper's settings, above its numbers."""
    title = "Predicted, GiB a GPU; the paper's below, GB"
    result = new_table(title, "", "recipe", *_PARTS, "largest batch a GPU")
    rows = [row for row in predicted if row["study"] == "paper"]
    for key, group in itertools.groupby(rows, _setting):
        model, gpus, batch = key
        title = f"{model}, {gpus} GPU{'s' * (gpus > 1)}, batch {batch}"
        for row in group:
            sizes = (row["optimizer_gib"], row["all_saved_gib"], row["peak_gib"])
            most = str(row["largest_batch"] // gpus or "none")
            result.add_row(title, row["recipe"], *_parts(*sizes), most)
            title = ""
            if row["recipe"] in TABLE_7[key]:
                result.add_row("  paper", "", *_printed(TABLE_7[key][row["recipe"]]))
        result.add_section()
    return result


def _setting(row: Row) -> tuple[str, int, int]:
    """Returns the model, the number of GPUs and the batch of one GPU."""
    return row["model"], row["gpus"], row["batch"] // row["gpus"]


def _printed(values: Sequence[float | None]) -> list[str]:
    """Returns the cells for the values of a recipe in the paper's table 7."""
    if not values:
        return ["", "", "", "out of memory", "none"]
    optimizer, saved, peak, batch, _ = values
    if optimizer is None or saved is None or peak is None:
        return ["-", "-", "-", "-", str(batch)]
    return [*_parts(optimizer, saved, peak), str(batch)]


def of_gpus(predicted: Sequence[Row]) -> Table:
    """Returns a table of the predicted largest batches, by recipe and number of GPUs.

    Each cell has the largest batch of a GPU for every size of a GPU's memory.
    """
    rows = [row for row in predicted if row["study"] == "gpus"]
    memories = sorted({row["gpu_memory_gib"] for row in rows})
    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    sizes = " / ".join(f"{memory} GB" for memory in memories)
    title = f"Predicted: the largest batch of a GPU that has {sizes}"
    result = new_table(title, "", "sequence", "GPUs", *recipes)
    most: dict[tuple[str, int, int], dict[str, list[str]]] = {}
    for row in sorted(rows, key=lambda row: row["gpu_memory_gib"]):
        key = row["model"], row["sequence"], row["gpus"]
        cells = most.setdefault(key, {recipe: [] for recipe in recipes})
        cells[row["recipe"]].append(str(row["largest_batch"] // row["gpus"] or "none"))
    for (model, sequence, gpus), cells in most.items():
        batches = (" / ".join(cells[recipe]) for recipe in recipes)
        result.add_row(model, f"{sequence:,}", str(gpus), *batches)
    return result


def draw_shares(predicted: Sequence[Row], model: str = "Llama-2-13B") -> Figure:
    """Draws a model's memory by kind, as predicted and as in the paper's figure 1.

    There is a panel for each number of GPUs for which the paper has all recipes.

    Args:
      predicted: The rows of `estimate_table_7`.
      model: The model's name in the paper's table 7.
    """
    chosen = [k for k, v in TABLE_7.items() if k[0] == model and all(v.values())]
    figure = Figure(figsize=(9, 1 + 3 * len(chosen)), layout="constrained", dpi=150)
    panels = figure.subplots(len(chosen), 1, sharex=True, squeeze=False)
    for axes, key in zip(panels.flat, chosen, strict=True):
        bars: dict[str, dict[str, float]] = {}
        for row in predicted:
            if row["study"] == "paper" and _setting(row) == key:
                bars[f"{row['recipe']}, predicted"] = _kinds(row)
                if values := TABLE_7[key].get(row["recipe"]):
                    bars[f"{row['recipe']}, paper"] = _paper_kinds(*values[:3])
        parts = {k: [bar.get(k, 0.0) for bar in bars.values()] for k in _KINDS}
        stack(axes, list(bars), parts, names=_KINDS, looks=_LOOKS)
        _, gpus, batch = key
        title = f"{model}, {gpus} GPUs, batch {batch} a GPU"
        axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel("memory of a GPU at the peak of a step, GiB (the paper's: GB)")
    style = {"loc": "outside lower center", "ncols": 3, "frameon": False, "fontsize": 8}
    figure.legend(*axes.get_legend_handles_labels(), **style)
    return figure


def _kinds(row: Row) -> dict[str, float]:
    """Returns the predicted GiB of each kind of memory that the figure shows."""
    sizes = {kind: row[f"{kind}_gib"] for kind in list(_KINDS)[:4]}
    return sizes | {"rest": row["peak_gib"] - sum(sizes.values())}


def _paper_kinds(optimizer: float, saved: float, peak: float) -> dict[str, float]:
    """Returns the paper's GB of each kind of memory that the figure shows."""
    unprinted = peak - optimizer - saved
    return {"optimizer": optimizer, "saved": saved, "unprinted": unprinted}


def live(rows: Sequence[Row]) -> Table:
    """Returns a table of what `estimate.live` measured and predicted, in MiB."""
    first = rows[0]
    columns = (
        Column("", "case"),
        Column("ms a step", _or_error("ms_per_step"), "{:,.1f}"),
        Column("tokens/s", "tokens_per_s", "{:,.0f}", missing=""),
        _mib("optimizer", lambda row: row.get("optimizer_gib")),
        _mib("saved", lambda row: row.get("activations_gib")),
        _mib("peak", _peak),
        _mib("predicted for a GPU", lambda row: row["predicted_peak_gib"]),
    )
    title = (
        f"{first['layers']} layers of {first['hidden']}, one sequence of "
        f"{first['seq']} tokens; sizes in MiB"
    )
    return table(title, columns, rows)


def _mib(title: str, gib: Callable[[Row], float | None]) -> Column:
    """Returns a column that shows a size in MiB.

    `gib` is a function of a row that returns the size in GiB, or None.
    """

    def size(row: Row) -> float | None:
        gib_of_row = gib(row)
        return None if gib_of_row is None else gib_of_row * _MIB_PER_GIB

    return Column(title, size, "{:,.1f}", missing="")
